"""Classify failed requests to a bucket, and translate them to errors of ckstore.

Invariants:
- Only the HTTP status and the error code of a response appear in messages. Other text from a server or library is
  dropped, because it may contain credentials.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from ckstore.config import KIB
from ckstore.errors import BackendError, CapacityError, CkstoreError, UnreachableError

Kind = Literal["missing", "exists", "wrong place", "refused", "full", "odd name", "other", "transient"]

FINAL: frozenset[Kind] = frozenset({"wrong place", "refused", "full", "odd name"})
"""Failures that a retry cannot change."""

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
"""Exception classes of obstore by name, because this module does not import it."""

_WORDS: tuple[tuple[str, Kind, str], ...] = (
    ("169.254.169.254", "refused", "no credentials were found"),
    ("timed out", "transient", "the request timed out"),
    (
        "object with invalid path",
        "odd name",
        "an object there has a name with an empty part, '.', '..' or a character that is not allowed",
    ),
)


class RequestError(Exception):
    """A failed request, for use inside this package.

    Args:
        kind: The class of the failure.
        reason: HTTP status and error code, or a few words.
    """

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind = kind
        self.reason = reason


def classify(error: BaseException) -> RequestError:
    """Return the failure for an exception of obstore. Errors of ckstore and KeyboardInterrupt are raised."""
    if isinstance(error, RequestError):
        return error
    if type(error).__name__ == "PanicException":
        # A panic of the Rust library, which is not a subclass of Exception.
        return RequestError("other", "the bucket client (obstore) crashed; one of its settings may be invalid")
    if isinstance(error, CkstoreError) or not isinstance(error, Exception):
        raise error
    text = str(error)
    status = next(iter(_STATUS.findall(text)), "")
    code = next(iter(_CODE.findall(text)), "")
    for word, kind, reason in _WORDS:
        if not status and word in text:
            return RequestError(kind, reason)
    reason = " ".join(part for part in (status, code) if part) or "no response, or one that cannot be parsed"
    return RequestError(_kind_of(error, status, code), reason)


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
    """Return the error of ckstore for a failed request.

    Args:
        failed: The failure.
        what: The operation, such as ``"reading an object"``.
        where: URL of the object.
        root: URL of the bucket and prefix.
        is_uncertain: The request may still take effect.
    """
    reason = f"{what} failed ({failed.reason})"
    if failed.kind == "wrong place":
        return UnreachableError(
            f"there is no such bucket ({failed.reason})", where=root, todo="check the bucket name and the endpoint"
        )
    if failed.kind == "full":
        return CapacityError(reason, where=where, todo="enlarge the quota of the bucket, or delete objects")
    if failed.kind == "refused":
        todo = "check the credentials in the environment, profile or role, and their permissions for this bucket"
        return BackendError(reason, where=where, todo=todo, is_refused=True)
    if failed.kind == "odd name":
        todo = "find that object with the tools of your bucket and remove it; ckstore does not use such names"
        return BackendError(reason, where=where, todo=todo)
    todo = "check the network and the server, then try again; no checkpoint depends on the failed request"
    is_transient = failed.kind == "transient"
    return BackendError(reason, where=where, todo=todo, is_transient=is_transient, is_uncertain=is_uncertain)


def check_describes(meta: Any) -> None:
    """Raise if a successful response describes no object, which is an error that was sent with a success status.

    Otherwise a name that is free would look like an existing object of 0 bytes.
    """
    if not meta["e_tag"] and meta["last_modified"].timestamp() == 0:
        raise RequestError("transient", "a success response without the metadata of an object")


def checked(content: bytes, nbytes: int) -> bytes:
    """Return the body of a response; raise if it is too short, or an error sent with a success status."""
    if len(content) != nbytes:
        raise RequestError("transient", f"{len(content)} of {nbytes} bytes were received")
    # No file of ckstore starts like this, but an XML error does.
    if content[:1] == b"<" and b"<Error>" in content[: 4 * KIB]:
        raise RequestError("transient", "a success response with an error in its body")
    return content
