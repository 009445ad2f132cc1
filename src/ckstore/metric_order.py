"""Whether the lowest or the highest value of a metric is the best, where its name leaves no doubt.

One word names the metric. Every other word of the name must be listed as one that says where or how it was taken:
``val_loss``, ``accuracy/eval``, ``f1_macro``, ``word_error_rate``. Any other word may turn the meaning around, as in
``time_to_accuracy``, ``rejected_reward`` or ``loss_ratio``, and leaves doubt.
"""

from __future__ import annotations

import re
from typing import Literal

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
