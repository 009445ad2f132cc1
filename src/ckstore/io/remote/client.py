"""Objects in a bucket, by name: the only module that imports obstore.

Small objects are made under a condition and then looked at; packs are written in parts, many at a time, and looked at.
A request whose answer was lost, a conflict and an error in the body of a success all end the same way: read back what
lies there, and take it for ours only where it proves to be.

Invariants:
- A name that is taken is never replaced by ``put_new``, whatever is answered to whom; every small object carries the
  token of the try that made it, by which a lost success is told from somebody else's object.
- Nothing of what a server or obstore says is passed on but a status and a code.
- Credentials come from the environment, a profile, or the machine's role; never from an address.

The parts of the standard chain of credentials that obstore leaves out: profiles, endpoints without TLS, checks.

obstore itself takes keys from the environment, web identities, and the roles of containers and machines.

Invariants:
- Nothing read here is logged, shown, or kept in a place that is.
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
from ckstore.io.remote.errors import FINAL, RequestError, check_describes, checked, classify, error_for
from ckstore.io.url import check_address

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
    """Whether the environment names an endpoint without TLS: a server on this machine, or in a closed network."""
    return any(os.environ.get(name, "").lower().startswith("http://") for name in _ENDPOINTS)


def profile_credentials() -> dict[str, Any]:
    """Return the keys and the region of the profile in use, for obstore; nothing where something else gives keys.

    Raises:
        UnreachableError: ``AWS_PROFILE`` names a profile that is in no file.
    """
    wanted = os.environ.get("AWS_PROFILE", "")
    if not wanted and any(os.environ.get(name) for name in _OTHER_SOURCES):
        return {}
    profile = wanted or "default"
    keys = _section("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile)
    settings = _section("AWS_CONFIG_FILE", "config", profile if profile == "default" else f"profile {profile}")
    if wanted and not keys and not settings:
        raise UnreachableError(
            f"there is no profile {wanted!r}", where="AWS_PROFILE", todo="check ~/.aws/credentials and ~/.aws/config"
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
    """Refuse settings in the environment, or a profile, that the client of buckets cannot use.

    Raises:
        UsageError: An endpoint is no ``http://`` or ``https://`` address, or a key or region is no single word; the
            message names the variable, and of a secret nothing else.
    """
    for name in _ADDRESSES[scheme]:
        value = os.environ.get(name, "")
        if value and not _is_endpoint(value):
            lacks_scheme = "//" not in value and _is_endpoint(f"http://{value}")
            raise UsageError(
                "the address of a server in the environment must be http://HOST or https://HOST, with :PORT if needed",
                where=f"{name}={'...' if '@' in value else value}"[:200],
                todo=f"put http:// or https:// before it: {name}=http://{value}" if lacks_scheme else "correct it",
            )
    words = {name: os.environ.get(name, "") for name in _WORDS.get(scheme, ())}
    words |= {f"{name} of the profile": value for name, value in profile.items()}
    for name, value in words.items():
        if not _WORD.fullmatch(value):
            raise UsageError(
                "a setting for the client of buckets holds a space, a line break or another letter that it cannot hold",
                where=name,
                todo="set it again, without what an editor or a copied line has added",
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
        # Not there, or written for others: then it says nothing.
        return {}
    return dict(parser[section]) if parser.has_section(section) else {}


PART_NBYTES_MIN = 16 * MIB
PART_COUNT_MAX = 9_000
"""A multipart upload has at most 10,000 parts, which must be equal for some servers."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How patient a bucket's client is, and how much it does at once.

    Args:
        try_count: How often a request is made before it has failed.
        pause_seconds: How long to wait before the second time; twice as long before each further one.
        pause_seconds_max: And never longer.
        read_timeout_seconds: How long a connection may be silent.
        request_timeout_seconds: How long one request may take, its body included.
        connect_timeout_seconds: How long a connection may take to be made.
        parts_at_once: Parts of one pack that are being written at once.
        reads_at_once: Ranges that are being read at once.
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
    """What is known of an object without reading it.

    Attributes:
        nbytes: Its size.
        modified_ns: When it was made.
        etag: The server's name for this version; not always a digest.
        attempt: The token of the try that made it; empty where it carries none.
    """

    nbytes: int
    modified_ns: int
    etag: str
    attempt: str


DEFAULT_OPTIONS = RemoteOptions()

_ATTEMPT = "ckstoreattempt"
"""Letters only: some servers take nothing else in the name of a property."""

_PAGE_COUNT = 1000
"""Names in a page of a listing: S3 and GCS give at most so many, Azure five times as many."""

_ROUNDS = 3
"""How often is asked anew what obstore has asked as often as the options say, or what was answered in no usable way."""

