"""References to checkpoints: ``step | tag | latest | best:metric[:min|max] | seq:N | id:prefix``.

``best:metric`` without an order needs to know whether low or high values are better. The name decides: one word names
the metric, and all other words must be listed as ones that say where or how it was measured (``val_loss``,
``accuracy/eval``, ``f1_macro``, ``word_error_rate``). Any other word may reverse the meaning (``time_to_accuracy``,
``rejected_reward``, ``loss_ratio``). Then the user must give the order.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from ckstore.config import STEP_MAX, check_name
from ckstore.errors import (
    BackendError,
    CkstoreError,
    ConflictError,
    CorruptError,
    MissingChunkError,
    NotFoundError,
    UnsupportedError,
    UsageError,
    shown_object,
)
from ckstore.format.header import ManifestHeader
from ckstore.format.paths import ManifestName
from ckstore.format.tree import is_in_replay_form
from ckstore.io.backend import map_concurrent
from ckstore.store.chunk_index import LOST_TIER
from ckstore.store.manifests import DroppedError, Manifests, missing_sentence, no_checkpoint_error
from ckstore.store.repository import Repository

if TYPE_CHECKING:
    from ckstore.format.manifest import Manifest


Order = Literal["min", "max"]

WORDS: dict[Order, str] = {"min": "lowest", "max": "highest"}
"""Words for users."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOWER = _words("loss losses ppl perplexity err error errors nll mse rmse mae mape wer cer fid bpb bpc bpd")
_HIGHER = _words(
    "acc accuracy f1 bleu rouge rougel chrf reward rewards auc auroc auprc recall psnr ssim iou miou dice r2"
)
"""Without ``precision``, which is also a number format."""
_RATES = _words("success win")
"""Words that name a metric of which more is better if ``rate`` follows."""

_QUALIFIERS = _words(
    "train training val valid validation eval evaluation test dev mean avg average ema smooth smoothed total sum final "
    "last best epoch step batch sample token per top macro micro weighted score rate pct percent value overall"
)
"""Words that may come before or after the word that names the metric."""
_KINDS = _words(
    "metric metrics running moving global holdout heldout word char character byte pixel class label l log absolute "
    "squared root median lm mlm ce bce kl ctc focal hinge huber rec recon reconstruction balanced categorical binary "
    "masked linear roc pr episode ep task"
)
"""Words that may come before it only. ``l`` is the rest of ``l1``."""
_TIMES = _words("epoch step")

_CASES = re.compile(r"([a-z0-9]{2})([A-Z][a-z])")
_CROSS_ENTROPY = re.compile("cross.?entropy")
_TOKENS = re.compile(r"[a-z]+[0-9]*|[0-9]+")


def order_of(metric: str) -> Order | None:
    """Return which value of a metric is the best; None if its name does not show it."""
    if metric.startswith("-"):
        return None
    text = _CROSS_ENTROPY.sub("ce", _CASES.sub(r"\1 \2", metric).lower())
    tokens = [_plain(token) for token in _TOKENS.findall(text)]
    if not tokens or tokens[0].isdigit() or ("best" in tokens and tokens[-1] in _TIMES):
        # ``1 - accuracy``; or the step at which the best was measured.
        return None
    count = len(tokens)
    while count and (tokens[count - 1] in _QUALIFIERS or tokens[count - 1].isdigit()):
        count -= 1
    if not count:
        return None
    *before, word = tokens[:count]
    rates = _RATES if tokens[count : count + 1] == ["rate"] else frozenset()
    orders: dict[Order, frozenset[str]] = {"min": _LOWER, "max": _HIGHER | rates}
    for order, words in orders.items():
        listed = words | _QUALIFIERS | _KINDS
        if word in words and all(each in listed or each.isdigit() for each in before):
            return order
    return None


def _plain(token: str) -> str:
    """Return a word without a number at its end, unless the number belongs to it: ``bleu4``, ``top5``, but ``f1``."""
    return token if token in _HIGHER or token.isdigit() else token.rstrip("0123456789")


_log = logging.getLogger("ckstore")

Reference = int | str

_LISTINGS_MAX = 5


def headers_newest_first(manifests: Manifests) -> list[ManifestHeader]:
    """Return the header of every checkpoint in place, by descending seq. Damaged ones are logged and left out.

    Raises:
        BackendError: A header cannot be read.
    """
    headers, names = [], manifests.listing().names[::-1]
    for name, header in zip(names, read_headers(manifests, names), strict=True):
        if isinstance(header, (CorruptError, UnsupportedError)):
            _log.warning("skipping seq %d (step %d): %s", name.seq, name.step, header)
            continue
        if isinstance(header, Exception):
            raise header
        if header is not None:
            headers.append(header)
    return headers


