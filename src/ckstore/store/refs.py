"""How a checkpoint is named, everywhere: ``step | tag | latest | best:metric[:min|max] | seq:N | id:prefix``.

Whether the lowest or the highest value of a metric is the best, where its name leaves no doubt.

One word names the metric. Every other word of the name must be listed as one that says where or how it was taken:
``val_loss``, ``accuracy/eval``, ``f1_macro``, ``word_error_rate``. Any other word may turn the meaning around, as in
``time_to_accuracy``, ``rejected_reward`` or ``loss_ratio``, and leaves doubt.
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
from ckstore.io.backend import map_concurrent
from ckstore.store.chunk_index import LOST_TIER
from ckstore.store.manifests import DroppedError, Manifests, missing_sentence, no_checkpoint_error
from ckstore.store.repository import Repository

if TYPE_CHECKING:
    from ckstore.format.manifest import Manifest


Order = Literal["min", "max"]

WORDS: dict[Order, str] = {"min": "lowest", "max": "highest"}
"""What people read."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOWER = _words("loss losses ppl perplexity err error errors nll mse rmse mae mape wer cer fid bpb bpc bpd")
_HIGHER = _words(
    "acc accuracy f1 bleu rouge rougel chrf reward rewards auc auroc auprc recall psnr ssim iou miou dice r2"
)
"""Without ``precision``, which is a number format too."""
_RATES = _words("success win")
"""What is a metric of which more is better when ``rate`` follows."""

_QUALIFIERS = _words(
    "train training val valid validation eval evaluation test dev mean avg average ema smooth smoothed total sum final "
    "last best epoch step batch sample token per top macro micro weighted score rate pct percent value overall"
)
"""What may stand before or after the word that names the metric."""
_KINDS = _words(
    "metric metrics running moving global holdout heldout word char character byte pixel class label l log absolute "
    "squared root median lm mlm ce bce kl ctc focal hinge huber rec recon reconstruction balanced categorical binary "
    "masked linear roc pr episode ep task"
)
"""What may stand before it only; ``l`` is what is left of ``l1``."""
_TIMES = _words("epoch step")

_CASES = re.compile(r"([a-z0-9]{2})([A-Z][a-z])")
_CROSS_ENTROPY = re.compile("cross.?entropy")
_TOKENS = re.compile(r"[a-z]+[0-9]*|[0-9]+")


def order_of(metric: str) -> Order | None:
    """Return which value of a metric is the best, or None where its name leaves doubt."""
    if metric.startswith("-"):
        return None
    text = _CROSS_ENTROPY.sub("ce", _CASES.sub(r"\1 \2", metric).lower())
    tokens = [_plain(token) for token in _TOKENS.findall(text)]
    if not tokens or tokens[0].isdigit() or ("best" in tokens and tokens[-1] in _TIMES):
        # What is subtracted from 1 or 100; when the best one was.
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
    """Return a word without the number at its end, unless that belongs to it: ``bleu4``, ``top5``, but ``f1``."""
    return token if token in _HIGHER or token.isdigit() else token.rstrip("0123456789")


_log = logging.getLogger("ckstore")

Reference = int | str

_LISTINGS_MAX = 5


def headers_newest_first(manifests: Manifests) -> list[ManifestHeader]:
    """Return the header of every checkpoint in place, by descending seq; one that is damaged is left out, and told.

    Raises:
        BackendError: The medium does not give one.
    """
    headers, names = [], manifests.listing().names[::-1]
    for name, header in zip(names, read_headers(manifests, names), strict=True):
        if isinstance(header, (CorruptError, UnsupportedError)):
            _log.warning("seq %d (step %d) is left out: %s", name.seq, name.step, header)
            continue
        if isinstance(header, Exception):
            raise header
        if header is not None:
            headers.append(header)
    return headers


def read_headers(manifests: Manifests, names: Sequence[ManifestName]) -> Iterator[ManifestHeader | CkstoreError | None]:
    """Return for each name its header, None for one that was dropped, or why it cannot be read.

    Far away, many are read at the same time.
    """

    def look(name: ManifestName) -> ManifestHeader | CkstoreError | None:
        try:
            return header_or_none(manifests, name)
        except CkstoreError as error:
            return error

    return map_concurrent(manifests.backend, look, names)


def tiers_of_each(manifests: Manifests, headers: Sequence[ManifestHeader]) -> Iterator[tuple[str, ...]]:
    """Return for each header what ``tiers_of`` does; far away, many are read at the same time."""
    return map_concurrent(manifests.backend, lambda header: tiers_of(manifests, header), headers)


