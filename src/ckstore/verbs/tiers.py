"""The verbs that move checkpoints between tiers: push them to a bucket, pull them back, keep a second copy.

What they do is told in ``push``, ``pull`` and ``mirror``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckstore.errors import NotFoundError, UsageError
from ckstore.ops.gc.policy import span_seconds
from ckstore.store.refs import Reference
from ckstore.verbs.reading import Handle

if TYPE_CHECKING:
    from ckstore.tiers.gc import TierGc
    from ckstore.tiers.mirror import MirrorReport
    from ckstore.tiers.pull import PullReport
    from ckstore.tiers.push import PushReport


class Tiering(Handle):
    """A run of a store, whose checkpoints may lie in other tiers."""

    def tiers(self) -> dict[str, str]:
        """Return where each tier of the store is, by name."""
        with self._lock:
            self._check_open()
            return self._repository.tiers.addresses()

    def adopt(self, *, is_original: bool) -> dict[str, str]:
        """Say of this folder, where it is a copy of a store that has tiers, which of the two it is.

        Until then a copy can be read and committed to, and neither pushes to the tiers, nor collects there, nor frees
        what lies there too. The same goes for a store that was set back to an older state,
        or whose inodes changed, as on some file systems at each mount.

        Args:
            is_original: It is the original or takes its place: it owns the tiers from now on, and what is there and was
                not known here is kept there. False: it is a new store, which owns no tier and may push to other places;
                what it needs of the old ones should be pulled, since their owner may remove it.

        Returns:
            The tiers that it owns, and where they are.

        Raises:
            UnreachableError: A tier cannot be reached; nothing was changed.
        """
        from ckstore.store.tier_checks import adopt

        with self._lock:
            self._check_open()
            return adopt(self._repository, is_original=is_original)

    def forget_tier(self, tier: str) -> str:
        """Forget a tier that no checkpoint of the store lies in, and return where it was; what lies there stays.

        Raises:
            NotFoundError: There is no such tier.
            UsageError: A checkpoint lies there, or one in the trash does.
            ConflictError: A manifest cannot be read, and may name it.
        """
        from ckstore.tiers.copy import forget_tier

        with self._lock:
            self._check_open()
            return forget_tier(self._repository, tier)

    def push(
        self,
        address: str | None = None,
        *,
        keep_local: int = 1,
        older_than: str | float | None = None,
        tier: str | None = None,
        read_back: bool = False,
        dry_run: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> PushReport:
        """Move old checkpoints of the run to a bucket; they stay in the history, and restore as before.

        Nothing here is let go of before it was seen there. What nobody needs here any more is freed by the next
        collection. Trainers may go on committing meanwhile.

        Args:
            address: Where they go: ``s3://bucket/prefix`` (gs, az), or the absolute path of another folder. None: the
                only tier that is configured, or the one that ``tier`` names.
            keep_local: So many of the newest stay here.
            older_than: Only what is older goes: ``"7d"``, or seconds.
            tier: Name of the place, or what it shall be called.
            read_back: Read every pack there whole, and compare, before anything is let go of.
            dry_run: Only say what would be done.
            on_progress: Called with bytes of packs done and in all, from any thread.

        Raises:
            UsageError: Another store lies there.
            ConflictError: Someone else pushes or commits there.
            CorruptError: A pack here is damaged, or one there is not ours.
            BackendError: The server does not answer, or refuses. Whatever is raised, every checkpoint is whole.
        """
        from ckstore.tiers.push import PushPolicy, push

        older_than_seconds = None if older_than is None else span_seconds(older_than)
        policy = PushPolicy(keep_local, older_than_seconds, read_back)
        with self._lock:
            self._check_open()
            place = self._place(address, tier)
            return push(self._repository, place, policy, tier=tier, dry_run=dry_run, on_progress=on_progress)

    def pull(
        self,
        refs: Sequence[Reference] | Reference | None = None,
        *,
        dry_run: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> PullReport:
        """Bring checkpoints back that lie in other tiers; what lies there stays there.

        Args:
            refs: Which; None: all of the run.
            dry_run: Only say what would be done.
            on_progress: Called with bytes of packs done and in all, from any thread.

        Raises:
            NotFoundError: No such checkpoint.
            UnreachableError: It is in a tier that cannot be reached.
            CorruptError: Of some, a pack there is not what was pushed: these are as they were, and all others are here.
                ``checkpoints`` names them, ``report`` tells of all.
            CapacityError: The disk is full; what was brought back so far is here.
            BackendError: The server does not answer.
        """
        from ckstore.tiers.pull import pull

        chosen = [refs] if isinstance(refs, (str, int)) else refs
        with self._lock:
            self._check_open()
            return pull(self._repository, chosen, dry_run=dry_run, on_progress=on_progress)

    def mirror(
        self,
        address: str,
        *,
        read_back: bool = False,
        dry_run: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> MirrorReport:
        """Keep a second copy of the store, all runs of it, elsewhere; it is a store of its own and can be opened there.

        Nothing here changes, and nothing there is removed. ``ckstore.open(address).verify()`` checks the copy.

        Args:
            address: Where it is: ``s3://bucket/prefix`` (gs, az), or another folder.
            read_back: Read every pack that is copied back, and compare.
            dry_run: Only count what would be copied.
            on_progress: Called with checkpoints done and in all.

        Raises:
            UsageError: Another store lies there.
            ConflictError: Someone else commits there.
            CorruptError: Of some, a pack here is damaged or missing, or one there is not ours: these were not copied,
                and all others were. ``checkpoints`` names them, ``report`` tells of all.
            UnreachableError: Some are in a tier that cannot be reached: these were not copied, and all others were.
            BackendError: The server does not answer, or refuses.
        """
        from ckstore.tiers.mirror import mirror

        with self._lock:
            self._check_open()
            return mirror(self._repository, address, read_back=read_back, dry_run=dry_run, on_progress=on_progress)

    def gc_tier(
        self,
        tier: str | None = None,
        *,
        min_age: str | float = "24h",
        repack_nbytes_max: int | None = None,
        waste_max: float | None = None,
        dry_run: bool = False,
        clear_lists: bool = False,
    ) -> TierGc:
        """Remove from a tier what was dropped here and is not in the trash here any more, and packs that nobody needs.

        Packs there of which much is needed by nobody are rewritten: what is needed is read from there and written there
        again, and the old pack goes in a later collection, when the trash here names it no more. Only the store whose
        tier it is may do that. What is removed there cannot be brought back.

        Args:
            tier: Its name; None: the only one.
            min_age: Packs that no manifest names are left alone until they are this old: ``"24h"``, or seconds.
            repack_nbytes_max: Bytes that may be written there to rewrite packs; 0: none is rewritten. Default: 4 GiB.
            waste_max: A pack of which a larger share is needed by nobody is rewritten. Default: a quarter.
            dry_run: Only say what would be done.
            clear_lists: No other collector is at work in the tier, whatever lists there say of what they are about to
                remove: forget these. Those of dead processes of this machine, and old ones, are forgotten anyway.

        Raises:
            LockHeldError: Another collection is at work in the store.
            BackendError: The server does not answer, or refuses.
        """
        from ckstore.ops.gc.plan import GcLimits
        from ckstore.tiers.gc import collect_tier

        seconds = 0.0 if min_age in (0, "0") else span_seconds(min_age)
        chosen = {"repack_nbytes_max": repack_nbytes_max, "waste_max": waste_max}
        given: dict[str, Any] = {field: value for field, value in chosen.items() if value is not None}
        limits = GcLimits(min_age_seconds=seconds, **given)
        with self._lock:
            self._check_open()
            name = tier or self._repository.tiers.name_for(self._place(None, None))
            return collect_tier(self._repository, name, limits, dry_run=dry_run, clear_lists=clear_lists)

    def _place(self, address: str | None, tier: str | None) -> str:
        """Return the address that is meant."""
        if address is not None:
            return address
        known = self._repository.tiers.addresses()
        if tier is not None:
            return self._repository.tiers.address_of(tier)
        if len(known) == 1:
            return next(iter(known.values()))
        if known:
            raise UsageError(
                "there are several tiers",
                where=", ".join(known),
                todo="name one, or an address; `ckstore push --forget` removes one that is not wanted",
            )
        raise NotFoundError(
            "no tier is configured", where=self._repository.backend.root, todo="name a bucket: s3://bucket/prefix"
        )
