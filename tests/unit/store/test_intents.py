"""Protects intents: they block tags while their maker may be at work, and otherwise can be cleared."""

from __future__ import annotations

import itertools
import os

import pytest
from msgspec.structs import replace

from ckstore._testing import repository_of
from ckstore.errors import BackendError, CapacityError, ConflictError
from ckstore.format import paths as layout
from ckstore.format.records import IntentRecord, encode_record
from ckstore.hashing import new_token
from ckstore.io.backend import Distant
from ckstore.io.memory import MemoryBackend
from ckstore.processes import boot_identity, process_started
from ckstore.store.tags import Tags, intents_in, make_intents, remove_abandoned
from support.gc_histories import once, other_handle

HOUR = 3600
IN_A_CONTAINER = IntentRecord(
    host="node-a",
    boot_id=boot_identity().rpartition("/")[0] + "/pid:[1]",
    pid=7,
    process_started="17",
    token="ab" * 16,
    acquired_ns=1,
    heartbeat_ns=1,
    what="delete",
)
"""A maker of this boot in another pid namespace."""

ELSEWHERE = replace(IN_A_CONTAINER, host="node-b", boot_id="machine-b/boot/namespace")
TWIN = replace(IN_A_CONTAINER, boot_id=boot_identity().partition("/")[0] + "/another/" + boot_identity()[-10:])
"""A maker on a machine cloned from the same image."""

TORN = b'{"kind": "intent", "xxh3'
NEWER = encode_record(IN_A_CONTAINER).replace(b'"what"', b'"why": "a newer field", "what"')


@pytest.fixture
def memory_backend(clock):
    made = MemoryBackend(clock=clock)
    for folder in (*layout.TOP_FOLDERS, layout.tags_folder("main"), layout.claims_folder("main")):
        made.make_folder(folder)
    made.make_folder(layout.manifests_folder("main"))
    return made


@pytest.fixture
def tags(memory_backend, clock):
    return Tags(memory_backend, "main", clock)


def leave(memory_backend, content, seq=3):
    """Leave an intent of another process, and return its path."""
    path = layout.intent_name("main", seq, new_token())
    memory_backend.create(path, content if isinstance(content, bytes) else encode_record(content), sync=False)
    return path


def put(tags, seq=3):
    tags.put("best", seq=seq, step=seq, checkpoint_id=bytes(32), is_dropped=lambda seq: False)


def rechecksummed(content):
    """Return a record of a newer writer with a correct checksum."""
    from ckstore.format.wire import xxh3_64

    body = content[content.index(b'"body":') + 7 : content.rindex(b"}")]
    before = content[: content.index(b'"xxh3":"') + 8]
    return before + f"{xxh3_64(body):016x}".encode() + content[len(before) + 16 :]


@pytest.mark.parametrize(
    "content",
    [IN_A_CONTAINER, ELSEWHERE, TWIN, TORN, b"", rechecksummed(NEWER)],
    ids=["other namespace", "other host", "twin", "torn", "empty", "newer"],
)
def test_intent_of_unknown_maker_counts_until_old(memory_backend, tags, clock, content):
    path = leave(memory_backend, content)
    clock.now += 5.9 * HOUR
    assert remove_abandoned(memory_backend, clock, "main") == 0
    with pytest.raises(ConflictError, match="gc STORE --clear-intents") as caught:
        put(tags)
    assert path in str(caught.value)
    clock.now += 0.2 * HOUR
    put(tags)
    assert remove_abandoned(memory_backend, clock, "main") == 1
    assert memory_backend.stat(path) is None


def test_intent_of_newer_version_names_its_maker(memory_backend, clock):
    leave(memory_backend, rechecksummed(NEWER))
    (intent,) = intents_in(memory_backend, clock, "main")
    assert intent.words.startswith("an intent to delete by pid 7 on host node-a")


def test_clock_jump_does_not_age_an_intent(memory_backend, clock):
    path = leave(memory_backend, ELSEWHERE)

    class Jumped(type(clock)):
        def now_ns(self):
            return clock.now_ns() + 10**6 * HOUR * 10**9

    assert remove_abandoned(memory_backend, Jumped(), "main") == 0, "the backend's time says that it is young"
    assert memory_backend.stat(path) is not None


