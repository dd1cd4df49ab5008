"""How trustworthy `step_arithmetic_reward` is: false alarms on gold solutions, and agreement with human labels.

    python benchmarks/step_arithmetic.py --gsm8k DIR --math F.jsonl --steps F.jsonl --solutions F.jsonl
    python benchmarks/step_arithmetic.py                # GSM8K from the hub, nothing else

- GSM8K's own solutions are right, so a flagged step is a false alarm or a wrong gold; `--show` prints each.
- `--math`: MATH's own solutions, one JSON object a line with `solution`; each line of a solution counts as a step.
- `--steps`: solutions in steps with the first step that a person called wrong (MR-GSM8K, arXiv 2312.17080; one JSON
  object a line with `model_output_steps`, `model_output_solution_first_error_step`,
  `model_output_solution_first_error_reason`). Steps before it are right, it is wrong, those after it have no label.
- `--solutions`: whole solutions with `solution` and `is_correct`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from reward_fns.step_arithmetic import check_step, find_equalities

LOCAL = Path(__file__).resolve().parents[2] / "shared" / "data"


def read_lines(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def gold_solutions(directory: str | None, math: str | None) -> dict[str, list[str]]:
    """The gold solutions by data set."""
    golds = {f"GSM8K {split}": answers for split, answers in gsm8k(directory).items()}
    if math:
        golds["MATH"] = [row["solution"] for row in read_lines(Path(math))]
    return golds


def gsm8k(directory: str | None) -> dict[str, list[str]]:
    """The gold solutions of each split."""
    if directory:
        return {
            split: [row["answer"] for row in read_lines(Path(directory) / f"{split}.jsonl")]
            for split in ("train", "test")
        }
    from datasets import load_dataset

    return {split: rows["answer"] for split, rows in load_dataset("openai/gsm8k", "main").items()}


def auc(wrong: list[float], right: list[float]) -> float:
    """Probability that a right step scores above a wrong one, ties counted half."""
    low, high = Counter(wrong), Counter(right)
    wins = sum(n * m * ((b > a) + (a == b) / 2) for a, n in low.items() for b, m in high.items())
    return wins / (len(wrong) * len(right))


def share(part: int, whole: int) -> str:
    return f"{part:,} / {whole:,} = {part / whole:.3f}" if whole else "none"


def report_golds(console: Console, golds: dict[str, list[str]], show: bool) -> None:
    table = Table(title="Gold solutions", show_header=True)
    for column in ("data", "solutions", "steps", "with an equals sign", "of them judged", "flagged false", "steps/s"):
        table.add_column(column, justify="left" if column == "data" else "right")
    flagged = []
    for split, answers in golds.items():
        start = time.perf_counter()
        verdicts = [
            (row, number, step, check_step(step))
            for row, answer in enumerate(answers)
            for number, step in enumerate(answer.split("\n"))
        ]
        rate = len(verdicts) / (time.perf_counter() - start)
        signed = [verdict for *_, step, verdict in verdicts if "=" in step]
        flagged += [(split, *where) for *where, verdict in verdicts if verdict is False]
        table.add_row(
            split,
            f"{len(answers):,}",
            f"{len(verdicts):,}",
            f"{len(signed):,}",
            share(sum(verdict is not None for verdict in signed), len(signed)),
            f"{sum(verdict is False for *_, verdict in verdicts):,}",
            f"{rate:,.0f}",
        )
    console.print(table)
    if show:
        for split, row, number, step in flagged:
            false = [f"{e.left} = {e.right}" for e in find_equalities(step) if e.holds is False]
            console.print(f"{split} {row}, line {number}: {'; '.join(false)}", markup=False, highlight=False)


def report_steps(console: Console, path: Path) -> None:
    right, wrong, slips, after = [], [], [], []
    for row in read_lines(path):
        first = int(row["model_output_solution_first_error_step"])
        for number, step in enumerate(row["model_output_steps"], start=1):
            verdict = check_step(step)
            (right if number < first else wrong if number == first else after).append(verdict)
            if number == first and "calculation" in str(row["model_output_solution_first_error_reason"]).lower():
                slips.append(verdict)
    score = {True: 1.0, None: 0.5, False: 0.0}
    flags = wrong.count(False) + right.count(False)
    table = Table(title=f"Human labels of the first wrong step, {len(wrong)} solutions", show_header=False)
    table.add_row("labelled steps (right, wrong)", f"{len(right):,}, {len(wrong):,}")
    table.add_row("precision: flagged steps that a person calls wrong", share(wrong.count(False), flags))
    table.add_row("recall: wrong steps that are flagged", share(wrong.count(False), len(wrong)))
    table.add_row("recall where the person names the calculation", share(slips.count(False), len(slips)))
    table.add_row("false alarms: right steps that are flagged", share(right.count(False), len(right)))
    table.add_row("AUC, unscored steps between", f"{auc([score[v] for v in wrong], [score[v] for v in right]):.3f}")
    judged = ([score[v] for v in wrong if v is not None], [score[v] for v in right if v is not None])
    table.add_row(f"AUC, the {len(judged[0]) + len(judged[1])} scored steps only", f"{auc(*judged):.3f}")
    table.add_row("flagged after the first wrong step (no label)", share(after.count(False), len(after)))
    console.print(table)


def report_solutions(console: Console, path: Path) -> None:
    counts: Counter = Counter()
    for row in read_lines(path):
        flagged = any(check_step(step) is False for step in row["solution"].split("\n"))
        counts[flagged, bool(row["is_correct"])] += 1
    table = Table(title=f"Whole solutions, {counts.total():,}", show_header=False)
    for flagged, label in ((True, "right answers among solutions with a flagged step"), (False, "... without one")):
        table.add_row(label, share(counts[flagged, True], counts[flagged, True] + counts[flagged, False]))
    table.add_row(
        "wrong solutions that are flagged", share(counts[True, False], sum(counts[f, False] for f in (0, 1)))
    )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    local = {
        "gsm8k": LOCAL / "gsm8k",
        "math": LOCAL / "math" / "test.jsonl",
        "steps": LOCAL / "model_outputs" / "mr_gsm8k_steps.jsonl",
        "solutions": LOCAL / "model_outputs" / "gsm8k_openai_solutions.jsonl",
    }
    defaults = {name: str(path) if path.exists() else None for name, path in local.items()}
    parser.add_argument("--gsm8k", default=defaults["gsm8k"], help="directory of train.jsonl and test.jsonl")
    parser.add_argument("--math", default=defaults["math"], help="MATH solutions")
    parser.add_argument("--steps", default=defaults["steps"], help="labelled steps")
    parser.add_argument("--solutions", default=defaults["solutions"], help="labelled solutions")
    parser.add_argument("--show", action="store_true", help="print every flagged gold step")
    args = parser.parse_args()
    console = Console()
    report_golds(console, gold_solutions(args.gsm8k, args.math), args.show)
    if args.steps:
        report_steps(console, Path(args.steps))
    if args.solutions:
        report_solutions(console, Path(args.solutions))


if __name__ == "__main__":
    main()
