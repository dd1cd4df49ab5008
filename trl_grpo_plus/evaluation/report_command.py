"""`trl-grpo-plus report`: curves and completions of a training run, as PNG and one HTML page."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_grpo_plus.evaluation.report import fill_template
from trl_grpo_plus.evaluation.results import write_atomically

# Panel title -> patterns of the metrics that it shows, in the order of the page. What no pattern takes gets a panel by
# the part of its name before the first slash.
PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Evaluation", (r"eval_math/(pass|mean|maj)@\d+",)),
    ("Reward", (r"reward", r"reward_std")),
    ("Reward by function", (r"rewards/.+/mean",)),
    ("KL", (r"kl", r"kl/.+")),
    ("Entropy", (r"entropy(/.+)?",)),
    ("Completion length, tokens", (r"completions/(mean|min|max)_length",)),
    ("Truncated and degenerate", (r"completions/clipped_ratio", r"frac_reward_zero_std")),
    ("Clip ratio", (r"clip_ratio/(low_mean|high_mean|region_mean)", r"clip_ratio")),
    ("Process reward of a step", (r"process/.+/step_mean",)),
    ("Steps", (r"process/steps_per_completion",)),
    ("Process advantages", (r"process/advantage_abs_mean", r"process/unscored_ratio")),
    ("Process, others", (r"process/.+",)),
    ("Reward model", (r"(prm|orm|reward_model|rm)/.+",)),
    ("Loss", (r"loss",)),
    ("Gradient norm", (r"grad_norm",)),
    ("Learning rate", (r"learning_rate",)),
)
# Bookkeeping, or shown as part of another metric.
IGNORED = re.compile(
    r"step|epoch|total_flos|train_.*|num_tokens|step_time|rewards/.+/std|process/.+/step_std|completions/.*terminated.*|"
    r"clip_ratio/(low_min|high_max)|eval_math/(truncated|no_answer|mean_tokens)|.*(runtime|_per_second)"
)


class RunError(ValueError):
    """The directory is no training run that can be reported."""


def main(argv: list[str]) -> int:
    """Runs the command; 0 done, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="trl-grpo-plus report", description="Curves and completions of a training run, as PNG and one HTML page."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="output directory of a trainer, or one of its checkpoints")
    parser.add_argument("--output", help="directory of the report (default RUN_DIR/report)")
    parser.add_argument(
        "--completions", type=int, default=16, metavar="N", help="completions kept a step (default 16)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        metavar="N",
        help="steps kept of the completions, evenly spread (default 100)",
    )
    parser.add_argument("--no-plots", action="store_true", help="no PNG")
    args = parser.parse_args(argv)
    run = Path(args.run_dir)
    output = Path(args.output) if args.output else run / "report"
    try:
        if args.completions < 0 or args.steps < 1:
            raise RunError("--completions must not be negative and --steps must be at least 1")
        history, source = read_history(run)
        panels = make_panels(history)
        completions, total = read_completions(run, args.steps, args.completions)
        if not args.no_plots:
            draw_panels(panels, output / "curves.png")
    except (RunError, ImportError) as error:
        print(f"trl-grpo-plus report: {error}", file=sys.stderr)
        return 2
    data = {
        "title": run.resolve().name,
        "source": source,
        "panels": panels,
        "completions": completions,
        "steps_total": total,
    }
    write_atomically(output / "report.html", fill_template("run.html", data))
    last = max((p[0] for panel in panels for s in panel["series"] for p in s["points"]), default=0)
    shown = f"{sum(len(c['rows']) for c in completions)} completions of {len(completions)} of {total} steps"
    if not total:
        shown = "no completions (log_completions=True keeps them)"
    print(f"{len(panels)} panels up to step {last:g}; {shown}.")
    print(f"Written to {output}. Next: open {output / 'report.html'}.")
    return 0


def read_history(run: Path) -> tuple[list[dict[str, Any]], str]:
    """Log history of a run: its own `trainer_state.json`, or that of the last checkpoint.

    Raises:
        RunError: none is there, or it cannot be read.
    """
    if not run.is_dir():
        raise RunError(f"{run} is no directory")
    checkpoints = sorted(
        ((int(m.group(1)), p) for p in run.iterdir() if (m := re.fullmatch(r"checkpoint-(\d+)", p.name))),
        reverse=True,
    )
    for path in [run / "trainer_state.json", *(p / "trainer_state.json" for _, p in checkpoints)]:
        if not path.exists():
            continue
        try:
            history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is no trainer state: {error}") from error
        if not any(_metrics(entry) for entry in history):
            raise RunError(f"{path} has no logged metrics yet")
        return history, str(path.relative_to(run))
    raise RunError(
        f"{run} has no trainer_state.json and no checkpoint with one; the trainer writes it with each checkpoint, "
        "or at the end with trainer.save_state()"
    )


