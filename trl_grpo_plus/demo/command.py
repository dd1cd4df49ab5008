"""`trl-grpo-plus quickstart`: see process supervision work, offline and on a CPU."""

import argparse
import importlib.util
import pkgutil
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

PROG = "trl-grpo-plus quickstart"
SUPERVISIONS = {"process": "process", "outcome": "outcome", "both": "process and outcome"}
DEFAULT_STEPS = 120
BETA_WITH_REWARD_MODEL = 0.04  # DeepSeekMath §4.2


class _UsageError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise _UsageError(message)


def main(argv: list[str]) -> int:
    """Runs the quickstart; returns 0, or 2 for wrong options (one line on stderr)."""
    try:
        args = _parse(argv)
    except _UsageError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    return _run(args)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog=PROG,
        description="Trains a tiny policy on synthetic word problems with GRPO and process supervision. Needs no "
        "network and no GPU.",
    )
    parser.add_argument(
        "--supervision",
        choices=list(SUPERVISIONS),
        default="process",
        help="what is rewarded: each step, the final answer, or both (default: %(default)s)",
    )
    parser.add_argument(
        "--process-reward",
        metavar="NAME",
        help="what scores a step: 'arithmetic' (is its equality true; default), 'exact' (is it the true line of the "
        "solution), the dotted path of a function, or the directory of a process reward model",
    )
    parser.add_argument(
        "--credit",
        choices=["sum", "min", "mean"],
        default="sum",
        help="how a token is charged with later steps (default: %(default)s)",
    )
    parser.add_argument(
        "--beta",
        type=_coefficient,
        help="coefficient of the KL from the untrained policy (default: the paper's 0.04 with a process reward model, "
        "whose errors the policy would find; else 0)",
    )
    parser.add_argument(
        "--steps", type=_positive, default=DEFAULT_STEPS, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument("--seed", type=_natural, default=0, help="seed of the run (default: %(default)s)")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("quickstart"), help="where results go (default: %(default)s)"
    )
    parser.add_argument("--no-plot", action="store_true", help="draw no curves (they need matplotlib)")
    args = parser.parse_args(argv)

    if args.output_dir.exists() and not args.output_dir.is_dir():
        raise _UsageError(f"--output-dir {args.output_dir} is a file")
    if args.supervision == "outcome" and args.process_reward is not None:
        raise _UsageError("--process-reward has no effect with --supervision outcome; use 'process' or 'both'")
    if not args.no_plot and importlib.util.find_spec("matplotlib") is None:
        raise _UsageError(
            "the curves need matplotlib: pip install 'trl-grpo-plus[plots]', or leave them out with --no-plot"
        )
    args.process_reward = args.process_reward or "arithmetic"
    args.process_reward_func = None if args.supervision == "outcome" else _process_reward(args.process_reward)
    if args.beta is None:
        args.beta = BETA_WITH_REWARD_MODEL if hasattr(args.process_reward_func, "score") else 0.0
    return args


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {text!r}")
    return int(text)


def _coefficient(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def _process_reward(name: str) -> Callable:
    """A process reward by its short name, dotted path, or the directory of a process reward model."""
    if name == "arithmetic":
        from reward_fns import step_arithmetic_reward

        return step_arithmetic_reward
    if name == "exact":
        from trl_grpo_plus.demo.rewards import exact_step_reward

        return exact_step_reward
    if Path(name).is_dir():
        from trl_grpo_plus.reward_models import ProcessRewardModel

        try:
            return ProcessRewardModel.from_pretrained(name)
        except (OSError, ValueError) as error:
            first_line = str(error).splitlines()[0]
            raise _UsageError(f"--process-reward {name} holds no process reward model: {first_line}") from error
    try:
        func = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise _UsageError(
            f"--process-reward {name!r} is neither 'arithmetic' nor 'exact', nor a directory, nor the dotted path of "
            f"a function ({error})"
        ) from error
    if not callable(func):
        raise _UsageError(f"--process-reward {name!r} is a {type(func).__name__}, not a function")
    return func


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    reward_name = "" if args.supervision == "outcome" else f" ({args.process_reward})"
    what = f"{SUPERVISIONS[args.supervision]} supervision{reward_name}"
    console.print(f"[bold]{what}[/bold], {args.steps} steps, seed {args.seed}", highlight=False)
    with console.status("loading"):
        from trl_grpo_plus.demo.report import accuracy_table, example_table, plot_curves
        from trl_grpo_plus.demo.training import quiet, train_demo_policy

    args.output_dir.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("reward {task.fields[reward]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress, quiet():
        task = progress.add_task("", total=args.steps, reward="-")
        run = train_demo_policy(
            args.supervision,
            args.steps,
            args.seed,
            args.output_dir,
            args.process_reward_func,
            on_step=lambda step, reward: progress.update(task, completed=step, reward=f"{reward:.2f}"),
            credit=args.credit,
            beta=args.beta,
        )
    if args.supervision != "outcome":
        run.settings["process_reward"] = args.process_reward
    run.save(args.output_dir / "results.json")
    written = ["results.json", "policy/"]
    if not args.no_plot:
        plot_curves(run, args.output_dir / "curves.png")
        written.insert(0, "curves.png")

    console.print()
    console.print(example_table(run))
    console.print()
    console.print(accuracy_table(run))
    console.print(f"\nIn {args.output_dir}: {', '.join(written)}", highlight=False)
    console.print(f"Next: {_next_command(args)}", highlight=False, soft_wrap=True)
    console.print("      or with your own model and data: trl-grpo-plus train --help", highlight=False)
    return 0


def _next_command(args: argparse.Namespace) -> str:
    other = "process" if args.supervision == "outcome" else "outcome"
    options = [f"--supervision {other}"]
    if args.steps != DEFAULT_STEPS:
        options.append(f"--steps {args.steps}")
    if args.seed:
        options.append(f"--seed {args.seed}")
    directory = args.output_dir.parent / f"{args.output_dir.resolve().name}-{other}"
    return " ".join([PROG, *options, f"--output-dir {shlex.quote(str(directory))}"])
