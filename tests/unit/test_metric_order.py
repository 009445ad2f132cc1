"""Protects the order of metrics: a name decides it only if it is unambiguous, and the order is reported."""

from __future__ import annotations

import pytest

from ckstore.errors import NotFoundError, UsageError
from ckstore.ops.gc.policy import Best, Retention
from ckstore.store.refs import describe_best, order_of

LOWER = (
    "loss", "val_loss", "loss/eval", "train.loss_ema", "valLoss", "LOSS", "ppl", "eval/perplexity", "error", "top1_err",
    "word_error_rate", "wer", "RMSE", "test-mse", "nll", "loss_per_token", "l1_loss", "best_val_loss", "lm_loss_epoch",
    "mse_loss", "cross_entropy_loss", "eval/crossEntropyLoss", "char_error_rate", "test/mean_absolute_error",
    "metrics/eval_loss", "running_loss", "per_token_nll", "top_5_error", "word_ppl", "reconstruction_loss",
)  # fmt: skip
HIGHER = (
    "acc", "accuracy", "val/acc", "acc@5", "top5_acc", "evalAccuracy", "f1", "f1_macro", "eval_f1_score", "bleu",
    "BLEU-4", "bleu4", "rougeL", "rouge1", "mean_reward", "reward", "auroc", "mIoU/val", "r2", "success_rate",
    "win_rate", "recall@10", "mean_token_accuracy", "balanced_accuracy", "roc_auc", "top_5_acc", "episode_reward",
    "eval/success_rate", "reward_accuracy", "weighted_f1", "val_recall_macro",
)  # fmt: skip
DOUBTFUL = (
    "score", "speed", "lr", "x", "", "3", "throughput", "neg_log_loss", "negative_loss", "-loss", "1-acc",
    "accuracy_loss",
    "loss_accuracy", "f1_error", "loss_scale", "reward_std", "acc_drop", "loss_ratio", "train_val_gap", "loss_diff",
    "time", "step", "kl", "entropy", "eval", "success", "win", "not_f1", "rate", "val", "grad_norm",
    "time_to_accuracy", "steps_to_accuracy", "epochs_to_best_acc", "seconds_per_reward", "flops_at_acc",
    "rejected_reward", "rewards/rejected", "attack_accuracy", "attack_success_rate", "adversarial_acc", "forget_acc",
    "mia_auc", "opponent_win_rate", "failure_success_rate", "worst_reward", "chance_accuracy", "spam_recall",
    "precision", "mixed_precision", "train_precision", "forget_loss", "discriminator_loss", "opponent_error",
    "attack/wer", "entropy_loss", "queue_loss", "baseline_ppl", "best_acc_epoch", "best_val_loss_step",
    "acc_best_epoch", "100-acc", "1.0-accuracy", "100 - f1", "grad_acc_step",
)  # fmt: skip


@pytest.mark.parametrize(
    ("order", "names"), [("min", LOWER), ("max", HIGHER), (None, DOUBTFUL)], ids=["min", "max", "doubt"]
)
def test_order_follows_the_metric_word(order, names):
    assert [name for name in names if order_of(name) != order] == []


@pytest.mark.parametrize("metric", ["score", "neg_log_loss", "speed"])
def test_best_of_ambiguous_metric_needs_an_order(store, metric):
    for step, value in enumerate([2.0, 1.0, 3.0]):
        store.commit({"n": step}, step, metrics={metric: value})
    with pytest.raises(UsageError, match="whether low or high values are better") as caught:
        store.info(f"best:{metric}")
    assert f"best:{metric}:min or best:{metric}:max" in str(caught.value)
    assert (store.info(f"best:{metric}:min").step, store.info(f"best:{metric}:max").step) == (1, 2)
    with pytest.raises(UsageError, match="lowest or the highest") as caught:
        Retention(keep_best=f"{metric}:2")
    assert f"{metric}:2:min or {metric}:2:max" in str(caught.value)
    with pytest.raises(NotFoundError, match=f"(?i)recorded metrics: {metric}"):
        store.info("best:speeed")


@pytest.mark.parametrize(("metric", "step"), [("acc", 2), ("eval/f1", 2), ("val_loss", 1), ("ppl", 1)])
def test_best_of_clear_metric_is_the_better_value(store, metric, step):
    for number, value in enumerate([2.0, 1.0, 3.0]):
        store.commit({"n": number}, number, metrics={metric: value})
    assert store.info(f"best:{metric}").step == step
    assert store.gc(Retention(keep_best=metric), dry_run=True).runs[0].verdicts[2 - step].is_kept


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("best:loss", "the lowest loss"), ("best:acc", "the highest acc"), ("best:acc:min", "the lowest acc"),
        ("best:score:max", "the highest score"), ("latest", ""), (3, ""), ("seq:3", ""),
        ("best:score", ""), ("best", ""),
    ],
)  # fmt: skip
def test_references_show_their_order(reference, words):
    assert describe_best(reference) == words


def test_rules_show_their_order():
    assert str(Best.of("acc:3")) == "acc:3:max (highest)"
    assert (
        str(Retention(keep_best=("loss", "acc:min"))) == "keep_best loss:1:min (lowest), keep_best acc:1:min (lowest)"
    )
    assert Retention(keep_best="acc").to_config() == {"keep_best": ["acc:1:max"]}


def test_rule_against_the_name_is_applied_with_warning(store):
    """Older versions stored such rules: they treated every metric as a loss."""
    for step, value in enumerate([2.0, 1.0, 3.0]):
        store.commit({"n": step}, step, metrics={"acc": value})
    plan = store.gc({"keep_best": ["acc:1:min"]}, dry_run=True).runs[0]
    assert [verdict.step for verdict in plan.kept] == [2, 1]
    assert plan.notes == (
        "keep_best acc:1:min (lowest): the metric's name implies the opposite order; acc:1 uses that order",
    )
