"""Every exception that ckstore raises, grouped by what the caller can do about it.

CkstoreError                        base class; never a ValueError
├── NotFoundError (LookupError)     no such store, checkpoint, tensor, tag, tier    exit 10
├── ConflictError                   another process was first, or has the lease     exit 11
│   └── LockHeldError               another collection holds gc.lock
├── CorruptError                    stored bytes are not what was written           exit 12
│   ├── ChecksumError               a checksum or chunk id differs
│   ├── MalformedError              bytes that this format does not allow
│   └── MissingChunkError           a manifest names a pack or chunk that is missing
├── UnsupportedError                newer format, unknown codec or flag             exit 13
├── CapacityError                   disk, quota or memory is full                   exit 14
├── BackendError                    the storage failed; ``is_transient``            exit 15
│   └── UnreachableError            a store or tier cannot be reached
├── BoundError                      quantization would exceed the policy's bound    exit 16
├── SaverError                      the saver process died or was stopped           exit 17
├── RankError                       another rank failed, was lost or never came     exit 18
└── UsageError (ValueError)         the call was wrong                              exit 2
    └── LeafTypeError               the state has a leaf of an unsupported type

A message says what happened, where, and what to do. Facts that a program may need are attributes. ``code`` is a stable
string that programs can match on: codes are added, and never change their meaning.
"""

from __future__ import annotations

import errno

# ``typing`` is not imported, so that `ckstore ls` starts quickly. Type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from typing import Any, ClassVar, TypeVar

    _Raised = TypeVar("_Raised", bound=BaseException)

_URL = r"([A-Za-z][A-Za-z0-9+.-]*)://(\S*)"
_SECRET = (
    r"(?i)\b(sig|signature|token|access_token|password|passwd|secret|secret_key|access_key|account_key|credential"
    r"|x-amz-[a-z-]+)=[^&\s'\"]+"
)


