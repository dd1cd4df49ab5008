"""How the quickstart shows a run: the table, one completion with its advantages, and the curves."""

from pathlib import Path

from rich.table import Table
from rich.text import Text

from trl_grpo_plus.demo.training import Run


def accuracy_table(run: Run) -> Table:
    """Sampled and greedy accuracy on the held-out problems before and after, with 95 % intervals."""
    before, after = run.evaluations[0], run.evaluations[-1]
    table = Table(title=f"{before.sampled.num_problems} held-out problems", title_justify="left")
    for column in ("accuracy", "before", "after", "gain"):
        table.add_column(column, justify="left" if column == "accuracy" else "right")
    for name in ("sampled", "greedy"):
        old, new = getattr(before, name), getattr(after, name)
        table.add_row(name, str(old), str(new), f"{100 * (new.accuracy - old.accuracy):+.1f}")
    table.caption = "95 % Wilson intervals; sampled: temperature 1"
    table.caption_justify = "left"
    return table


def example_table(run: Run) -> Table:
    """One sampled completion: a step's score, its tokens, and below each token its advantage."""
    width = max(len(step.tokens) for step in run.example)
    table = Table(title=run.example_prompt.strip(), title_justify="left", title_style="italic")
    table.add_column("score", justify="right")
    table.add_column("a sampled completion, and the advantage of each token", no_wrap=True)
    for step in run.example:
        grid = Table.grid(padding=(0, 1))
        for _ in range(width):
            grid.add_column(justify="right", min_width=5)
        grid.add_row(*(Text(token.strip(" ").replace("\n", "⏎"), style="bold") for token in step.tokens))
        grid.add_row(
            *(Text(f"{a:+.2f}", style="green" if a > 0 else "red" if a < 0 else "dim") for a in step.advantages)
        )
        table.add_row("-" if step.score is None else f"{step.score:.2f}", grid)
    if run.settings["supervision"] == "outcome":
        table.caption = "one advantage for all tokens: the final answer's"
    else:
        form = {"sum": "sum", "min": "soft minimum", "mean": "mean"}[run.settings["credit_assignment"]]
        table.caption = f"the {form} of its own and all later steps' normalised scores"
        if run.settings["supervision"] == "both":
            table.caption += ", and the final answer's"
    table.caption_justify = "left"
    return table


def plot_curves(run: Run, path: Path):
    """Writes a PNG: rewards of the training batches, and accuracy on the held-out problems with its interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = range(1, len(run.rewards) + 1)
    _curve(left, steps, run.rewards, "final answer right", "C0")
    if run.step_rewards:
        _curve(left, steps, run.step_rewards, "mean step score", "C1")
    left.set(title="Training batches", xlabel="optimizer step", ylabel="reward")

    at = [evaluation.step for evaluation in run.evaluations]
    for name, color in (("greedy", "C2"), ("sampled", "C0")):
        points = [getattr(evaluation, name) for evaluation in run.evaluations]
        right.plot(at, [100 * point.accuracy for point in points], color=color, marker="o", markersize=3, label=name)
        right.fill_between(
            at, [100 * p.low for p in points], [100 * p.high for p in points], color=color, alpha=0.15, linewidth=0
        )
    right.set(title="Held-out problems", xlabel="optimizer step", ylabel="accuracy (%), 95 % interval")
    right.set_ylim(top=102)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", frameon=False)
    supervision = {"both": "process and outcome"}.get(run.settings["supervision"], run.settings["supervision"])
    figure.suptitle(f"Quickstart, {supervision} supervision, seed {run.settings['seed']}")
    figure.savefig(path, dpi=130)


def _curve(axes, steps, values, label, color, window=7):
    """The values faint, and their centred moving average strong."""
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    half = window // 2
    smooth = [sum(part) / len(part) for part in (values[max(0, i - half) : i + half + 1] for i in range(len(values)))]
    axes.plot(steps, smooth, color=color, label=label)