def tiers_of(manifests: Manifests, header: ManifestHeader) -> tuple[str, ...]:
    """Return the tiers that a checkpoint lies in; none where it was replaced or dropped since its header was read."""
    try:
        return manifests.tiers(header)
    except FileNotFoundError:
        return ()


def header_or_none(manifests: Manifests, name: ManifestName) -> ManifestHeader | None:
    """Return a header, or None when the checkpoint was dropped since it was listed."""
    for _ in range(_LISTINGS_MAX):
        try:
            return manifests.header(name)
        except FileNotFoundError:
            # Replaced by a higher generation, or dropped.
            again = [other for other in manifests.listing().names if other.seq == name.seq]
            if not again:
                return None
            name = again[0]
    raise ConflictError("a manifest is replaced again and again while it is read", where=manifests.path_of(name))


def resolve(repository: Repository, reference: Reference) -> ManifestName:
    """Return the manifest a reference means; damage in others is not looked for.

    Raises:
        NotFoundError: It means nothing here; the message names what there is.
        UsageError: It is no reference.
        UnreachableError: The store is not there any more.
        ConflictError: Another store has taken its place.
    """
    repository.require_same_store()
    if isinstance(reference, bool) or not isinstance(reference, (int, str)):
        raise UsageError(
            "a checkpoint is named by a step (int) or a string", where=shown_object(reference),
            todo="use a step, a tag, latest, best:metric, best:metric:max, seq:N or id:prefix",
        )  # fmt: skip
    if isinstance(reference, int) and abs(reference) > STEP_MAX:
        raise NotFoundError(f"no step lies beyond {STEP_MAX}", where=shown_object(reference))
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
            f"{kind!r} is no way to name a checkpoint", where=repr(reference),
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
        if header is not None and not header.is_archival:
            return ManifestName(repository.run, header.seq, header.step, header.generation)
    raise no_checkpoint_error(repository.run, repository.backend.root)