class CkstoreError(Exception):
    """Base class of all errors that ckstore raises.

    Args:
        what: What happened, as one clause without a full stop.
        where: Where it happened: a path, a pack and offset, a tensor.
        todo: What the user can do about it.
        facts: Values for programs; each one becomes an attribute.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: object = None, todo: str | None = None, **facts: object) -> None:
        self.what = redacted(what)
        self.where = None if where is None else redacted(str(where))
        self.todo = None if todo is None else redacted(todo)
        self.facts = facts
        super().__init__(_message(self.what, self.where, self.todo))

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that are not ordinary attributes.
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (saver, data-loader workers), so pickling keeps message and facts.
        return (_rebuild, (type(self), self.what, self.where, self.todo, self.facts))


def copy_error(error: _Raised) -> _Raised:
    """Return a copy of an error and its causes without tracebacks, to be stored or raised again.

    A traceback keeps its frames alive, and these keep their variables alive, possibly a whole state. An error that
    cannot be copied is returned itself.
    """
    import copy

    try:
        copied = copy.copy(error)
        if type(copied) is not type(error) or str(copied) != str(error):
            return error
    except Exception:
        return error
    copied.__cause__ = None if error.__cause__ is None else copy_error(error.__cause__)
    copied.__context__ = None if error.__context__ is None else copy_error(error.__context__)
    copied.__suppress_context__ = error.__suppress_context__
    return copied


def is_damage(error: CkstoreError) -> bool:
    """Return whether stored bytes are damaged or unreadable, so that restoring another checkpoint may help."""
    is_unreadable = isinstance(error, BackendError) and error.facts.get("errno") == errno.EIO
    return is_unreadable or isinstance(error, CorruptError)


def redacted(text: str) -> str:
    """Return a text without users, passwords, queries and keys of the URLs in it."""
    if "://" not in text and "=" not in text:
        return text
    import re

    if "://" in text:
        text = re.sub(_URL, _without_secrets, text)
    return re.sub(_SECRET, r"\1=...", text) if "=" in text else text


def _without_secrets(found: re.Match[str]) -> str:
    scheme, rest = found.groups()
    # A password may contain "/" and "?", so everything before the last "@" is removed.
    if "@" in rest:
        rest = f"...@{rest.rpartition('@')[2]}"
    address, separator, _ = rest.partition("?")
    return f"{scheme}://{address}{separator and '?...'}"


def _message(what: str, where: str | None, todo: str | None) -> str:
    text = what if where is None else f"{what}: {where}"
    return text if todo is None else f"{text}. {todo[:1].upper()}{todo[1:]}"


def _rebuild(
    kind: type[CkstoreError], what: str, where: str | None, todo: str | None, facts: dict[str, object]
) -> CkstoreError:
    return kind(what, where=where, todo=todo, **facts)


class NotFoundError(CkstoreError, LookupError):
    """The requested store, checkpoint, tensor, tag or tier does not exist. Choose another name."""

    code = "not-found"
    exit_code = 10


class ConflictError(CkstoreError):
    """Another process was first, or holds the lease. Read the store again, or wait."""

    code = "conflict"
    exit_code = 11


class LockHeldError(ConflictError):
    """Another garbage collection holds ``gc.lock``. Wait until it has finished."""

    code = "lock-held"


class CorruptError(CkstoreError):
    """Stored bytes are not what was written. Restore another checkpoint or copy, or run ``ckstore repair``."""

    code = "corrupt"
    exit_code = 12


class ChecksumError(CorruptError):
    """A checksum or digest differs from the recorded one."""

    code = "checksum"


class MalformedError(CorruptError):
    """The bytes are not valid in this format."""

    code = "malformed"


class MissingChunkError(CorruptError):
    """A manifest names a pack or chunk that is missing."""

    code = "missing-chunk"


class UnsupportedError(CkstoreError):
    """A newer format, an unknown codec or flag, or a missing file system operation. Upgrade, or move the store."""

    code = "unsupported"
    exit_code = 13


class CapacityError(CkstoreError):
    """The disk, quota or memory is full. Run ``ckstore gc``, or enlarge it."""

    code = "capacity"
    exit_code = 14


class BackendError(CkstoreError):
    """The storage failed.

    Attributes:
        is_transient: Trying again may help.
        is_refused: This user or these credentials lack the permission. The stored bytes may be intact.
    """

    code = "backend"
    exit_code = 15

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        todo: str | None = None,
        is_transient: bool = False,
        is_refused: bool = False,
        **facts: object,
    ) -> None:
        given = {"is_transient": is_transient, "is_refused": is_refused, **facts}
        super().__init__(what, where=where, todo=todo, **given)


def is_disk_full(error: BaseException) -> bool:
    """Return True if the disk or a quota is full, as opposed to memory or a limit on file size."""
    return isinstance(error, CapacityError) and error.facts.get("errno") in (errno.ENOSPC, errno.EDQUOT)


def is_refused(error: BaseException) -> bool:
    """Return True if the caller lacks permission. Such an error does not show that stored bytes are damaged."""
    return isinstance(error, BackendError) and bool(error.is_refused)


class UnreachableError(BackendError):
    """A store or tier cannot be reached, so its contents are unknown. Mount or configure it."""

    code = "unreachable"


class BoundError(CkstoreError):
    """Quantization would exceed the error bound of the policy. Loosen the bound, or store the tensor exactly."""

    code = "bound"
    exit_code = 16


class SaverError(CkstoreError):
    """The saver process died or was stopped before the checkpoint was durable. Commit again."""

    code = "saver"
    exit_code = 17


class RankError(CkstoreError):
    """Another rank of the job was lost, never joined, or failed. Start the job again; checkpoints are intact."""

    code = "rank"
    exit_code = 18


class ReplayError(CkstoreError):
    """Replayed steps have given other bytes than the run had. Restore on a machine like that of the run.

    Attributes:
        number: Number of the record whose state differs.
        path: Path of the first tensor that differs.
    """

    code = "replay"
    exit_code = 19


class UsageError(CkstoreError, ValueError):
    """The call was wrong. Fix the call."""

    code = "usage"
    exit_code = 2


class LeafTypeError(UsageError):
    """The state has a leaf of an unsupported type at ``path``."""

    code = "leaf-type"


def shown_object(value: object) -> str:
    """Return the repr of an argument for a message, or its type if its repr raises."""
    try:
        return repr(value)[:200]
    except Exception:
        # Very long integers raise ValueError, and classes of users may raise anything.
        return f"a {type(value).__qualname__}"


def counted(count: int, noun: str) -> str:
    """Return ``1 pack`` or ``3 packs`` for a message."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
