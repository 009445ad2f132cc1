"""Every exception ckstore raises, ordered by what the caller can do about it.

CkstoreError                        base; never a ValueError
├── NotFoundError (LookupError)     no such store, checkpoint, tensor, tag, tier    exit 10
├── ConflictError                   another was first; the lease is lost            exit 11
│   └── LockHeldError               another collector holds gc.lock
├── CorruptError                    stored bytes are not what was written           exit 12
│   ├── ChecksumError               a checksum or digest differs
│   ├── MalformedError              bytes that no writer of ours makes
│   └── MissingChunkError           a manifest names what is not there
├── UnsupportedError                newer format, unknown codec or flag             exit 13
├── CapacityError                   disk, quota, memory budget                      exit 14
├── BackendError                    the medium failed; ``is_transient``             exit 15
│   └── UnreachableError            a store or tier that is known cannot be reached
├── BoundError                      quantizing would exceed the policy              exit 16
├── SaverError                      the saver died or was ended                     exit 17
└── UsageError (ValueError)         the call was wrong                              exit 2
    └── LeafTypeError               a leaf of a type that cannot be stored

A message has three parts: what happened, where, and what to do. Facts that a program may want are
attributes. ``code`` is an append-only string: programs may match on it, its meaning never changes.
"""

from __future__ import annotations

import copy
import errno
import re
from typing import Any, ClassVar, TypeVar

_Raised = TypeVar("_Raised", bound=BaseException)

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(\S*)")
_SECRET = re.compile(
    r"\b(sig|signature|token|access_token|password|passwd|secret|secret_key|access_key|account_key|credential"
    r"|x-amz-[a-z-]+)=[^&\s'\"]+",
    re.IGNORECASE,
)


class CkstoreError(Exception):
    """Base of everything ckstore raises on purpose.

    Args:
        what: What happened, in one clause without a full stop.
        where: The place: a path, a pack and offset, a tensor.
        todo: What the reader can do about it.
        facts: Values a program may want; each becomes an attribute.
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
        # Reached only for names that are no ordinary attribute: the facts.
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (data-loader workers, test runners); keep message and facts.
        return (_rebuild, (type(self), self.what, self.where, self.todo, self.facts))


def copy_error(error: _Raised) -> _Raised:
    """Return an error that says the same, comes of the same, and was raised nowhere: to be kept, or raised once more.

    A traceback holds frames, and those hold what their variables do: a whole state, or whoever keeps the error. One of
    a kind that cannot be copied is returned as it is.
    """
    try:
        made = copy.copy(error)
        if type(made) is not type(error) or str(made) != str(error):
            return error
    except Exception:
        return error
    made.__cause__ = None if error.__cause__ is None else copy_error(error.__cause__)
    made.__context__ = None if error.__context__ is None else copy_error(error.__context__)
    made.__suppress_context__ = error.__suppress_context__
    return made


def redacted(text: str) -> str:
    """Return a text without what may be secret in the addresses in it: users, passwords, queries and keys."""
    if "://" in text:
        text = _URL.sub(_without_secrets, text)
    return _SECRET.sub(r"\1=...", text) if "=" in text else text


def _without_secrets(found: re.Match[str]) -> str:
    scheme, rest = found.groups()
    # A password may hold any of the characters that end the other parts.
    if "@" in rest:
        rest = f"...@{rest.rpartition('@')[2]}"
    place, separator, _ = rest.partition("?")
    return f"{scheme}://{place}{separator and '?...'}"


def _message(what: str, where: str | None, todo: str | None) -> str:
    text = what if where is None else f"{what}: {where}"
    return text if todo is None else f"{text}. {todo[:1].upper()}{todo[1:]}"


def _rebuild(
    kind: type[CkstoreError], what: str, where: str | None, todo: str | None, facts: dict[str, object]
) -> CkstoreError:
    return kind(what, where=where, todo=todo, **facts)


class NotFoundError(CkstoreError, LookupError):
    """What was asked for does not exist: ask for another name."""

    code = "not-found"
    exit_code = 10


class ConflictError(CkstoreError):
    """Another process was first, or holds the lease: look again, or wait."""

    code = "conflict"
    exit_code = 11


class LockHeldError(ConflictError):
    """Another collector is at work: wait for it."""

    code = "lock-held"


class CorruptError(CkstoreError):
    """Stored bytes are not what was written: use another copy or an older step, or repair."""

    code = "corrupt"
    exit_code = 12


class ChecksumError(CorruptError):
    """A checksum or digest differs from the one recorded."""

    code = "checksum"


class MalformedError(CorruptError):
    """Bytes that no writer of this format makes."""

    code = "malformed"


class MissingChunkError(CorruptError):
    """A manifest names a pack or chunk that is not there."""

    code = "missing-chunk"


class UnsupportedError(CkstoreError):
    """A newer format, an unknown codec or flag, a folder without the needed operations: upgrade or move."""

    code = "unsupported"
    exit_code = 13


class CapacityError(CkstoreError):
    """Disk, quota or memory budget is exhausted: collect, or enlarge."""

    code = "capacity"
    exit_code = 14


class BackendError(CkstoreError):
    """The medium failed; ``is_transient`` says whether trying again can help.

    ``is_refused``: what is stored may be whole, and this user, or these credentials, may not have it.
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
    """Whether space on the disk, or of a quota, is what lacks: not memory, and not the length that a file may have."""
    return isinstance(error, CapacityError) and error.facts.get("errno") in (errno.ENOSPC, errno.EDQUOT)


def is_refused(error: BaseException) -> bool:
    """Whether an error says that the caller may not have what is stored: no word about whether it is whole."""
    return isinstance(error, BackendError) and bool(error.is_refused)


class UnreachableError(BackendError):
    """A store or a tier that is needed cannot be reached, so what it holds is unknown: mount or configure it."""

    code = "unreachable"


class BoundError(CkstoreError):
    """Quantizing would exceed the error bound of the policy: loosen it, or store exactly."""

    code = "bound"
    exit_code = 16


class SaverError(CkstoreError):
    """The saver process died or was ended: commit again; nothing was acknowledged."""

    code = "saver"
    exit_code = 17


class UsageError(CkstoreError, ValueError):
    """The call was wrong: fix the call."""

    code = "usage"
    exit_code = 2


class LeafTypeError(UsageError):
    """A leaf of the state has a type that cannot be stored; ``path`` names it."""

    code = "leaf-type"


def shown_object(value: object) -> str:
    """Return what somebody handed in, for a message: Python refuses to write very long integers in decimal."""
    try:
        return repr(value)[:200]
    except Exception:
        # Objects of users may refuse as well.
        return f"a {type(value).__qualname__}"
