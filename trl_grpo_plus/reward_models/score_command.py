"""`trl-grpo-plus score`: the steps of completions with their scores, on the terminal and as a page."""

import sys
from pathlib import Path

from trl_grpo_plus.reward_models._cli import Parser, UsageError, best_device, load_rows, one_line, positive

PROG = "trl-grpo-plus score"
SHOWN = 5


def main(argv: list[str]) -> int:
    """Runs the command; returns 0, or 2 for a user's mistake (one line on stderr)."""
    try:
        return _run(_parse(argv))
    except UsageError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2


def _parse(argv: list[str]):
    from trl_grpo_plus.reward_models.formats import FORMATS

    parser = Parser(prog=PROG, description="Scores each step of completions with a process reward model.")
    parser.add_argument("model", help="directory or hub id of the process reward model")
    parser.add_argument("--prompt", help="the question, for one completion")
    parser.add_argument("--completion", help="the completion; '-' reads it from standard input")
    parser.add_argument(
        "--input",
        metavar="FILE",
        help="many: a data set with `prompt` and `completion` (text) or `completions` (steps); "
        "with `labels` their agreement is measured",
    )
    parser.add_argument("--split", default="train", help="split of a hub data set (default: %(default)s)")
    parser.add_argument("--limit", type=positive, help="only the first so many rows of --input")
    parser.add_argument("--format", choices=list(FORMATS), help="the model's format (default: told from its files)")
    parser.add_argument(
        "--delimiter",
        default="newline",
        help="what ends a step: newline, paragraph or a regular expression (default: %(default)s)",
    )
    parser.add_argument(
        "--threshold", type=float, default=0.5, help="a step below it counts as wrong (default: %(default)s)"
    )
    parser.add_argument(
        "--html", type=Path, default=Path("scores.html"), help="where to write the page (default: %(default)s)"
    )
    parser.add_argument("--no-html", action="store_true", help="write no page")
    parser.add_argument(
        "--batch-size", type=positive, default=8, help="completions in one forward pass (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="auto", help="of the model's weights (default: the checkpoint's)")
    parser.add_argument("--device", help="where to compute (default: the accelerator if there is one)")
    args = parser.parse_args(argv)
    single = args.prompt is not None or args.completion is not None
    if single == (args.input is not None):
        raise UsageError("give either --prompt and --completion, or --input FILE")
    if single and (args.prompt is None or args.completion is None):
        raise UsageError("--prompt and --completion belong together")
    return args


def _rows(args):
    """(prompts, completions, labels or None)."""
    if args.input is None:
        text = sys.stdin.read() if args.completion == "-" else args.completion
        return [args.prompt], [text], None
    rows = load_rows(args.input, args.split, limit=args.limit)
    column = next((name for name in ("completions", "completion") if name in rows.column_names), None)
    if "prompt" not in rows.column_names or column is None:
        raise UsageError(
            f"{args.input} needs the columns `prompt` and `completion` or `completions`; it has {rows.column_names}"
        )
    labels = rows["labels"][:] if column == "completions" and "labels" in rows.column_names else None
    return rows["prompt"][:], rows[column][:], labels


def _run(args) -> int:
    from rich.console import Console
    from rich.progress import track

    from trl_grpo_plus.algorithms.steps import check_delimiter
    from trl_grpo_plus.reward_models.html import write_scores
    from trl_grpo_plus.reward_models.prm import ProcessRewardModel

    console = Console()
    prompts, completions, labels = _rows(args)
    try:
        check_delimiter(args.delimiter)
        with console.status("loading the model"):
            prm = ProcessRewardModel.from_pretrained(
                args.model,
                format=args.format,
                dtype=args.dtype,
                device=args.device or best_device(),
                batch_size=args.batch_size,
            )
        solutions = []
        # Some batches at a time, for the progress bar; within, the model sorts by length.
        size = 8 * args.batch_size
        starts = range(0, len(prompts), size)
        for start in track(starts, "scoring", console=console, disable=len(starts) < 2):
            part = slice(start, start + size)
            solutions += prm.score(prompts[part], completions[part], args.delimiter)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(one_line(error)) from error
    for prompt, steps in list(zip(prompts, solutions, strict=True))[:SHOWN]:
        console.print(_table(prompt, steps, args.threshold))
    if len(solutions) > SHOWN:
        console.print(f"... and {len(solutions) - SHOWN} more")
    if labels is not None:
        console.print(_measures(solutions, labels, args.threshold))
    if not args.no_html:
        args.html.parent.mkdir(parents=True, exist_ok=True)
        write_scores(args.html, prompts, solutions, f"Step scores of {prm.__name__}", args.threshold)
        console.print(f"Page: {args.html}", soft_wrap=True, markup=False)
    console.print(f"Next: train with it, process_reward_funcs: [{args.model}]", soft_wrap=True, markup=False)
    return 0


def _table(prompt, steps, threshold: float):
    from rich.table import Table
    from rich.text import Text

    from trl_grpo_plus.reward_models.html import prompt_text, summary

    below = next((j for j, step in enumerate(steps) if step.score is not None and step.score < threshold), None)
    caption = summary([step.score for step in steps], below)
    table = Table(
        title=Text(prompt_text(prompt)),
        caption=caption,
        title_justify="left",
        caption_justify="left",
        show_header=False,
    )
    table.add_column(justify="right")
    table.add_column()
    for step in steps:
        colour = "dim" if step.score is None else "green" if step.score >= threshold else "red"
        table.add_row(Text("-" if step.score is None else f"{step.score:.3f}", style=colour), Text(step.text.rstrip()))
    return table


def _measures(solutions, labels, threshold: float):
    from rich.table import Table

    from trl_grpo_plus.reward_models.metrics import step_metrics

    scores, targets = [], []
    for steps, row in zip(solutions, labels, strict=True):
        pairs = [(s.score, float(x)) for s, x in zip(steps, row, strict=True) if s.score is not None and x is not None]
        scores.append([score for score, _ in pairs])
        targets.append([target for _, target in pairs])
    table = Table(title="Agreement with the labels", title_justify="left", show_header=False)
    for name, value in step_metrics(scores, targets, threshold).items():
        table.add_row(name, f"{value:.3f}")
    return table
