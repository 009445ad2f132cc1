"""An opened run: what every verb needs, the verbs that only look, and the end of the handle.

Listing and looking import neither numpy nor the stories of commit and restore, so that they start at once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from ckstore.config import Policy
from ckstore.errors import NotFoundError, UsageError
from ckstore.format.header import ManifestHeader
from ckstore.ops.inspect.contents import Contents, contents_of
from ckstore.results import Info
from ckstore.store.manifests import EmptyRunError, missing_sentence
from ckstore.store.refs import (
    Reference,
    header_or_none,
    headers_newest_first,
    newest_whole,
    resolve,
    tiers_of,
    tiers_of_each,
)
from ckstore.store.repository import Repository

if TYPE_CHECKING:
    from ckstore.format.manifest import Manifest
    from ckstore.ops.inspect.stats import Coding, Stats
    from ckstore.ops.verify import Report


_log = logging.getLogger("ckstore")

Self = TypeVar("Self", bound="Handle")


class Handle:
    """A run of a store, to look at."""

    def __init__(self, repository: Repository, policy: Policy) -> None:
        self._repository = repository
        self._policy = policy
        self._lock = threading.RLock()
        self._restored: Info | None = None
        self._is_closed = False
        # Runs when the handle is collected and at exit, so that the lease does not outlive its holder.
        self._finalizer = weakref.finalize(self, repository.close)

    def __repr__(self) -> str:
        return f"ckstore.Store({self._repository.backend.root!r}, run={self._repository.run!r})"

    @property
    def run(self) -> str:
        """The run this handle works in."""
        return self._repository.run

    @property
    def restored(self) -> Info | None:
        """What the last restore of this handle returned; None before the first."""
        return self._restored

    def latest(self) -> Info | None:
        """Return the newest checkpoint that is whole, or None in an empty run.

        Waits while the saver of a trainer that has died still publishes one, as ``restore`` does, and says so.

        Raises:
            UnreachableError: One that may be the newest needs a tier that cannot be reached, or the store is not there
                any more.
            CorruptError: There are checkpoints, and none is whole.
        """
        with self._lock:
            self._check_open()
            self._repository.wait_for_orphan()
            try:
                manifest, passed_over = newest_whole(self._repository)
            except EmptyRunError:
                return None
            return self._info(manifest.header, warnings=passed_over)

    def info(self, ref: Reference) -> Info:
        """Return what is known of a checkpoint; reads its header only."""
        with self._lock:
            self._check_open()
            name = resolve(self._repository, ref)
            header = header_or_none(self._repository.manifests, name)
            if header is None:
                raise NotFoundError(f"seq {name.seq} was dropped meanwhile", where=self._repository.backend.root)
            return self._info(header)

    def log(self) -> list[Info]:
        """Return every entry of the run, newest first; one that is damaged is left out, with a warning in the log.

        Raises:
            UnreachableError: The store is not there any more.
            ConflictError: Another store has taken its place.
        """
        with self._lock:
            self._check_open()
            self._repository.require_same_store()
            by_seq: dict[int, list[str]] = {}
            for name, record in self._repository.tags.all().items():
                by_seq.setdefault(record.seq, []).append(name)
            headers = headers_newest_first(self._repository.manifests)
            if missing := self._repository.manifests.listing().missing:
                _log.warning("%s", missing_sentence(self.run, missing))
            return [
                Info.of(header, tags=sorted(by_seq.get(header.seq, ())), tiers=tiers)
                for header, tiers in zip(headers, tiers_of_each(self._repository.manifests, headers), strict=True)
            ]

    def steps(self) -> list[int]:
        """Return the steps that can be restored, each once, ascending; waits as ``latest`` does."""
        with self._lock:
            self._check_open()
            self._repository.require_same_store()
            self._repository.wait_for_orphan()
            return sorted({name.step for name in self._repository.manifests.listing().names})

    def tags(self) -> dict[str, int]:
        """Return each tag with the seq it points to."""
        with self._lock:
            self._check_open()
            return {name: record.seq for name, record in sorted(self._repository.tags.all().items())}

    def runs(self) -> list[str]:
        """Return the names of all runs of the store."""
        with self._lock:
            self._check_open()
            return self._repository.runs()

    def contents(self, ref: Reference) -> Contents:
        """Return what a checkpoint holds, tensor by tensor; reads its manifest only."""
        with self._lock:
            manifest = self._manifest(ref)
            return contents_of(manifest, self._info(manifest.header))

    def coding(self, ref: Reference) -> Coding:
        """Return how a checkpoint is coded, tensor by tensor, and why; reads its manifest and headers of frames."""
        from ckstore.ops.inspect.stats import coding_of

        with self._lock:
            manifest = self._manifest(ref)
            return coding_of(self._repository, manifest, self._info(manifest.header))

    def stats(
        self,
        ref: Reference = "latest",
        *,
        exact: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Stats:
        """Return where the bytes of a checkpoint go, beside its order-0 entropy; decodes all of it.

        Args:
            ref: Which checkpoint.
            exact: Measure every element instead of a sample of each chunk.
            on_progress: Called now and then, from any thread, with plain bytes done and plain bytes in all.
        """
        from ckstore.ops.inspect.stats import stats_of

        with self._lock:
            manifest = self._manifest(ref)
            info = self._info(manifest.header)
            return stats_of(self._repository, manifest, info, self._policy, is_exact=exact, on_progress=on_progress)

    def _manifest(self, ref: Reference) -> Manifest:
        self._check_open()
        name = resolve(self._repository, ref)
        try:
            return self._repository.manifests.load(name)
        except FileNotFoundError:
            raise NotFoundError(
                f"seq {name.seq} was dropped or replaced while it was read",
                where=self._repository.backend.root,
                todo="look again",
            ) from None

    def verify(
        self,
        level: str = "read",
        *,
        ref: Reference | None = None,
        remote: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Report:
        """Read everything, believe nothing, and report; nothing is changed.

        Args:
            level: ``"quick"``: manifests and directories; ``"read"``: every stored byte; ``"decode"``:
                everything a restore would find.
            ref: One checkpoint; None: the whole store, all runs.
            remote: Look at packs that lie in other tiers, too.
            on_progress: Called now and then with bytes read and bytes in all.
        """
        from ckstore.codec.frame_decoder import FrameDecoder, decoder_nbytes
        from ckstore.ops.verify import verify

        with self._lock:
            self._check_open()
            names = None if ref is None else [(self.run, resolve(self._repository, ref))]
            return verify(
                self._repository,
                level,
                names,
                make_check=lambda: FrameDecoder(self._repository.limits.chunk_nbytes_max).check_frame,
                check_nbytes=decoder_nbytes(self._repository.limits.chunk_nbytes_max),
                policy=self._policy,
                is_remote=remote,
                on_progress=on_progress,
            )

    # Ending

    def close(self) -> None:
        """Give up the writer lease and let go of descriptors; repeated calls do nothing."""
        with self._lock:
            self._is_closed = True
            self._finalizer()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _committed(self, seq: int) -> None:
        """Take note of acknowledged commits, of which ``seq`` is the newest."""

    def _info(self, header: ManifestHeader, *, warnings: Sequence[str] = ()) -> Info:
        tags, tiers = self._repository.tags.names_of(header.seq), tiers_of(self._repository.manifests, header)
        return Info.of(header, tags=tags, warnings=warnings, tiers=tiers)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the store is closed", where=self._repository.backend.root, todo="open it again")