def read_headers(manifests: Manifests, names: Sequence[ManifestName]) -> Iterator[ManifestHeader | CkstoreError | None]:
    """Yield for each name its header, None if it was dropped, or the error of reading it.

    In a bucket, many are read concurrently.
    """

    def look(name: ManifestName) -> ManifestHeader | CkstoreError | None:
        try:
            return header_or_none(manifests, name)
        except CkstoreError as error:
            return error

    return map_concurrent(manifests.backend, look, names)


def tiers_of_each(manifests: Manifests, headers: Sequence[ManifestHeader]) -> Iterator[tuple[str, ...]]:
    """Yield ``tiers_of`` for each header. In a bucket, many are read concurrently."""
    return map_concurrent(manifests.backend, lambda header: tiers_of(manifests, header), headers)


def tiers_of(manifests: Manifests, header: ManifestHeader) -> tuple[str, ...]:
    """Return the tiers of a checkpoint; none if it was replaced or dropped since its header was read."""
    try:
        return manifests.tiers(header)
    except FileNotFoundError:
        return ()


def header_or_none(manifests: Manifests, name: ManifestName) -> ManifestHeader | None:
    """Return the header of a checkpoint; None if it was dropped since it was listed."""
    for _ in range(_LISTINGS_MAX):
        try:
            return manifests.header(name)
        except FileNotFoundError:
            again = [other for other in manifests.listing().names if other.seq == name.seq]
            if not again:
                return None
            name = again[0]
    raise ConflictError("a manifest keeps being replaced while it is read", where=manifests.path_of(name))


def resolve(repository: Repository, reference: Reference) -> ManifestName:
    """Return the manifest that a reference means. Other checkpoints are not checked for damage.

    Raises:
        NotFoundError: There is no such checkpoint. The message lists what exists.
        UsageError: It is not a valid reference.
        UnreachableError: No store is at this path now.
        ConflictError: Another store is at this path now.
    """
    repository.require_same_store()
    if isinstance(reference, bool) or not isinstance(reference, (int, str)):
        raise UsageError(
            "a reference to a checkpoint is a step (int) or a string", where=shown_object(reference),
            todo="use a step, a tag, latest, best:metric, best:metric:max, seq:N or id:prefix",
        )  # fmt: skip
    if isinstance(reference, int) and abs(reference) > STEP_MAX:
        raise NotFoundError(f"steps go up to {STEP_MAX}", where=shown_object(reference))
    if isinstance(reference, int) or re.fullmatch(r"-?[0-9]{1,18}", reference):
        return _by_step(repository, int(reference))
    kind, separator, rest = reference.partition(":")
    if reference == "latest":
        return _latest(repository)
    if separator and kind == "seq":
        return _by_seq(repository, rest)
    if separator and kind == "id":
        return _by_id(repository, rest)
    if separator and kind == "best":
        return _best(repository, rest)
    if separator:
        raise UsageError(
            f"not a reference to a checkpoint: unknown prefix {kind!r}", where=repr(reference),
            todo="use a step, a tag, latest, best:metric, best:metric:max, seq:N or id:prefix",
        )  # fmt: skip
    return _by_tag(repository, reference)


def _names(repository: Repository) -> tuple[ManifestName, ...]:
    names = repository.manifests.listing().names
    if not names:
        raise no_checkpoint_error(repository.run, repository.backend.root)
    return names


def _latest(repository: Repository) -> ManifestName:
    for name in reversed(_names(repository)):
        header = header_or_none(repository.manifests, name)
        if header is not None and not header.is_archival and not _is_in_replay_form(repository.manifests, header):
            return ManifestName(repository.run, header.seq, header.step, header.generation)
    raise no_checkpoint_error(repository.run, repository.backend.root)


def _is_in_replay_form(manifests: Manifests, header: ManifestHeader) -> bool:
    """Return whether a checkpoint has no bytes of tensors, so that it is not the newest one that can be resumed."""
    try:
        return header.may_be_in_replay_form and is_in_replay_form(manifests.load(header.name).tree)
    except FileNotFoundError:
        return False