def _metrics(entry: dict[str, Any]) -> dict[str, float]:
    return {
        k: float(v)
        for k, v in entry.items()
        if isinstance(v, (int, float)) and not isinstance(v, bool) and not IGNORED.fullmatch(k)
    }


def make_panels(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Panels of curves, `{"title", "series": [{"name", "points": [[step, value], ...]}]}`; only finite values."""
    series: dict[str, dict[float, float]] = {}
    for entry in history:
        if "step" not in entry:
            continue
        for name, value in _metrics(entry).items():
            if math.isfinite(value):
                # The last value of a step counts: a resumed run logs the steps after its checkpoint again.
                series.setdefault(name, {})[float(entry["step"])] = value
    panels: dict[str, list[str]] = {title: [] for title, _ in PANELS}
    for name in series:
        for title, patterns in PANELS:
            if any(re.fullmatch(p, name) for p in patterns):
                panels[title].append(name)
                break
        else:
            panels.setdefault(name.split("/")[0], []).append(name)
    out = []
    for title, names in panels.items():
        curves = [{"name": n, "points": [[s, v] for s, v in sorted(series[n].items())]} for n in names]
        if title == "Reward" and len(curves) > 1:
            curves.sort(key=lambda c: c["name"] != "reward")
        if curves:
            out.append({"title": title, "series": curves})
    return out


def read_completions(run: Path, max_steps: int, per_step: int) -> tuple[list[dict[str, Any]], int]:
    """Completions that TRL wrote with `log_completions=True`, of evenly spread steps.

    Returns:
        `[{"step", "columns", "rows"}]`, and the number of steps that the run has completions of. A row has "prompt",
        "completion", "values" (column -> number or text) and "steps" (column -> scores) for step scores.
    """
    files = sorted((run / "completions").glob("completions_*.parquet")) if per_step else []
    total = len(files)
    if total > max_steps:
        picked = {round(i * (total - 1) / max(1, max_steps - 1)) for i in range(max_steps)}
        files = [f for i, f in enumerate(files) if i in picked]
    out = []
    for file in files:
        import pandas as pd

        try:
            frame = pd.read_parquet(file)
        except Exception as error:
            raise RunError(f"{file} cannot be read: {error}") from error
        if "completion" not in frame or not len(frame):
            continue
        rows = [_completion_row(r) for r in frame.head(per_step).to_dict("records")]
        number = int(re.search(r"(\d+)$", file.stem).group(1))
        out.append({"step": int(frame["step"].iloc[0]) if "step" in frame else number, "rows": rows})
    return out, total


def _completion_row(row: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    steps: dict[str, list[float | None]] = {}
    for name, value in row.items():
        if name in ("step", "prompt", "completion"):
            continue
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, list) and all(v is None or isinstance(v, (int, float)) for v in value):
            steps[name] = [None if v is None or not math.isfinite(v) else round(float(v), 4) for v in value]
        elif isinstance(value, float):
            values[name] = round(value, 4) if math.isfinite(value) else None
        elif value is not None:
            values[name] = value if isinstance(value, (int, str, bool)) else str(value)
    return {
        "prompt": _text(row.get("prompt")),
        "completion": _text(row["completion"]),
        "values": values,
        "steps": steps,
    }


def _text(value: Any) -> str:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return "\n\n".join(
            f"{m['role']}: {_content(m.get('content'))}" if isinstance(m, dict) and "role" in m else str(m)
            for m in value
        )
    return "" if value is None else str(value)


def _content(content: Any) -> str:
    if hasattr(content, "tolist"):
        content = content.tolist()
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def draw_panels(panels: Sequence[dict[str, Any]], path: Path) -> None:
    """One PNG with all panels."""
    from trl_grpo_plus.evaluation.plots import COLORS, new_figure, style

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(rows, columns, width=4.6 * columns, height=2.9 * rows)
    flat = axes.ravel()
    for ax, panel in zip(flat, panels, strict=False):
        for color, s in zip(COLORS * 9, panel["series"], strict=False):
            x, y = zip(*s["points"], strict=True)
            marker = "o" if len(x) < 25 else None
            ax.plot(x, y, color=color, lw=1.4, marker=marker, ms=3, label=short_name(s["name"], panel))
        style(ax, panel["title"], "step", "")
        ax.legend(fontsize=7, framealpha=0.6, edgecolor="none", borderpad=0.2)
    for ax in flat[len(panels) :]:
        ax.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def short_name(name: str, panel: dict[str, Any]) -> str:
    """Metric name without the parts that all curves of the panel share."""
    names = [s["name"].split("/") for s in panel["series"]]
    parts = name.split("/")
    if len(names) == 1:
        return "/".join(parts[1:-1] or parts[-1:])
    while len(parts) > 1 and all(len(n) > 1 and n[0] == parts[0] for n in names):
        parts, names = parts[1:], [n[1:] for n in names]
    while len(parts) > 1 and all(len(n) > 1 and n[-1] == parts[-1] for n in names):
        parts, names = parts[:-1], [n[:-1] for n in names]
    return "/".join(parts)
