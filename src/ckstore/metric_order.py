"""Whether the lowest or the highest value of a metric is the best, where its name leaves no doubt.

The word that names the metric is the last one, after what says where or how it was taken: ``val_loss``,
``accuracy/eval``, ``f1_macro``, ``word_error_rate``. A name that also holds the opposite, a negation, or a word for a
change (``neg_log_loss``, ``accuracy_loss``, ``loss_ratio``) leaves doubt, and so does every name that is not listed.
"""

from __future__ import annotations

import itertools
import re
from typing import Literal

Order = Literal["min", "max"]

WORDS: dict[Order, str] = {"min": "lowest", "max": "highest"}
"""What people read."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOWER = _words("loss losses ppl perplexity err error errors nll mse rmse mae mape wer cer fid bpb bpc bpd")
_HIGHER = _words(
    "acc accuracy f1 bleu rouge rougel chrf reward rewards auc auroc auprc precision recall psnr ssim iou miou dice r2"
)
_RATES = _words("success win")
"""What is a metric of which more is better when ``rate`` follows."""

_QUALIFIERS = _words(
    "train training val valid validation eval evaluation test dev mean avg average ema smooth smoothed total sum final "
    "last best epoch step batch sample token per top macro micro weighted score rate pct percent value overall"
)
"""What may follow the word that names the metric."""

_DOUBTS = _words(
    "no non not neg negative negated minus inv inverse inverted anti delta diff difference gap drop change decrease "
    "increase improvement reduction gain ratio relative std stddev var variance scale weight coef count num"
)
_CASES = re.compile(r"([a-z0-9]{2})([A-Z][a-z])")
_TOKENS = re.compile(r"[a-z]+[0-9]*|[0-9]+")


def order_of(metric: str) -> Order | None:
    """Return which value of a metric is the best, or None where its name leaves doubt."""
    if metric.startswith("-"):
        return None
    tokens = [_plain(token) for token in _TOKENS.findall(_CASES.sub(r"\1 \2", metric).lower())]
    if not tokens or tokens[0] == "1" or not _DOUBTS.isdisjoint(tokens):
        return None
    is_rate = any(word in _RATES and after == "rate" for word, after in itertools.pairwise(tokens))
    while tokens and (tokens[-1] in _QUALIFIERS or tokens[-1].isdigit()):
        tokens.pop()
    if not tokens:
        return None
    if is_rate and tokens[-1] in _RATES and _LOWER.isdisjoint(tokens):
        return "max"
    if tokens[-1] in _LOWER and _HIGHER.isdisjoint(tokens):
        return "min"
    if tokens[-1] in _HIGHER and _LOWER.isdisjoint(tokens):
        return "max"
    return None


def _plain(token: str) -> str:
    """Return a word without the number at its end, unless that belongs to it: ``bleu4``, ``top5``, but ``f1``."""
    return token if token in _HIGHER or token.isdigit() else token.rstrip("0123456789")