Mode = Literal["create", "overwrite"] | dict[Literal["e_tag"], str]
"""Under which condition an object is made: that it is new, none, or that a version of it is there."""

T = TypeVar("T")


class Bucket:
    """The objects below one prefix of a bucket.

    Args:
        url: ``s3://bucket/prefix``, or the same with ``gs`` or ``az``.
        options: How patient it is.
        clock: How it waits.
    """

    def __init__(self, url: str, *, options: RemoteOptions | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.root = check_address(url)
        self.options = options or DEFAULT_OPTIONS
        self._clock = clock
        self._store = self._connect()

    def location_of(self, key: str) -> str:
        """Return the address of an object."""
        return f"{self.root}/{key}" if key else self.root

    # Looking

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of an object, or None when there is none."""

        def ask() -> ObjectInfo:
            result = obstore.get(self._store, key, options={"head": True})
            check_describes(result.meta)
            attempt = next((text for name, text in result.attributes.items() if str(name).lower() == _ATTEMPT), "")
            return _info_of(result.meta, str(attempt))

        try:
            return self._call("looking at an object", key, ask)
        except FileNotFoundError:
            return None

    def get(self, key: str, *, nbytes_max: int) -> bytes:
        """Read a small object whole.

        Raises:
            FileNotFoundError: There is none.
            MalformedError: It is larger than ``nbytes_max``.
        """

        def ask() -> bytes | None:
            result = obstore.get(self._store, key)
            size = result.meta["size"]
            return None if size > nbytes_max else checked(bytes(result.bytes()), size)

        content = self._call("reading an object", key, ask)
        if content is None:
            where = self.location_of(key)
            raise MalformedError("the object is larger than it can be", where=where, nbytes_max=nbytes_max)
        return content

    def get_range(self, key: str, offset: int, nbytes: int) -> memoryview:
        """Read exactly these bytes; FileNotFoundError when there is no such object."""

        def ask() -> memoryview:
            found = memoryview(obstore.get_range(self._store, key, start=offset, length=nbytes))
            if len(found) != nbytes:
                raise RequestError("transient", f"{len(found)} bytes came of {nbytes}")
            return found

        return self._call("reading a range", key, ask)

    def get_stream(self, key: str, offset: int, nbytes: int, *, piece_nbytes: int) -> Iterator[memoryview]:
        """Read exactly these bytes in one request, and yield them in pieces of about so many as they come.

        Raises:
            FileNotFoundError: There is no such object.
            BackendError: The stream broke, and what was left of it as well, and again.
        """
        end, rounds_left = offset + nbytes, _ROUNDS
        while offset < end:
            begun = offset
            try:
                for piece in self._open_stream(key, offset, end, piece_nbytes):
                    view = memoryview(piece)
                    offset += len(view)
                    yield view
                failed = RequestError("transient", f"{offset - begun} bytes came of {end - begun}")
            except FileNotFoundError:
                raise
            except BaseException as error:
                failed = classify(error)
            if offset < end:
                # A stream that got on has earned its tries anew.
                rounds_left = _ROUNDS if offset > begun else rounds_left - 1
                if failed.kind != "transient" or not rounds_left:
                    raise self._meaning(failed, "reading a range", key) from None
                self._pause(_ROUNDS - rounds_left)

    def _open_stream(self, key: str, offset: int, end: int, piece_nbytes: int) -> Iterator[Buffer]:
        options: Any = {"range": (offset, end)}
        result = self._call("reading a range", key, lambda: obstore.get(self._store, key, options=options))
        if tuple(result.range) != (offset, end):
            raise RequestError("transient", "another range came")
        return iter(result.stream(min_chunk_size=piece_nbytes))

    def get_head(self, key: str, nbytes: int) -> bytes:
        """Read the first bytes of an object, fewer when it is shorter."""

        def ask() -> bytes:
            try:
                found = bytes(obstore.get_range(self._store, key, start=0, length=nbytes))
            except obstore.exceptions.BaseError as error:
                # Of an empty object no byte can be asked for.
                if classify(error).said.startswith("416"):
                    return b""
                raise
            return checked(found, len(found))

        return self._call("reading an object", key, ask)

    def list_folder(self, folder: str) -> list[str]:
        """Return the names below a folder, of objects and of further folders, sorted."""

        def ask() -> dict[str, None]:
            found = obstore.list_with_delimiter(self._store, folder or None)
            paths = [*found["common_prefixes"], *(meta["path"] for meta in found["objects"])]
            return dict.fromkeys(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)

        return sorted(self._listed(folder, ask))

    def list_deep(self, folder: str) -> list[tuple[str, ObjectInfo]]:
        """Return every object below a folder, of whatever depth."""

        def ask() -> dict[str, ObjectInfo]:
            pages = obstore.list(self._store, folder or None)
            return {meta["path"]: _info_of(meta) for page in pages for meta in page}

        return list(self._listed(folder, ask).items())

    def _listed(self, folder: str, ask: Callable[[], dict[str, T]]) -> dict[str, T]:
        """List, and once more what an error in the body of a success may have cut: it reads as a last page of nothing.

        Believed, it would be an empty run to who restores, and packs that nobody names to who collects.
        """
        found = self._call("listing a folder", folder, ask)
        if len(found) % _PAGE_COUNT == 0:
            found |= self._call("listing a folder", folder, ask)
        return found

    # Writing

    def put_new(self, key: str, content: bytes) -> None:
        """Make an object that nobody has made; it is there, and it is ours, when this returns.

        Raises:
            FileExistsError: Somebody else's has the name.
            BackendError: The server does not answer; with ``is_uncertain``, the object may still appear.
        """
        self._put(key, content, "create")

    def put_over(self, key: str, content: bytes) -> None:
        """Make an object, or replace the one that has the name."""
        self._put(key, content, "overwrite")

    def put_instead(self, key: str, content: bytes, *, etag: str) -> None:
        """Replace the version of an object that has this etag; FileExistsError where that is not what is there."""
        self._put(key, content, {"e_tag": etag})

    def _put(self, key: str, content: bytes, mode: Mode) -> None:
        attempt, last = new_token(), RequestError("transient", "it is not there afterwards")
        for number in range(_ROUNDS):
            self._pause(number)
            try:
                self._put_once(key, content, mode, attempt)
            except RequestError as failed:
                if failed.kind in FINAL:
                    raise self._meaning(failed, "writing an object", key) from None
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
        raise self._meaning(last, "writing an object", key, is_uncertain=True) from None

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
        """Write a large object in parts, many at once; it is there, with its size, when this returns.

        Args:
            key: Its name, under which only these bytes are ever written.
            pieces: The bytes, in order; taken from another thread, once.
            nbytes_expected: About how many there will be: it decides the size of the parts.

        Raises:
            BackendError: It was not written, or nobody knows.
            CapacityError: The bucket's quota is full.
        """
        part_nbytes = max(PART_NBYTES_MIN, (nbytes_expected // PART_COUNT_MAX // MIB + 1) * MIB)
        count = _Count()
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
                raise self._meaning(failed, "writing a pack", key) from None
        # The answer may have been lost, and a success may hold an error.
        found = self._look_back(key)
        if isinstance(found, ObjectInfo) and count.is_complete and found.nbytes == count.nbytes:
            return
        last = failed or RequestError("transient", "it is not there with its size afterwards")
        if last.kind != "transient":
            # What an upload in parts answers to a part of it that is gone says nothing of another try.
            last = RequestError("transient", last.said)
        raise self._meaning(last, "writing a pack", key) from None

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

        def ask() -> None:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, key)

        self._call("removing an object", key, ask)

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the bucket, replacing what has the target name."""
        self._call("copying an object", source, lambda: obstore.copy(self._store, source, target))

    def honours_conditions(self) -> bool:
        """Try whether the server refuses to replace an object that was asked to be new, and lists what was made."""
        name, content = f"{new_token()}.probe", b"ckstore probe"
        key = f"tmp/{name}"
        self.put_new(key, content)
        try:
            with contextlib.suppress(RequestError):
                self._put_once(key, content + b", again", "create", new_token())
            found = self.head(key)
            return found is not None and found.nbytes == len(content) and name in self.list_folder("tmp")
        finally:
            # Whoever may not delete leaves a few bytes in tmp.
            with contextlib.suppress(CkstoreError):
                self.delete(key)

    # Asking, and asking again

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
                "this address, or a setting for it in the environment, cannot be used",
                where=self.root,
                todo="check the address, and the variables of your cloud's tools",
            ) from None

    def _call(self, what: str, key: str, ask: Callable[[], T]) -> T:
        """Ask until there is an answer, or no patience left."""
        last = RequestError("transient", "it was not tried")
        for number in range(_ROUNDS):
            self._pause(number)
            try:
                return ask()
            except BaseException as error:
                last = classify(error)
            if last.kind == "missing":
                raise FileNotFoundError(self.location_of(key)) from None
            if last.kind != "transient":
                break
        raise self._meaning(last, what, key) from None

    def _pause(self, number: int) -> None:
        if number:
            self._clock.sleep(min(self.options.pause_seconds_max, self.options.pause_seconds * 2 ** (number - 1)))

    def _meaning(self, failed: RequestError, what: str, key: str, *, is_uncertain: bool = False) -> CkstoreError:
        return error_for(failed, what, where=self.location_of(key), root=self.root, is_uncertain=is_uncertain)


class _Count:
    """Counts what passes, and keeps the error of whoever makes it."""

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