def _by_step(repository: Repository, step: int) -> ManifestName:
    names = _names(repository)
    found = [name for name in names if name.step == step]
    if not found:
        steps = sorted({name.step for name in names}, key=lambda other: (abs(other - step), other))[:3]
        near = ", ".join(str(other) for other in sorted(steps))
        raise NotFoundError(
            f"run {repository.run!r} has no checkpoint of step {step}",
            where=repository.backend.root,
            todo=f"near it: {near}",
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
    # Newest first, and min and max take the first of equals: ties go to the newest.
    rated = [(h.metrics[metric], h) for h in headers if not math.isnan(h.metrics.get(metric, math.nan))]
    if not rated:
        names = sorted({name for header in headers for name in header.metrics})
        if metric in names:
            raise NotFoundError(
                f"metric {metric!r} of run {repository.run!r} has only NaN, and none of them is the best",
                where=repository.backend.root,
                todo="name a step, a tag or another metric; `ckstore ls` shows them",
            )
        known = ", ".join(names) if names else "none was recorded; give metrics= to commit"
        raise NotFoundError(
            f"no checkpoint of run {repository.run!r} has a metric {metric!r}",
            where=repository.backend.root,
            todo=f"metrics there are: {known}",
        )
    chosen = order or order_of(metric)
    if not chosen:
        raise UsageError(
            f"the name does not say whether the lowest or the highest {metric} is the best",
            where=f"best:{metric}",
            todo=f"say best:{metric}:min or best:{metric}:max",
        )
    choose = max if chosen == "max" else min
    header = choose(rated, key=lambda pair: pair[0])[1]
    return ManifestName(repository.run, header.seq, header.step, header.generation)


def describe_best(reference: Reference) -> str:
    """Say what a reference to the best of a metric means, such as ``the lowest loss``; empty for every other one."""
    kind, _, rest = str(reference).partition(":")
    metric, _, order = rest.partition(":")
    chosen = order_of(metric) if not order else "max" if order == "max" else "min"
    return f"the {WORDS[chosen]} {metric}" if kind == "best" and metric and chosen else ""


def _by_tag(repository: Repository, name: str) -> ManifestName:
    check_name(name, "tag")
    record = repository.tags.get(name)
    for found in _names(repository):
        if found.seq == record.seq:
            return found
    raise NotFoundError(
        f"tag {name!r} points to seq {record.seq}, which is not in place",
        where=repository.backend.root,
        todo="tag another checkpoint",
    )


def load_whole(repository: Repository, name: ManifestName, *, takes_lower: bool = False) -> Manifest:
    """Load a manifest whose packs are all there: the highest generation of its seq by now.

    Args:
        repository: The store and its run.
        name: The manifest, as it was listed.
        takes_lower: Where the highest is not whole, the highest that is will do: for who reads, and replaces nothing. A
            replacement whose maker has not looked for its packs yet, or was killed before that, may have lost them, and
            what it was to replace is in place then.

    Raises:
        CorruptError: It is torn, or a pack is missing; MissingChunkError names the pack.
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
                    words = "seq %d: generation %d was passed over for generation %d: %s"
                    _log.warning(words, name.seq, candidates[0].generation, candidate.generation, problem)
                return manifest
            except FileNotFoundError:
                problem = None
                break
            except CorruptError as error:
                problem = problem or error
        if problem is not None and not takes_lower and not isinstance(problem, MissingChunkError):
            raise problem
        # A pack that is missing may have been rewritten and freed since: then a higher generation names the new one.
        there = generations_of(repository.manifests, name.seq)
        if not there:
            raise DroppedError(f"seq {name.seq} was dropped while it was being read", where=repository.backend.root)
        there = there if takes_lower else there[:1]
        if problem is not None and there == candidates:
            raise problem
        candidates = there
    raise ConflictError("a manifest is replaced again and again while it is read", where=repository.backend.root)


def generations_of(manifests: Manifests, seq: int) -> list[ManifestName]:
    """Return the generations of a checkpoint that are in place, the highest first; none of one that is dropped."""
    listing = manifests.listing()
    if seq in listing.dropped:
        return []
    found = (name for name in (*listing.names, *listing.lower) if name.seq == seq)
    return sorted(found, key=lambda name: name.generation, reverse=True)


def newest_whole(repository: Repository) -> tuple[Manifest, list[str]]:
    """Load the newest checkpoint that is whole; torn ones, and ones with missing packs, are passed over.

    Returns:
        The manifest, and for each one passed over a sentence that names it and says why.

    Raises:
        EmptyRunError: The run has no checkpoint.
        UnreachableError: One that may be the newest needs a tier that cannot be reached.
        UnsupportedError: The newest was made by a newer ckstore; an older one is not taken silently.
        CorruptError: There are checkpoints, and none is whole.
    """
    repository.require_same_store()
    listing = repository.manifests.listing()
    passed_over: list[str] = []
    candidates = sorted((*listing.names, *listing.lower), key=lambda n: (n.seq, n.generation), reverse=True)
    for name in candidates:
        if name.seq in listing.dropped:
            continue
        try:
            manifest = load_whole(repository, name, takes_lower=True)
        except DroppedError:
            continue
        except BackendError as error:
            # An older one in its place would be taken for the newest, and hours of training be done again.
            raise _unread(name, error) from error
        except CorruptError as error:
            passed_over.append(f"seq {name.seq} (step {name.step}) was passed over: {error}")
            continue
        if manifest.header.is_archival:
            continue
        if any(pack.tier == LOST_TIER for pack in manifest.packs):
            passed_over.append(f"seq {name.seq} (step {name.step}) was passed over: some of its tensors are lost")
            continue
        newer = {seq for seq in listing.missing if seq > name.seq}
        return manifest, [*passed_over, *([missing_sentence(repository.run, newer)] if newer else [])]
    if not passed_over and not listing.missing:
        raise no_checkpoint_error(repository.run, repository.backend.root)
    if not passed_over:
        raise CorruptError(
            missing_sentence(repository.run, listing.missing),
            where=repository.backend.root,
            todo="run `ckstore verify`",
        )
    raise CorruptError(
        f"none of the {len(passed_over)} checkpoints of run {repository.run!r} is whole; {passed_over[0]}",
        where=repository.backend.root,
        todo="run `ckstore repair`, which says what can be made whole again",
    )


def _unread(name: ManifestName, error: BackendError) -> BackendError:
    """Return the error for a checkpoint that is newer than any that can be read."""
    return type(error)(
        f"seq {name.seq} (step {name.step}) is the newest checkpoint, and cannot be read: {error.what}",
        where=error.where,
        todo=error.todo or "try again, or name an older checkpoint",
        **error.facts,  # type: ignore[arg-type]
    )
