"""Tables and sentences about coding and histories, from the newest records of their cases."""

from __future__ import annotations

from typing import Any

PREFIXES = ("codec_", "history_")
CODECS = {
    "codec_full_fp32": "fp32",
    "codec_full_bf16": "bf16",
    "codec_delta_fp32_gap1": "fp32 against gap 1",
    "codec_delta_fp32_gap10": "gap 10",
    "codec_delta_fp32_gap100": "gap 100",
    "codec_delta_bf16_gap10": "bf16 against gap 10",
}
SUMMARY = {
    "codec_full_fp32": "fp32 training state",
    "codec_full_bf16": "bf16 weights",
    "codec_delta_fp32_gap10": "fp32 against ten steps before",
}
HISTORIES = {
    "history_fp32": "fp32, AdamW",
    "history_bf16": "bf16 + fp32 master",
    "history_rl": "RL-like bf16, after the first",
    "history_lora": "LoRA, after the first",
}
AFTER_THE_FIRST = ("history_rl", "history_lora")
Records = dict[str, dict[str, Any]]


def tables(records: Records) -> list[str]:
    """Return both tables in Markdown, those of which there are records."""
    return [*_codec_table(records), *_history_table(records)]


def summary(records: Records) -> list[str]:
    """Return one sentence about coding: how small, how fast on one core, beside ZipNN."""
    parts = []
    for case, title in SUMMARY.items():
        found = records.get(case, {"participants": {}})["participants"]
        cells = [(name, _codec_cell(found, name)) for name in ("ckstore", "zipnn")]
        if all(cell for _, cell in cells):
            parts.append(f"{title}: " + ", ".join(f"{name} {cell}" for name, cell in cells))
    return [f"Lossless, plain/stored · encode / decode in GB/s of one core: {'; '.join(parts)}."] if parts else []


def _codec_table(records: Records) -> list[str]:
    cases = {case: title for case, title in CODECS.items() if case in records}
    if not cases:
        return []
    heading = "plain/stored · encode / decode, GB/s of one core"
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


def _codec_cell(participants: dict[str, Any], name: str) -> str:
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
    lines = ["| stored bytes of a history | " + " | ".join(cases.values()) + " |", "|---|" + "--:|" * len(cases)]
    names: dict[str, None] = {}
    for case in cases:
        names |= dict.fromkeys(records[case]["participants"])
    for name in sorted(names, key=_rank):
        cells = [_history_cell(case, records[case]["participants"].get(name)) for case in cases]
        lines.append(f"| {_bold(name)} | " + " | ".join(cells) + " |")
    lines += _missing(records, "history_", len(cases))
    return [*lines, ""]


def _history_cell(case: str, found: dict[str, Any] | None) -> str:
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


def sentences(records: Records) -> list[str]:
    """Return what there is to say of codecs, histories and engines in words."""
    said = []
    if any(case in records for case in CODECS):
        said.append(
            "Coding: tensors of a really trained state, alone or against those a gap of steps before; "
            "peers are told for free which of their forms is smaller."
        )
    if "history_fp32" in records:
        setting = records["history_fp32"]["setting"]
        keyframe_count = len(setting.get("keyframes", []))
        said.append(
            f"Histories: {setting['checkpoints']} checkpoints, 25 steps apart, all files counted; peers chain without "
            f"end, or (in brackets) make keyframes where ckstore did: {keyframe_count} times."
        )
    for kind in ("fp32", "bf16"):
        said += _speeds_of_history(records, kind)
    for case in ("engine_write", "engine_read"):
        ratios = records.get(case, {}).get("ratios", {})
        listed = ", ".join(f"{name.partition(' / ')[0][8:]} {found['median']:.2f}" for name, found in ratios.items())
        if listed:
            said.append(f"{case.partition('_')[2].capitalize()} rate of an engine over the device's: {listed}.")
    return said


def _speeds_of_history(records: Records, kind: str) -> list[str]:
    said = []
    for case, what in (("history_commit", "Durable commit"), ("history_restore", "Cold restore")):
        record = records.get(f"{case}_{kind}")
        if record is None:
            continue
        parts = []
        for name, found in record["participants"].items():
            over = record["ratios"].get(f"{name} / device")
            beside = f" ({over['median']:.2f} of the device)" if over else ""
            parts.append(f"{name.removeprefix('ckstore ')} {found['median']:.2f}{beside}")
        said.append(f"{what}, {kind}, GB/s of plain bytes: {', '.join(parts)}.")
    return said