def test_intent_of_living_process_never_expires(memory_backend, tags, clock):
    parent = os.getppid()
    alive = replace(IN_A_CONTAINER, boot_id=boot_identity(), pid=parent, process_started=process_started(parent))
    leave(memory_backend, alive)
    clock.now += 100 * HOUR
    with pytest.raises(ConflictError, match=f"pid {parent}") as caught:
        put(tags)
    assert "clear-intents" not in str(caught.value)


def test_intents_are_created_atomically(memory_backend, clock, monkeypatch):
    seen = []

    def look(*_, **__):
        names = memory_backend.list_names(layout.claims_folder("main"))
        seen.extend(
            memory_backend.read_bytes(f"{layout.claims_folder('main')}/{name}", nbytes_max=4096) for name in names
        )

    for call in ("create", "link", "unlink"):
        once(monkeypatch, MemoryBackend, call, before=look, after=look)
    paths = make_intents(memory_backend, clock, "main", [1, 2, 3], "delete")
    assert len(seen) > 0
    assert set(seen) == {memory_backend.read_bytes(paths[0], nbytes_max=4096)}
    assert len(intents_in(memory_backend, clock, "main")) == 3


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_failed_intents_leave_none(memory_backend, clock, monkeypatch, fails_at):
    link, count = memory_backend.link, iter(range(3))

    def full(source, target):
        if next(count) == fails_at:
            raise CapacityError("the disk is full")
        link(source, target)

    monkeypatch.setattr(memory_backend, "link", full)
    with pytest.raises(CapacityError):
        make_intents(memory_backend, clock, "main", [1, 2, 3], "delete")
    assert memory_backend.list_names(layout.claims_folder("main")) == []
    assert memory_backend.list_names(layout.TMP_FOLDER) == []


@pytest.mark.parametrize("request_concurrency", [1, 4])
@pytest.mark.parametrize("fails_at", [0, 1, 4])
def test_failed_intents_in_a_bucket_leave_none(clock, monkeypatch, fails_at, request_concurrency):
    memory_backend, count = MemoryBackend(clock=clock), itertools.count()
    memory_backend.make_folder(layout.claims_folder("main"))
    for name, value in (("request_concurrency", request_concurrency), ("list_deep", lambda folder: [])):
        monkeypatch.setattr(memory_backend, name, value, raising=False)
    assert isinstance(memory_backend, Distant)
    create = memory_backend.create

    def refuse(name, content, *, sync):
        if next(count) == fails_at:
            raise BackendError("no answer")
        create(name, content, sync=sync)

    monkeypatch.setattr(memory_backend, "create", refuse)
    with pytest.raises(BackendError):
        make_intents(memory_backend, clock, "main", [1, 2, 3, 4, 5], "delete")
    assert memory_backend.list_names(layout.claims_folder("main")) == []


def test_tag_after_cleared_intent_stops_the_drop(store, monkeypatch):
    """The drop has read the tags and is delayed. A collection clears its intent, and a tag is set."""
    seq = store.commit({"n": 1}, 1).seq
    store.commit({"n": 2}, 2)
    parts = repository_of(store)
    manifests = type(parts.manifests)

    def lose_intent():
        remove_abandoned(parts.backend, parts.clock, "main", everyone=True)
        parts.tags.put("best", seq=seq, step=1, checkpoint_id=bytes(32), is_dropped=parts.manifests.is_marked)

    once(monkeypatch, manifests, "mark_dropped", before=lose_intent)
    with pytest.raises(ConflictError, match="removed the intent of this process"):
        store.delete(f"seq:{seq}")
    assert store.tags() == {"best": seq}
    assert store.steps() == [1, 2]


def test_gc_reports_intents_and_clears_them_on_request(store, backend):
    store.commit({"n": 1}, 1)
    leave(backend, IN_A_CONTAINER, seq=0)
    done = other_handle(store).gc().done
    assert done.intents == 0
    assert [words.partition(", made")[0] for words in done.waits_for] == [
        "run main, seq 0: an intent to delete by pid 7 on host node-a"
    ]
    assert other_handle(store).gc(clear_intents=True).done.intents == 1
    store.tag(1, "best")
