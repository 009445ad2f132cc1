"""What a writer lease says: who holds it, and for whom; read from where it lies."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ckstore.errors import CorruptError
from ckstore.format import layout
from ckstore.format.records import LeaseRecord, decode_record
from ckstore.io.backend import Backend

_log = logging.getLogger("ckstore")

RECORD_NBYTES_MAX = 4096

GONE = "gone"
"""In place of a trainer's start time: that trainer has died, or has let go of its saver."""


@dataclass(frozen=True, slots=True)
class SaverPurpose:
    """What a saver's lease is for: whose saver it is, and which step it is about to publish, if any."""

    trainer_pid: int
    trainer_started: str
    step: int | None = None

    @property
    def text(self) -> str:
        """The purpose as a lease records it."""
        step = "" if self.step is None else str(self.step)
        return f"saver:{self.trainer_pid}:{self.trainer_started}:{step}"

    @classmethod
    def of(cls, text: str) -> SaverPurpose | None:
        """Return the purpose that a lease records; None: it is no saver's."""
        fields = text.split(":")
        if len(fields) != 4 or fields[0] != "saver" or not fields[1].isdecimal():
            return None
        return cls(int(fields[1]), fields[2], int(fields[3]) if fields[3].isdecimal() else None)


def read_lease(backend: Backend, run: str, path: str | None = None) -> LeaseRecord | None:
    """Return what the lease of a run says, or a lease that was moved to another path; None: there is none.

    Raises:
        BackendError, CapacityError: The medium does not answer, which says nothing about the holder.
    """
    try:
        content = backend.read_bytes(path or layout.lease_name(run), nbytes_max=RECORD_NBYTES_MAX)
        return decode_record(content, LeaseRecord, nbytes_max=RECORD_NBYTES_MAX)
    except FileNotFoundError:
        return None
    except CorruptError as error:
        # A torn lease, after a power cut say, protects nobody.
        _log.warning("unreadable lease of run %r is taken over: %s", run, error)
        return None


def describe(holder: LeaseRecord | None) -> str:
    """Return who holds a lease, in words."""
    if holder is None:
        return "someone who has left"
    purpose = SaverPurpose.of(holder.purpose)
    saver = "" if purpose is None else f", the saver of pid {purpose.trainer_pid}"
    return f"pid {holder.pid} on host {holder.host}{saver}"
