"""Plots of an iterative run."""

import json
from pathlib import Path

from trl_grpo_plus.iterative.workdir import WorkDirectory


def plot_iterations(output_dir: str | Path, path: str | Path | None = None) -> Path:
    """Plots the metrics of each iteration: accuracies, the reward model's loss, and the buffer.

    Args:
        output_dir: of a run.
        path: of the image; None: `iterations.png` in `output_dir`.

    Returns:
        The image's path.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no iteration of the run is finished.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'trl-grpo-plus[plots]'.") from error
    metrics = WorkDirectory(output_dir).metrics
    entries = json.loads(metrics.read_text()) if metrics.exists() else []
    if not entries:
        raise ValueError(f"No iteration is finished in {output_dir}.")
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    _draw(
        left,
        entries,
        {
            "policy, by the grader": "grader/accuracy",
            "reward model agrees with grader": "reward_model/agreement",
            "reward model, held out, before": "reward_model/accuracy_before",
            "reward model, held out, after": "reward_model/accuracy_after",
        },
    )
    left.set(title="accuracy", ylim=(0, 1))
    _draw(middle, entries, {"reward model": "reward_model/loss"})
    middle.set(title="reward-model loss")
    _draw(right, entries, {"samples in the buffer": "replay/size", "new": "samples/new", "history": "samples/history"})
    right.set(title="replay", ylim=(0, None))
    for axes in (left, middle, right):
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    path = Path(path or Path(output_dir) / "iterations.png")
    figure.savefig(path, dpi=150)
    return path


def _draw(axes, entries: list[dict], curves: dict[str, str]) -> None:
    for label, key in curves.items():
        points = [(entry["iteration"], entry[key]) for entry in entries if entry.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
