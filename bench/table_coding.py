"""Tables about coders, histories and residual checkpoints, from the newest records of their cases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from bench.table_cases import Record

CODECS = {
    "codec_full_fp32": "fp32",
    "codec_full_bf16": "bf16",
    "codec_delta_fp32_gap1": "fp32 against gap 1",
    "codec_delta_fp32_gap10": "gap 10",
    "codec_delta_fp32_gap100": "gap 100",
    "codec_delta_bf16_gap10": "bf16 against gap 10",
}
HISTORIES = {
    "history_fp32": "fp32, AdamW",
    "history_bf16": "bf16 + fp32 master",
    "history_rl": "RL-like bf16, after the first",
    "history_lora": "LoRA, after the first",
}
AFTER_THE_FIRST = ("history_rl", "history_lora")
CASES = (*CODECS, *HISTORIES)
Records = dict[str, Record]
BETAS = ("0.95", "0.999")
KEYFRAME_EVERY = 20
POLICIES = {
    "near()": "**near()**",
    "small()": "**small()**",
    "ExCP, c = 2.5": "ExCP (c = 2.5, ideal entropy coder)",
    "4 bits, block-wise": "4 bits, block-wise",
    "8 bits, block-wise": "8 bits, block-wise",
    "weights in bf16": "*exact moments, weights in bf16*",
    "another order of the data": "*exact state, another order of the data*",
}
"""Participant of ``resume_gap`` -> its row."""


def tables(records: Records) -> list[str]:
    """Return the tables of coders and of histories in Markdown, if there are records."""
    return [*_codec_table(records), *_history_table(records)]


def _codec_table(records: Records) -> list[str]:
    cases = {case: title for case, title in CODECS.items() if case in records}
    if not cases:
        return []
    heading = "plain/stored size · GB/s to encode / decode on one core"
    lines = [f"| {heading} | " + " | ".join(cases.values()) + " |", "|---|" + "--:|" * len(cases)]
    bounds = [f"{records[case]['setting']['bound_ratio']:.3f}" for case in cases]
    lines.append("| *order-0 entropy of byte planes* | " + " | ".join(bounds) + " |")
    rows: dict[str, list[str]] = {}
    for case in cases:
        for name in records[case]["participants"]:
            rows.setdefault(name.partition(":")[0], [])
    for name in sorted(rows, key=_rank):
        cells = [_codec_cell(records[case]["participants"], name) for case in cases]
        lines.append(f"| {_bold(name)} | " + " | ".join(cells) + " |")
    lines += _missing(records, "codec_", len(cases))
    return [*lines, ""]


def _codec_cell(participants: Record, name: str) -> str:
    encode, decode = participants.get(f"{name}: encode"), participants.get(f"{name}: decode")
    if encode is None or decode is None:
        return ""
    ratio = encode["samples"][0]["ratio"]
    return f"{ratio:.3f} · {_speed(encode['median'])} / {_speed(decode['median'])}"


def _speed(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _history_table(records: Records) -> list[str]:
    cases = {case: title for case, title in HISTORIES.items() if case in records}
    if not cases:
        return []
    lines = ["| stored size of a history | " + " | ".join(cases.values()) + " |", "|---|" + "--:|" * len(cases)]
    names: dict[str, None] = {}
    for case in cases:
        names |= dict.fromkeys(records[case]["participants"])
    for name in sorted(names, key=_rank):
        cells = [_history_cell(case, records[case]["participants"].get(name)) for case in cases]
        lines.append(f"| {_bold(name)} | " + " | ".join(cells) + " |")
    lines += _missing(records, "history_", len(cases))
    return [*lines, ""]


def _history_cell(case: str, found: Record | None) -> str:
    if found is None:
        return ""
    sample = found["samples"][0]
    if case in AFTER_THE_FIRST:
        return f"{sample['later']:.2%}"
    bounded = sample.get("bounded")
    return f"{sample['value']:.1%}" + ("" if bounded is None else f" ({bounded:.1%})")


def _rank(name: str) -> tuple[bool, bool]:
    return name != "memcpy", not name.startswith("ckstore")


def _bold(name: str) -> str:
    return f"**{name}**" if name.startswith("ckstore") else name


def _missing(records: Records, prefix: str, count: int) -> list[str]:
    found: dict[str, str] = {}
    for case, record in records.items():
        if case.startswith(prefix):
            found |= record["not_available"]
    return [f"| {name} | not available: {reason} |" + " |" * (count - 1) for name, reason in sorted(found.items())]


def residual_table(records: Sequence[Record]) -> str:
    """Return the table of residual checkpoints; each policy's newest result counts.

    Losses of a resumed training do not depend on the machine, so results of several runs may stand in one table.
    """
    newest: dict[str, Record] = {}
    keyframe_ratios: dict[str, float] = {}
    for record in records:
        if record["case"] == "resume_gap":
            newest |= {name: found["samples"][0] for name, found in record["participants"].items()}
            keyframe_ratios |= _keyframe_ratios(record["notes"])
    if not newest:
        return ""
    heads = [f"beta2 {beta}: size ratio (whole history) · loss difference, nats" for beta in BETAS]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
    for policy, label in POLICIES.items():
        found = [(newest.get(f"{policy}, beta2 {beta}"), keyframe_ratios.get(beta)) for beta in BETAS]
        if any(sample for sample, _ in found):
            lines.append(f"| {label} | " + " | ".join(_residual_cell(*each) for each in found) + " |")
    return "\n".join(lines)


def _keyframe_ratios(notes: Iterable[str]) -> dict[str, float]:
    return {beta: float(ratio) for note in notes for ratio, beta in re.findall(r"([\d.]+)x at beta2 ([\d.]+)", note)}


def _residual_cell(sample: Record | None, keyframe_ratio: float | None) -> str:
    if sample is None or keyframe_ratio is None:
        return ""
    ratio = sample["ratio"]
    history = KEYFRAME_EVERY / ((KEYFRAME_EVERY - 1) / ratio + 1 / keyframe_ratio)
    digits = 0 if ratio >= 10 else 1
    return f"{ratio:.{digits}f} ({history:.{digits}f}) · {sample['value']:.4f}"