def _by_step(repository: Repository, step: int) -> ManifestName:
    names = _names(repository)
    found = [name for name in names if name.step == step]
    if not found:
        steps = sorted({name.step for name in names}, key=lambda other: (abs(other - step), other))[:3]
        near = ", ".join(str(other) for other in sorted(steps))
        raise NotFoundError(
            f"run {repository.run!r} has no checkpoint of step {step}",
            where=repository.backend.root,
            todo=f"nearest steps: {near}",
        )
    return max(found, key=lambda name: name.seq)


def _by_seq(repository: Repository, text: str) -> ManifestName:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UsageError("a seq is a number", where=f"seq:{text}")
    for name in _names(repository):
        if name.seq == int(text):
            return name
    raise NotFoundError(
        f"run {repository.run!r} has no checkpoint with seq {text}",
        where=repository.backend.root,
        todo="see `ckstore ls`",
    )


def _by_id(repository: Repository, prefix: str) -> ManifestName:
    if not re.fullmatch(r"[0-9a-f]{4,64}", prefix):
        raise UsageError("an id prefix is 4 to 64 lower-case hex digits", where=f"id:{prefix}")
    headers = [h for h in headers_newest_first(repository.manifests) if h.checkpoint_id.hex().startswith(prefix)]
    if not headers:
        raise NotFoundError(
            f"run {repository.run!r} has no checkpoint whose id begins with {prefix}",
            where=repository.backend.root,
            todo="see `ckstore ls`",
        )
    if len(headers) > 1:
        raise UsageError(f"{len(headers)} checkpoint ids begin with {prefix}", todo="give more digits")
    return ManifestName(repository.run, headers[0].seq, headers[0].step, headers[0].generation)


def _best(repository: Repository, rest: str) -> ManifestName:
    metric, _, order = rest.partition(":")
    if order not in {"", "min", "max"} or not metric:
        raise UsageError("best is written best:metric, best:metric:min or best:metric:max", where=f"best:{rest}")
    headers = headers_newest_first(repository.manifests)
    if not headers:
        raise no_checkpoint_error(repository.run, repository.backend.root)
    # The newest comes first, and min and max return the first of equals: ties go to the newest.
    rated = [(h.metrics[metric], h) for h in headers if not math.isnan(h.metrics.get(metric, math.nan))]
    if not rated:
        names = sorted({name for header in headers for name in header.metrics})
        if metric in names:
            raise NotFoundError(
                f"metric {metric!r} of run {repository.run!r} is NaN in every checkpoint, so none is the best",
                where=repository.backend.root,
                todo="use a step, a tag or another metric; `ckstore ls` shows them",
            )
        recorded = ", ".join(names) or "none; pass metrics= to commit"
        raise NotFoundError(
            f"no checkpoint of run {repository.run!r} has a metric {metric!r}",
            where=repository.backend.root,
            todo=f"recorded metrics: {recorded}",
        )
    chosen = order or order_of(metric)
    if not chosen:
        raise UsageError(
            f"the name of the metric {metric!r} does not show whether low or high values are better",
            where=f"best:{metric}",
            todo=f"use best:{metric}:min or best:{metric}:max",
        )
    choose = max if chosen == "max" else min
    header = choose(rated, key=lambda pair: pair[0])[1]
    return ManifestName(repository.run, header.seq, header.step, header.generation)


def describe_best(reference: Reference) -> str:
    """Describe a reference to the best of a metric, such as ``the lowest loss``; empty for other references."""
    kind, _, rest = str(reference).partition(":")
    metric, _, order = rest.partition(":")
    chosen = order_of(metric) if not order else "max" if order == "max" else "min"
    return f"the {WORDS[chosen]} {metric}" if kind == "best" and metric and chosen else ""


def _by_tag(repository: Repository, name: str) -> ManifestName:
    check_name(name, "tag")
    record = repository.tags.get(name)
    if record.point is not None:
        raise UsageError(
            f"tag {name!r} is on a point of the journal, step {record.step}, and this needs a checkpoint",
            where=repository.backend.root,
            todo="restore the point or rewind to it, or use its keyframe, which `ckstore show` names",
        )
    for found in _names(repository):
        if found.seq == record.seq:
            return found
    raise NotFoundError(
        f"tag {name!r} points to seq {record.seq}, which does not exist",
        where=repository.backend.root,
        todo="tag another checkpoint",
    )


