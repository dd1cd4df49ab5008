"""How the official grading modes agree with each other, with labels and with the default policy, on real data.

    python benchmarks/official_modes.py [--data ../shared/data] [--limit N]

Prints markdown. Each mode sees the answer in the form that its own prompt asks for: `#### N` for GSM8K's, a box for
MATH's, "Final Answer: The final answer is $...$. I hope it is correct." for minerva's.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from reward_fns import OFFICIAL_MODES, grade
from reward_fns.official._common import last_box
from reward_fns.official.hendrycks import unbox

TEACHER = "default policy"
Case = tuple[str, str, str, bool]  # gold, completion, the answer in it, label


def read(path: Path) -> list[dict]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def sentence(answer: str) -> str:
    return f"Final Answer: The final answer is ${answer}$. I hope it is correct."


def math_samples(data: Path) -> list[Case]:
    """Qwen's completions on MATH; the label is Qwen's own verdict."""
    rows = read(data / "model_outputs/math_qwen25_samples_100x8.jsonl")
    return [
        (row["gold_solution"], row["completion"], unbox(last_box(row["completion"])) or "", row["score"])
        for row in rows
    ]


def gsm8k_samples(data: Path) -> list[Case]:
    """OpenAI's labelled solutions of GSM8K."""
    golds = {row["question"]: row["answer"] for row in read(data / "gsm8k/test.jsonl")}
    rows = read(data / "model_outputs/gsm8k_openai_solutions.jsonl")
    return [
        (golds[row["question"]], row["solution"], row["solution"].rpartition("A: ")[2].strip(), row["is_correct"])
        for row in rows
    ]


def grader_cases(data: Path) -> list[Case]:
    """The test cases of other graders: hard pairs, with the verdict that their authors want."""
    cases = []
    for name in ("peers", "bugs"):
        for row in read(data / f"grader_cases/{name}.jsonl"):
            if row.get("group") == "hostile":
                continue
            pred = row["pred"]
            boxed = unbox(last_box(pred)) if "\\boxed" in pred else None
            answer = boxed if boxed is not None else re.sub(r"^\$+|\$+$", "", pred.strip())
            completion = pred if boxed is not None else f"\\boxed{{{answer}}}"
            cases.append((re.sub(r"^\$+|\$+$", "", row["gold"].strip()), completion, answer, row["expect"]))
    return cases


def as_asked(mode: str, completion: str, answer: str) -> str:
    """The completion in the form that the prompt of the mode asks for."""
    if mode == "minerva_math":
        return f"{completion}\n{sentence(answer)}"
    if mode.startswith("gsm8k"):
        return f"{completion}\n#### {answer}"
    return completion if "\\boxed" in completion else f"{completion}\n\\boxed{{{answer}}}"


def verdicts(cases: list[Case], modes: dict[str, Callable]) -> tuple[dict[str, list[bool]], dict[str, float]]:
    found, seconds = {}, {}
    for name, mode in modes.items():
        begin = time.perf_counter()
        found[name] = [mode(gold, as_asked(name, completion, answer)) for gold, completion, answer, _ in cases]
        seconds[name] = time.perf_counter() - begin
    return found, seconds


def report(title: str, cases: list[Case], modes: dict[str, Callable]) -> None:
    found, seconds = verdicts(cases, modes)
    labels = [label for *_, label in cases]
    total = len(cases)
    print(f"\n### {title}: {total} pairs\n")
    print("| mode | paid | agrees with label | paid, label wrong | not paid, label right | pairs/s |")
    print("|---|---|---|---|---|---|")
    for name, row in found.items():
        over = sum(verdict and not label for verdict, label in zip(row, labels, strict=True))
        under = sum(label and not verdict for verdict, label in zip(row, labels, strict=True))
        agree = 100 * (total - over - under) / total
        print(f"| {name} | {sum(row)} | {agree:.2f} % | {over} | {under} | {total / seconds[name]:,.0f} |")
    print("\nSame verdict, in % of the pairs:\n")
    print("| | " + " | ".join(found) + " |")
    print("|---" * (len(found) + 1) + "|")
    for name, row in found.items():
        shares = (100 * sum(a == b for a, b in zip(row, other, strict=True)) / total for other in found.values())
        print(f"| {name} | " + " | ".join(f"{share:.1f}" for share in shares) + " |")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=default, help="folder with the real data")
    parser.add_argument("--limit", type=int, default=None, help="pairs of each data set")
    arguments = parser.parse_args(argv)
    if not arguments.data.is_dir():
        print(f"no data at {arguments.data}; name the folder with --data", file=sys.stderr)
        return 2
    modes = {
        name: lambda gold, completion, mode=mode: mode(gold, completion)[0] for name, mode in OFFICIAL_MODES.items()
    }
    # The labels of the other graders' cases contradict each other where the default policy has a choice; they are for
    # the official modes only. `benchmarks/grader.py` has the default policy on them.
    official_math = {name: mode for name, mode in modes.items() if not name.startswith("gsm8k")}
    modes[TEACHER] = lambda gold, completion: grade(gold, completion).correct is True
    math_modes = {**official_math, TEACHER: modes[TEACHER]}
    for mode in modes.values():
        mode("x+1", f"\\boxed{{1+x}} {sentence('1+x')}")
    for title, load, chosen in (
        ("GSM8K solutions, labels of OpenAI", gsm8k_samples, modes),
        ("MATH samples, verdicts of Qwen", math_samples, math_modes),
        ("Test cases of other graders", grader_cases, official_math),
    ):
        report(title, load(arguments.data)[: arguments.limit], chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
