"""Requests to a bucket: the only module that imports obstore.

A small object is written under a condition, and a pack in parts, several concurrently. Afterwards the object is read
back. If a response was lost, was a conflict, or was an error with a success status, only the read-back decides whether
the write succeeded.

Invariants:
- ``put_new`` never replaces an existing object. Every small object carries a random token of the attempt that wrote it,
  which tells a success with a lost response from an object of another writer.
- Messages contain only the HTTP status and error code of a response, never other text.
- Credentials come from the environment, a profile, or the role of the machine, never from an address. They are not
  logged, shown or stored. obstore reads keys from the environment, web identities, and roles of containers and
  machines; this module adds profiles, endpoints without TLS, and checks of the settings.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import obstore
import obstore.exceptions
import obstore.store

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.config import MIB
from ckstore.errors import BackendError, CkstoreError, MalformedError, UnreachableError, UsageError
from ckstore.hashing import new_token
from ckstore.io.remote import check_address
from ckstore.io.remote.errors import FINAL, RequestError, check_describes, checked, classify, error_for

if TYPE_CHECKING:
    from typing_extensions import Buffer


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_OTHER_SOURCES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)


def allows_plain_http() -> bool:
    """Return True if the environment sets an endpoint without TLS, such as a server on this machine."""
    return any(os.environ.get(name, "").lower().startswith("http://") for name in _ENDPOINTS)


def profile_credentials() -> dict[str, Any]:
    """Return keys and region of the active AWS profile, for obstore; empty if the environment has other credentials.

    Raises:
        UnreachableError: The profile in ``AWS_PROFILE`` does not exist.
    """
    wanted = os.environ.get("AWS_PROFILE", "")
    if not wanted and any(os.environ.get(name) for name in _OTHER_SOURCES):
        return {}
    profile = wanted or "default"
    keys = _section("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile)
    settings = _section("AWS_CONFIG_FILE", "config", profile if profile == "default" else f"profile {profile}")
    if wanted and not keys and not settings:
        raise UnreachableError(
            f"the AWS profile {wanted!r} does not exist",
            where="AWS_PROFILE",
            todo="check ~/.aws/credentials and ~/.aws/config",
        )
    merged = {**settings, **keys}
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region": "region",
    }
    found = {ours: merged[theirs] for theirs, ours in names.items() if merged.get(theirs)}
    if os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        found.pop("region", None)
    return found


_ADDRESSES = {
    "s3": (
        *_ENDPOINTS,
        "AWS_ENDPOINT_URL_STS",
        "AWS_METADATA_ENDPOINT",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_MSI_ENDPOINT", "AZURE_STORAGE_AUTHORITY_HOST"),
}
_WORDS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_SAS_TOKEN"),
}
_WORD = re.compile(r"[!-~]*", re.ASCII)


def check_settings(scheme: str, profile: Mapping[str, str]) -> None:
    """Check the settings in the environment and the profile that obstore would reject unclearly.

    Raises:
        UsageError: An endpoint is not an ``http://`` or ``https://`` URL, or a key or region contains an
            invalid character, such as a space. The message names the variable and does not repeat secrets.
    """
    for name in _ADDRESSES[scheme]:
        value = os.environ.get(name, "")
        if value and not _is_endpoint(value):
            lacks_scheme = "//" not in value and _is_endpoint(f"http://{value}")
            raise UsageError(
                "an endpoint in the environment must be http://HOST or https://HOST, with :PORT if needed",
                where=f"{name}={'...' if '@' in value else value}"[:200],
                todo=f"add http:// or https://, as in {name}=http://{value}"
                if lacks_scheme
                else "correct the variable",
            )
    words = {name: os.environ.get(name, "") for name in _WORDS.get(scheme, ())}
    words |= {f"{name} of the profile": value for name, value in profile.items()}
    for name, value in words.items():
        if not _WORD.fullmatch(value):
            raise UsageError(
                "a credential or region contains a space, a line break or another invalid character",
                where=name,
                todo="set it again without the extra characters, which often come from copying",
            )


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and is_host and "@" not in parts.netloc and bool(_WORD.fullmatch(text))


def _section(variable: str, file: str, section: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(Path(os.environ.get(variable) or Path.home() / ".aws" / file).read_text())
    except (OSError, UnicodeDecodeError, configparser.Error, RuntimeError):
        # Missing, or not readable by this user: ignore it.
        return {}
    return dict(parser[section]) if parser.has_section(section) else {}


PART_NBYTES_MIN = 16 * MIB
PART_COUNT_MAX = 9_000
"""A multipart upload has at most 10,000 parts. Some servers require parts of equal size."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Retries, timeouts and concurrency of requests to a bucket.

    Args:
        try_count: Attempts per request.
        pause_seconds: Pause before the second attempt, doubled for each further one.
        pause_seconds_max: Longest pause.
        read_timeout_seconds: Longest time without data on a connection.
        request_timeout_seconds: Longest duration of one request, including its body.
        connect_timeout_seconds: Longest time to open a connection.
        parts_at_once: Parts of one pack that are uploaded concurrently.
        reads_at_once: Ranges that are read concurrently.
    """

    try_count: int = 6
    pause_seconds: float = 0.2
    pause_seconds_max: float = 10.0
    read_timeout_seconds: float = 30.0
    request_timeout_seconds: float = 600.0
    connect_timeout_seconds: float = 10.0
    parts_at_once: int = 4
    reads_at_once: int = 16


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Metadata of an object.

    Attributes:
        nbytes: Size.
        modified_ns: Time of the write, nanoseconds since 1970.
        etag: Version identifier of the server; not always a digest.
        attempt: Token of the attempt that wrote it; empty if it has none.
    """

    nbytes: int
    modified_ns: int
    etag: str
    attempt: str