def load_whole(repository: Repository, name: ManifestName, *, takes_lower: bool = False) -> Manifest:
    """Load a manifest of which all packs exist. It has the highest generation of its seq.

    Args:
        repository: The store and its run.
        name: The manifest, as it was listed.
        takes_lower: For readers: if the highest generation is incomplete, return the highest complete one. A
            replacement whose process was killed before it checked the packs may have lost some. The generation that it
            was to replace is still in place then.

    Raises:
        CorruptError: It is damaged or a pack is missing; MissingChunkError names the pack.
        DroppedError: It was dropped meanwhile.
        UnreachableError: It needs a tier that cannot be reached.
    """
    candidates = [name]
    for _ in range(_LISTINGS_MAX):
        problem: CorruptError | None = None
        for candidate in candidates:
            try:
                manifest = repository.manifests.load(candidate)
                repository.require_packs(manifest)
                if problem is not None:
                    message = "seq %d: skipping generation %d, using generation %d: %s"
                    _log.warning(message, name.seq, candidates[0].generation, candidate.generation, problem)
                return manifest
            except FileNotFoundError:
                problem = None
                break
            except CorruptError as error:
                problem = problem or error
        if problem is not None and not takes_lower and not isinstance(problem, MissingChunkError):
            raise problem
        # A missing pack may have been rewritten and deleted meanwhile. Then a higher generation names the new one.
        generations = generations_of(repository.manifests, name.seq)
        if not generations:
            raise DroppedError(f"seq {name.seq} was deleted while it was being read", where=repository.backend.root)
        generations = generations if takes_lower else generations[:1]
        if problem is not None and generations == candidates:
            raise problem
        candidates = generations
    raise ConflictError("a manifest keeps being replaced while it is read", where=repository.backend.root)


def generations_of(manifests: Manifests, seq: int) -> list[ManifestName]:
    """Return the generations of a checkpoint that are in place, the highest first; none if it is dropped."""
    listing = manifests.listing()
    if seq in listing.dropped:
        return []
    found = (name for name in (*listing.names, *listing.lower) if name.seq == seq)
    return sorted(found, key=lambda name: name.generation, reverse=True)


def newest_whole(repository: Repository) -> tuple[Manifest, list[str]]:
    """Load the newest complete checkpoint. Damaged and incomplete ones are skipped.

    Returns:
        The manifest, and for each skipped checkpoint a sentence that names it and says why.

    Raises:
        EmptyRunError: The run has no checkpoint.
        UnreachableError: One that may be the newest needs a tier that cannot be reached.
        UnsupportedError: The newest was made by a newer ckstore. An older one is not taken silently.
        CorruptError: There are checkpoints, but none is complete.
    """
    repository.require_same_store()
    listing = repository.manifests.listing()
    skipped: list[str] = []
    candidates = sorted((*listing.names, *listing.lower), key=lambda n: (n.seq, n.generation), reverse=True)
    for name in candidates:
        if name.seq in listing.dropped:
            continue
        try:
            manifest = load_whole(repository, name, takes_lower=True)
        except DroppedError:
            continue
        except BackendError as error:
            # An older one would be taken for the newest, and hours of training would be repeated.
            raise _unreadable_newest_error(name, error) from error
        except CorruptError as error:
            skipped.append(f"seq {name.seq} (step {name.step}) was skipped: {error}")
            continue
        if manifest.header.is_archival:
            continue
        if is_in_replay_form(manifest.tree):
            skipped.append(f"seq {name.seq} (step {name.step}) was skipped: it is in replay form")
            continue
        if any(pack.tier == LOST_TIER for pack in manifest.packs):
            skipped.append(f"seq {name.seq} (step {name.step}) was skipped: some of its tensors are lost")
            continue
        newer = {seq for seq in listing.missing if seq > name.seq}
        return manifest, [*skipped, *([missing_sentence(repository.run, newer)] if newer else [])]
    if not skipped and not listing.missing:
        raise no_checkpoint_error(repository.run, repository.backend.root)
    if not skipped:
        raise CorruptError(
            missing_sentence(repository.run, listing.missing),
            where=repository.backend.root,
            todo="run `ckstore verify`",
        )
    raise CorruptError(
        f"none of the {len(skipped)} checkpoints of run {repository.run!r} is complete; {skipped[0]}",
        where=repository.backend.root,
        todo="run `ckstore repair`, which shows what can be recovered",
    )


def _unreadable_newest_error(name: ManifestName, error: BackendError) -> BackendError:
    """Return the error for an unreadable checkpoint that may be the newest."""
    return type(error)(
        f"seq {name.seq} (step {name.step}) is the newest checkpoint, but cannot be read: {error.what}",
        where=error.where,
        todo=error.todo or "try again, or choose an older checkpoint",
        **error.facts,  # type: ignore[arg-type]
    )
