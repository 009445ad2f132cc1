"""``config.json``: what a person may change, read when it is needed and replaced whole.

Invariants:
- A change is made durable before it is relied on, and looked at again: of two who change at once, neither is lost.
"""

from __future__ import annotations

from collections.abc import Callable

from ckstore.errors import ConflictError, CorruptError
from ckstore.format import layout
from ckstore.format.records import RECORD_NBYTES_MAX, ConfigRecord, decode_record, encode_record
from ckstore.ids import new_token
from ckstore.io.backend import Backend

_TRIES_MAX = 20


def read_config(backend: Backend) -> ConfigRecord:
    """Return what ``config.json`` says; the defaults where there is none.

    Raises:
        CorruptError: It cannot be read; the message says what a person has to mend.
    """
    where = backend.location_of(layout.CONFIG_FILE)
    try:
        content = backend.read_bytes(layout.CONFIG_FILE, nbytes_max=RECORD_NBYTES_MAX)
    except FileNotFoundError:
        return ConfigRecord()
    try:
        return decode_record(content, ConfigRecord, where=where)
    except CorruptError as error:
        todo = error.todo or "mend it; after editing it by hand, set its xxh3 to null"
        raise type(error)(error.what, where=where, todo=todo) from error


def change_config(backend: Backend, change: Callable[[ConfigRecord], ConfigRecord]) -> ConfigRecord:
    """Replace ``config.json`` by what ``change`` makes of it, durably; return what is there then.

    Args:
        backend: The store.
        change: Called with what is there, perhaps more than once; what it has made must be no change to itself.

    Raises:
        CorruptError: What is there cannot be read.
        ConflictError: Others change it all the time.
    """
    for _ in range(_TRIES_MAX):
        before = read_config(backend)
        after = change(before)
        if after == before:
            return before
        draft = layout.draft_name(new_token(), "config")
        backend.create(draft, encode_record(after), sync=True)
        backend.rename(draft, layout.CONFIG_FILE)
        backend.sync_folder("")
        # Read again: another one's change may have replaced ours, and then ours is made on top of it.
    raise ConflictError(
        "others change the configuration all the time", where=backend.location_of(layout.CONFIG_FILE), todo="try again"
    )
