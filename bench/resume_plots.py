"""Plots of resumed losses and of quality against size, for docs/plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

Found = dict[str, Any]

CURVES = ("near()", "small()", "ExCP, c = 2.5", "no moments", "stale weights")
COLOURS = {"ckstore": "tab:blue", "ExCP": "tab:red", "block-wise": "tab:orange"}
SMOOTHED = 10
GAP_MIN = 1e-5


def draw(everything: dict[float, list[Found]], exact: dict[float, Found], folder: Path) -> list[Path]:
    """Draw both plots and return their paths; return nothing without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return []
    mpl.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, painter in (("resume_gap", _paint_curves), ("resume_frontier", _paint_frontier)):
        figure, axes = pyplot.subplots(1, len(everything), figsize=(11, 5), sharey=True, squeeze=False)
        for axis, (beta2, findings) in zip(axes[0], everything.items(), strict=True):
            axis.set_title(f"beta2 = {beta2}")
            painter(axis, findings, exact[beta2])
        figure.tight_layout()
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths


def _paint_curves(axis: Any, findings: list[Found], exact: Found) -> None:
    """Differences of training losses from those of the exact resume, smoothed."""
    own = np.array(exact["points"][-1]["losses"])
    for found in findings:
        if found["name"] in CURVES:
            losses = np.array(found["points"][-1]["losses"])
            width = min(SMOOTHED, losses.size)
            smooth = np.convolve(losses - own, np.ones(width) / width, mode="valid")
            axis.plot(np.arange(smooth.size) + width, smooth, label=found["name"], linewidth=1.5)
    axis.axhline(0.0, color="black", linewidth=0.8)
    axis.set_yscale("symlog", linthresh=0.005)
    axis.set_xlabel("steps after the resume")
    axis.set_ylabel(f"training loss less the exact resume's, mean of {SMOOTHED} (nats)")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def _paint_frontier(axis: Any, findings: list[Found], exact: Found) -> None:
    """Mean absolute gap against the ratio to fp32 state."""
    for label, colour in COLOURS.items():
        points = sorted((_ratio(found), _gap(found), found["name"]) for found in findings if _family(found) == label)
        if points:
            xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
            axis.plot(xs, ys, "o", color=colour, label=label, zorder=3)
        for x, y, name in points:
            axis.annotate(name, (x, y), fontsize=6.5, xytext=(3, 4), textcoords="offset points")
    for found in findings:
        if found["kind"] == "yardstick" and _gap(found) >= GAP_MIN:
            axis.axhline(_gap(found), color="grey", linewidth=0.8, linestyle=":")
            axis.text(1.05, _gap(found), found["name"], fontsize=6.5, color="grey", va="bottom")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(1, 1000)
    axis.set_xlabel("times smaller than fp32 weights and moments (96 bits a parameter)")
    axis.set_ylabel("mean absolute gap over the resumed steps (nats)")
    axis.legend(fontsize=8, loc="lower right")
    axis.grid(alpha=0.3, which="both")


def _family(found: Found) -> str:
    if found["kind"] == "ckstore":
        return "ckstore"
    return "ExCP" if found["name"].startswith("ExCP") else "block-wise" if found["kind"] == "baseline" else ""


def _ratio(found: Found) -> float:
    links = found["bits"][1:] or found["bits"]
    bits = np.mean([sum(link[role] for role in ("w", "m", "v", "exact")) for link in links])
    return float(96.0 / bits)


def _gap(found: Found) -> float:
    return max(GAP_MIN, float(found["points"][-1]["gap"]))
