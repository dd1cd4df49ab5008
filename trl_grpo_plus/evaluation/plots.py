"""PNG plots of an evaluation. matplotlib is an optional extra and imported when a plot is made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trl_grpo_plus.evaluation.results import Record

# Okabe and Ito's colours, told apart with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def new_figure(rows: int = 1, columns: int = 1, width: float = 7.0, height: float = 4.2):
    """A figure and its (rows, columns) axes, tied to no global state: plotting in training cannot disturb the user's.

    Raises:
        ImportError: matplotlib is not installed; says how to install it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'trl-grpo-plus[plots]'") from error
    figure = Figure(figsize=(width, height), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def style(axes, title: str, x: str, y: str) -> None:
    """Title, labels and a light grid."""
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def curves_by_k(summaries: dict[str, dict[str, Any]], path: Path) -> bool:
    """pass@k and maj@k against k for each model, with intervals (DeepSeekMath, figure 7). False when k is 1."""
    if not any(s["samples"] > 1 for s in summaries.values()):
        return False
    figure, axes = new_figure()
    axes = axes[0, 0]
    ticks: set[int] = set()
    curve = 0
    for color, (name, s) in zip(COLORS * 9, summaries.items(), strict=False):
        for kind, line, marker in (("pass", "-", "o"), ("maj", "--", "s")):
            points = {
                int(m.group(1)): value
                for key, value in s["metrics"].items()
                if (m := re.fullmatch(rf"{kind}@(\d+)", key))
            }
            if kind == "maj" and 1 not in points and "pass@1" in s["metrics"]:
                points[1] = s["metrics"]["pass@1"]
            if len(points) < 2:
                continue
            ks = sorted(points)
            ticks.update(ks)
            y = [100 * points[k]["value"] for k in ks]
            low, high = ([100 * points[k][b] for k in ks] for b in ("low", "high"))
            # Curves that share a point are moved apart a little, so that their intervals can be told apart.
            x = [k * 2 ** (0.03 * (curve - (2 * len(summaries) - 1) / 2)) for k in ks]
            below, above = ([max(0.0, v) for v in side] for side in (np.subtract(y, low), np.subtract(high, y)))
            axes.errorbar(
                x,
                y,
                [below, above],
                fmt=line,
                marker=marker,
                ms=5,
                color=color,
                lw=1.6,
                elinewidth=0.9,
                capsize=2.5,
                markerfacecolor=color if kind == "pass" else "white",
                label=f"{name}: {kind}@k",
            )
            curve += 1
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [str(k) for k in sorted(ticks)])
    axes.minorticks_off()
    style(axes, "pass@k and maj@k", "k", "problems solved, %")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    return True


def accuracy_by(summaries: dict[str, dict[str, Any]], field: str, path: Path) -> bool:
    """Accuracy by level or subject, one bar a model, with intervals. False when the data set has no such column."""
    groups = sorted({g for s in summaries.values() for g in s[field]})
    if not groups:
        return False
    wide = field == "by_subject"
    figure, axes = new_figure(width=8.5 if wide else 7.0)
    axes = axes[0, 0]
    width = 0.8 / len(summaries)
    label = next(iter(summaries.values()))["main_metric"]
    for i, (color, (name, s)) in enumerate(zip(COLORS * 9, summaries.items(), strict=False)):
        for j, group in enumerate(groups):
            values = s[field].get(group, {}).get(s["main_metric"])
            if values is None:
                continue
            x = j + (i - (len(summaries) - 1) / 2) * width
            value = 100 * values["value"]
            axes.bar(x, value, width * 0.9, color=color, alpha=0.85, label=name if j == 0 else None)
            below, above = max(0.0, value - 100 * values["low"]), max(0.0, 100 * values["high"] - value)
            axes.errorbar(x, value, [[below], [above]], color="#333333", linewidth=1, capsize=2)
    counts = {g: next(s[field][g]["problems"] for s in summaries.values() if g in s[field]) for g in groups}
    names = []
    for g in groups:
        short = g.replace(" & ", " &\n").replace("Intermediate ", "Intermediate\n")
        names.append(f"{short}\nn={counts[g]}")
    axes.set_xticks(range(len(groups)), names, fontsize=8)
    axes.set_ylim(0, 104)
    style(axes, f"Accuracy {field.replace('_', ' ')}", "", f"{label.replace('greedy', 'greedy pass@1')}, %")
    if len(summaries) > 1:
        figure.legend(
            *axes.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=4
        )
    figure.savefig(path)
    return True


def length_histogram(records: dict[str, Sequence[Record]], path: Path) -> bool:
    """Completion lengths of right and other samples, one panel a model. False when no length is known."""
    known = {
        name: rows
        for name, all_rows in records.items()
        if (rows := [r for r in all_rows if r.get("num_tokens") is not None and r["finish_reason"] != "error"])
    }
    if not known:
        return False
    lengths = [r["num_tokens"] for rows in known.values() for r in rows]
    # The longest half percent are counted in the last bin, so that one runaway does not squeeze the rest.
    longest = max(1.0, float(np.percentile(lengths, 99.5)))
    bins = [longest * i / 40 for i in range(41)]
    clipped = max(lengths) > longest
    figure, axes = new_figure(rows=len(known), height=1.2 + 2.4 * len(known))
    for ax, (name, rows) in zip(axes[:, 0], known.items(), strict=True):
        parts = [
            ("correct", "#009E73", [r["num_tokens"] for r in rows if r["correct"]]),
            (
                "other",
                "#D55E00",
                [r["num_tokens"] for r in rows if not r["correct"] and r["finish_reason"] != "length"],
            ),
            (
                "truncated",
                "#999999",
                [r["num_tokens"] for r in rows if not r["correct"] and r["finish_reason"] == "length"],
            ),
        ]
        shown = [p for p in parts if p[2]]
        ax.hist(
            [np.minimum(p[2], longest) for p in shown],
            bins=bins,
            stacked=True,
            color=[p[1] for p in shown],
            label=[f"{p[0]} ({len(p[2])})" for p in shown],
        )
        style(ax, f"Completion length: {name}", "tokens (last bin: and more)" if clipped else "tokens", "samples")
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    return True


def write_plots(summaries: dict[str, dict[str, Any]], records: dict[str, Sequence[Record]], output: Path) -> list[str]:
    """Makes the plots that the data allows; returns their file names."""
    plots = {
        "curves.png": lambda p: curves_by_k(summaries, p),
        "by_level.png": lambda p: accuracy_by(summaries, "by_level", p),
        "by_subject.png": lambda p: accuracy_by(summaries, "by_subject", p),
        "lengths.png": lambda p: length_histogram(records, p),
    }
    return [name for name, draw in plots.items() if draw(output / name)]
