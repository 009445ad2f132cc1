"""What a failed request to a bucket means; of the texts of servers and libraries only a status and a code are kept.

Invariants:
- A text that a server or a library made is never passed on: it may hold credentials.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from ckstore.config import KIB
from ckstore.errors import BackendError, CapacityError, CkstoreError, UnreachableError

Kind = Literal["missing", "exists", "wrong place", "refused", "full", "odd name", "other", "transient"]

FINAL: frozenset[Kind] = frozenset({"wrong place", "refused", "full", "odd name"})
"""What asking again, or reading back, does not change."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_FULL_CODES = frozenset(
    {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "EntityTooLarge", "InsufficientCapacity"}
)
_PLACE_CODES = frozenset({"NoSuchBucket", "InvalidBucketName", "PermanentRedirect", "ContainerNotFound"})
_KINDS: dict[str, Kind] = {
    "FileNotFoundError": "missing",
    "NotFoundError": "missing",
    "PermissionDeniedError": "refused",
    "UnauthenticatedError": "refused",
    "AlreadyExistsError": "exists",
    "PreconditionError": "exists",
}
"""Classes of obstore's exceptions, by name: this module does not import it."""

_WORDS: tuple[tuple[str, Kind, str], ...] = (
    ("169.254.169.254", "refused", "no credentials were found"),
    ("timed out", "transient", "it took too long"),
    ("object with invalid path", "odd name", "an object there has a name with an empty part, '.', '..' or worse in it"),
)


class RequestError(Exception):
    """A request that failed.

    Args:
        kind: What it means.
        said: Status and code, or a few words of ours.
    """

    def __init__(self, kind: Kind, said: str) -> None:
        super().__init__(kind, said)
        self.kind = kind
        self.said = said


def classify(error: BaseException) -> RequestError:
    """Return what an exception of obstore means; one of ours, and what is no failure, is raised again."""
    if isinstance(error, RequestError):
        return error
    if type(error).__name__ == "PanicException":
        # A fault of the library in another language, which Python is shown as no ordinary exception.
        return RequestError("other", "the client of buckets has failed inside; a setting for it may be unusable")
    if isinstance(error, CkstoreError) or not isinstance(error, Exception):
        raise error
    text = str(error)
    status = next(iter(_STATUS.findall(text)), "")
    code = next(iter(_CODE.findall(text)), "")
    for word, kind, meaning in _WORDS:
        if not status and word in text:
            return RequestError(kind, meaning)
    said = " ".join(part for part in (status, code) if part) or "no answer, or one that cannot be understood"
    return RequestError(_kind_of(error, status, code), said)


def _kind_of(error: Exception, status: str, code: str) -> Kind:
    if code in _PLACE_CODES:
        return "wrong place"
    if code in _FULL_CODES or status == "507":
        return "full"
    by_class = _KINDS.get(type(error).__name__)
    if by_class is not None and status not in ("409", "500", "503"):
        return by_class
    if status in ("401", "403"):
        return "refused"
    if status == "412":
        return "exists"
    if status.startswith("4") and status not in ("408", "409", "425", "429"):
        return "other"
    return "transient"


def error_for(
    failed: RequestError, what: str, *, where: str, root: str, is_uncertain: bool = False
) -> BackendError | CapacityError:
    """Return the error that a failure is to the caller.

    Args:
        failed: What happened.
        what: What was tried.
        where: With which object.
        root: In which bucket.
        is_uncertain: What was tried may still take effect.
    """
    reason = f"{what} failed ({failed.said})"
    if failed.kind == "wrong place":
        return UnreachableError(f"there is no such bucket ({failed.said})", where=root, todo="check the address")
    if failed.kind == "full":
        return CapacityError(reason, where=where, todo="enlarge the bucket's quota, or remove what lies there")
    if failed.kind == "refused":
        todo = "check the credentials in the environment, profile or role, and what they may do in this bucket"
        return BackendError(reason, where=where, todo=todo, is_refused=True)
    if failed.kind == "odd name":
        todo = "find that object with the tools of your bucket and remove it: nothing of ckstore's is named so"
        return BackendError(reason, where=where, todo=todo)
    todo = "check the network and the server, then try again; what was not acknowledged is not relied upon"
    is_transient = failed.kind == "transient"
    return BackendError(reason, where=where, todo=todo, is_transient=is_transient, is_uncertain=is_uncertain)


def check_describes(meta: Any) -> None:
    """Refuse a success that describes no object: an error in the body of a success has lost its body here.

    Believed, it would be somebody else's object of 0 bytes under a name that is free.
    """
    if not meta["e_tag"] and meta["last_modified"].timestamp() == 0:
        raise RequestError("transient", "a success that describes no object")


def checked(content: bytes, nbytes: int) -> bytes:
    """Refuse a body that came short, or is an error although its status was a success."""
    if len(content) != nbytes:
        raise RequestError("transient", f"{len(content)} bytes came of {nbytes}")
    # Nothing of ours begins so, but an error in the body of a success does.
    if content[:1] == b"<" and b"<Error>" in content[: 4 * KIB]:
        raise RequestError("transient", "a success whose body is an error")
    return content