DEFAULT_OPTIONS = RemoteOptions()

_ATTEMPT = "ckstoreattempt"
"""Metadata key of the attempt token. Letters only, because some servers accept nothing else."""

_PAGE_COUNT = 1000
"""Names per page of a listing: S3 and GCS return at most 1,000, Azure 5,000."""

_ROUNDS = 3
"""Attempts in this module, on top of the retries in obstore, for example after an unusable response."""

Mode = Literal["create", "overwrite"] | dict[Literal["e_tag"], str]
"""Condition of a write: the object is new, no condition, or the object has this version."""

T = TypeVar("T")


class Bucket:
    """The objects below one prefix of a bucket. Thread-safe.

    Args:
        url: ``s3://bucket/prefix``, or the same with ``gs`` or ``az``.
        options: Retries, timeouts and concurrency.
        clock: Used to wait between retries.
    """

    def __init__(self, url: str, *, options: RemoteOptions | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.root = check_address(url)
        self.options = options or DEFAULT_OPTIONS
        self._clock = clock
        self._store = self._connect()

    def location_of(self, key: str) -> str:
        """Return the URL of an object."""
        return f"{self.root}/{key}" if key else self.root

    # Reading

    def head(self, key: str) -> ObjectInfo | None:
        """Return the metadata of an object, or None if it does not exist."""

        def request() -> ObjectInfo:
            result = obstore.get(self._store, key, options={"head": True})
            check_describes(result.meta)
            attempt = next((text for name, text in result.attributes.items() if str(name).lower() == _ATTEMPT), "")
            return _info_of(result.meta, str(attempt))

        try:
            return self._call("reading the metadata of an object", key, request)
        except FileNotFoundError:
            return None

    def get(self, key: str, *, nbytes_max: int) -> bytes:
        """Read a small object whole.

        Raises:
            FileNotFoundError: It does not exist.
            MalformedError: It is larger than ``nbytes_max``.
        """

        def request() -> bytes | None:
            result = obstore.get(self._store, key)
            size = result.meta["size"]
            return None if size > nbytes_max else checked(bytes(result.bytes()), size)

        content = self._call("reading an object", key, request)
        if content is None:
            where = self.location_of(key)
            raise MalformedError("the object is larger than a valid one", where=where, nbytes_max=nbytes_max)
        return content

    def get_range(self, key: str, offset: int, nbytes: int) -> memoryview:
        """Read exactly these bytes; FileNotFoundError if the object does not exist."""

        def request() -> memoryview:
            found = memoryview(obstore.get_range(self._store, key, start=offset, length=nbytes))
            if len(found) != nbytes:
                raise RequestError("transient", f"{len(found)} of {nbytes} bytes were received")
            return found

        return self._call("reading a range", key, request)

    def get_stream(self, key: str, offset: int, nbytes: int, *, piece_nbytes: int) -> Iterator[memoryview]:
        """Read exactly these bytes with one request and yield them as they arrive, in pieces of about ``piece_nbytes``.

        A broken stream is resumed.

        Raises:
            FileNotFoundError: The object does not exist.
            BackendError: The stream broke several times without progress.
        """
        end, rounds_left = offset + nbytes, _ROUNDS
        while offset < end:
            begun = offset
            try:
                for piece in self._open_stream(key, offset, end, piece_nbytes):
                    view = memoryview(piece)
                    offset += len(view)
                    yield view
                failed = RequestError("transient", f"{offset - begun} of {end - begun} bytes were received")
            except FileNotFoundError:
                raise
            except BaseException as error:
                failed = classify(error)
            if offset < end:
                # Progress resets the number of attempts.
                rounds_left = _ROUNDS if offset > begun else rounds_left - 1
                if failed.kind != "transient" or not rounds_left:
                    raise self._error(failed, "reading a range", key) from None
                self._pause(_ROUNDS - rounds_left)

    def _open_stream(self, key: str, offset: int, end: int, piece_nbytes: int) -> Iterator[Buffer]:
        options: Any = {"range": (offset, end)}
        result = self._call("reading a range", key, lambda: obstore.get(self._store, key, options=options))
        if tuple(result.range) != (offset, end):
            raise RequestError("transient", "the response has another range")
        return iter(result.stream(min_chunk_size=piece_nbytes))

    def get_head(self, key: str, nbytes: int) -> bytes:
        """Read the first ``nbytes`` bytes of an object, or all of a shorter one."""

        def request() -> bytes:
            try:
                found = bytes(obstore.get_range(self._store, key, start=0, length=nbytes))
            except obstore.exceptions.BaseError as error:
                # 416: an empty object has no first byte.
                if classify(error).reason.startswith("416"):
                    return b""
                raise
            return checked(found, len(found))

        return self._call("reading an object", key, request)

    def list_folder(self, folder: str) -> list[str]:
        """Return the sorted names of objects and subfolders in a folder."""

        def request() -> dict[str, None]:
            found = obstore.list_with_delimiter(self._store, folder or None)
            paths = [*found["common_prefixes"], *(meta["path"] for meta in found["objects"])]
            return dict.fromkeys(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)

        return sorted(self._listed(folder, request))

    def list_deep(self, folder: str) -> list[tuple[str, ObjectInfo]]:
        """Return every object below a folder, at any depth."""

        def request() -> dict[str, ObjectInfo]:
            pages = obstore.list(self._store, folder or None)
            return {meta["path"]: _info_of(meta) for page in pages for meta in page}

        return list(self._listed(folder, request).items())

    def _listed(self, folder: str, request: Callable[[], dict[str, T]]) -> dict[str, T]:
        """List a folder, twice if the number of names is a multiple of the page size, 0 included.

        An error with a success status reads like an empty last page. A truncated listing would show an empty run to a
        restore, and unreferenced packs to a garbage collection.
        """
        found = self._call("listing a folder", folder, request)
        if len(found) % _PAGE_COUNT == 0:
            found |= self._call("listing a folder", folder, request)
        return found

    # Writing

    def put_new(self, key: str, content: bytes) -> None:
        """Create an object. It exists with this content when this returns.

        Raises:
            FileExistsError: Another object has the name.
            BackendError: The server does not respond. With ``is_uncertain`` the object may still appear.
        """
        self._put(key, content, "create")

    def put_over(self, key: str, content: bytes) -> None:
        """Create or replace an object."""
        self._put(key, content, "overwrite")

    def put_instead(self, key: str, content: bytes, *, etag: str) -> None:
        """Replace the version of an object that has this etag; FileExistsError if the object has another one."""
        self._put(key, content, {"e_tag": etag})

    def _put(self, key: str, content: bytes, mode: Mode) -> None:
        attempt, last = new_token(), RequestError("transient", "the object does not exist afterwards")
        for number in range(_ROUNDS):
            self._pause(number)
            try:
                self._put_once(key, content, mode, attempt)
            except RequestError as failed:
                if failed.kind in FINAL:
                    raise self._error(failed, "writing an object", key) from None
                last = failed
            found = self._look_back(key)
            if isinstance(found, RequestError):
                last = found
                continue
            if found is not None and found.attempt == attempt and found.nbytes == len(content):
                return
            is_refused = found is not None if mode == "create" else mode != "overwrite"
            if is_refused and not (found and isinstance(mode, dict) and found.etag == mode["e_tag"]):
                raise FileExistsError(self.location_of(key))
        raise self._error(last, "writing an object", key, is_uncertain=True) from None

    def _put_once(self, key: str, content: bytes, mode: Mode, attempt: str) -> None:
        attributes: Any = {_ATTEMPT: attempt}
        try:
            obstore.put(self._store, key, content, mode=cast(Any, mode), use_multipart=False, attributes=attributes)
        except BaseException as error:
            raise classify(error) from None

    def _look_back(self, key: str) -> ObjectInfo | RequestError | None:
        try:
            return self.head(key)
        except BackendError as error:
            return RequestError("transient", error.what)

    def put_stream(self, key: str, pieces: Iterable[Buffer], *, nbytes_expected: int) -> None:
        """Upload a large object in parts, several concurrently. It exists with its size when this returns.

        Args:
            key: Name of the object. Other content under it, if there is any, has another size.
            pieces: The bytes in order. The iterator runs once, on another thread.
            nbytes_expected: Estimated size, which decides the size of the parts.

        Raises:
            BackendError: The upload failed, or its outcome is unknown.
            CapacityError: The bucket's quota is full.
        """
        part_nbytes = max(PART_NBYTES_MIN, (nbytes_expected // PART_COUNT_MAX // MIB + 1) * MIB)
        count = _ByteCount()
        failed: RequestError | None = None
        try:
            obstore.put(
                self._store,
                key,
                count.over(pieces),
                use_multipart=True,
                chunk_size=part_nbytes,
                max_concurrency=self.options.parts_at_once,
            )
        except BaseException as error:
            if count.error is not None:
                raise count.error from None
            failed = classify(error)
            if failed.kind in FINAL:
                raise self._error(failed, "writing a pack", key) from None
        # The response may have been lost, or may be an error with a success status.
        found = self._look_back(key)
        if isinstance(found, ObjectInfo) and count.is_complete and found.nbytes == count.nbytes:
            return
        last = failed or RequestError("transient", "the object does not have its size afterwards")
        if last.kind != "transient":
            # The upload may have failed because one of its parts had expired, so a retry can succeed.
            last = RequestError("transient", last.reason)
        raise self._error(last, "writing a pack", key) from None

    def delete(self, key: str) -> None:
        """Remove an object. It may be missing already."""

        def request() -> None:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, key)

        self._call("removing an object", key, request)

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the bucket, replacing ``target``."""
        self._call("copying an object", source, lambda: obstore.copy(self._store, source, target))

    def honours_conditions(self) -> bool:
        """Test that the server refuses to replace an object in a conditional write, and lists it immediately."""
        name, content = f"{new_token()}.probe", b"ckstore probe"
        key = f"tmp/{name}"
        self.put_new(key, content)
        try:
            with contextlib.suppress(RequestError):
                self._put_once(key, content + b", again", "create", new_token())
            found = self.head(key)
            return found is not None and found.nbytes == len(content) and name in self.list_folder("tmp")
        finally:
            # Without permission to delete, a few bytes stay in tmp.
            with contextlib.suppress(CkstoreError):
                self.delete(key)

    # Connecting and retrying

    def _connect(self) -> Any:
        options, more = self.options, {}
        client: Any = {
            "timeout": timedelta(seconds=options.request_timeout_seconds),
            "read_timeout": timedelta(seconds=options.read_timeout_seconds),
            "connect_timeout": timedelta(seconds=options.connect_timeout_seconds),
        }
        if self.root.startswith("s3://"):
            if allows_plain_http():
                client["allow_http"] = True
            more = profile_credentials()
        check_settings(self.root.partition("://")[0], more)
        retries: Any = {
            "max_retries": max(0, options.try_count - 1),
            "retry_timeout": timedelta(seconds=180),
            "backoff": {
                "init_backoff": timedelta(seconds=options.pause_seconds),
                "max_backoff": timedelta(seconds=options.pause_seconds_max),
                "base": 2,
            },
        }
        try:
            return obstore.store.from_url(self.root, client_options=client, retry_config=retries, **more)
        except Exception:
            raise UsageError(
                "obstore rejects this address, or a setting for it in the environment",
                where=self.root,
                todo="check the address, and the environment variables of your cloud provider",
            ) from None

    def _call(self, what: str, key: str, request: Callable[[], T]) -> T:
        """Run a request, and retry it after transient failures."""
        last = RequestError("transient", "not tried")
        for number in range(_ROUNDS):
            self._pause(number)
            try:
                return request()
            except BaseException as error:
                last = classify(error)
            if last.kind == "missing":
                raise FileNotFoundError(self.location_of(key)) from None
            if last.kind != "transient":
                break
        raise self._error(last, what, key) from None

    def _pause(self, number: int) -> None:
        if number:
            self._clock.sleep(min(self.options.pause_seconds_max, self.options.pause_seconds * 2 ** (number - 1)))

    def _error(self, failed: RequestError, what: str, key: str, *, is_uncertain: bool = False) -> CkstoreError:
        return error_for(failed, what, where=self.location_of(key), root=self.root, is_uncertain=is_uncertain)


class _ByteCount:
    """Counts the bytes of an iterator, and stores the exception that it raises."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.is_complete = False
        self.error: BaseException | None = None

    def over(self, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        try:
            for piece in pieces:
                self.nbytes += memoryview(piece).nbytes
                yield piece
            self.is_complete = True
        except BaseException as error:
            self.error = error
            raise


def _info_of(meta: Any, attempt: str = "") -> ObjectInfo:
    modified_ns = int(meta["last_modified"].timestamp()) * 10**9
    return ObjectInfo(meta["size"], modified_ns, meta["e_tag"] or "", attempt)
