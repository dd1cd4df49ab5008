"""Verdicts and speed of the grader beside math-verify and TRL's accuracy_reward, in one run.

    python benchmarks/grader.py                 # everything, about five minutes
    python benchmarks/grader.py --only speed    # cases, golds, samples, wrong, hostile, speed

Peers are called as their documentation says: golds as `$...$` where they are bare, short answers in a box. Our caches
are empty before each measurement, so that every pair is read. On a busy machine `--clock cpu` compares processor time
(without that of our workers, which few pairs need).
"""

import argparse
import contextlib
import json
import logging
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from reward_fns import GradePolicy, grade, grade_batch
from reward_fns.grading import clear_cache
from reward_fns.workers import ERROR, TIMEOUT, register, run_guarded

sys.path.append(str(Path(__file__).parent))
logging.disable(logging.WARNING)
CONSOLE = Console(width=110)
PEER_SECONDS = 10.0
CLOCK = time.perf_counter
GSM8K, MATH = GradePolicy(mode="gsm8k"), GradePolicy(mode="math")
register("peer_pair", "grader:peer_pair")


# --- the peers -------------------------------------------------------------------------------------------------------


def _peer_gold(gold: str) -> str:
    if "####" in gold:
        gold = gold.rsplit("####", 1)[1].strip()
    return gold if any(mark in gold for mark in ("$", "\\boxed", "\\[", "\\(")) else f"${gold}$"


def math_verify_pair(gold: str, completion: str) -> bool:
    from math_verify import parse, verify

    return verify(parse(_peer_gold(gold)), parse(completion))


def trl_rewards(golds: list[str], completions: list[str]) -> list[float | None]:
    from trl.rewards import accuracy_reward

    return accuracy_reward([[{"content": text}] for text in completions], [_peer_gold(gold) for gold in golds])


def peer_pair(name: str, gold: str, completion: str) -> bool:
    """One pair of a peer, in a killable worker: some of them do not come back."""
    if name == "math-verify":
        return math_verify_pair(gold, completion)
    return trl_rewards([gold], [completion])[0] == 1.0


# --- data ------------------------------------------------------------------------------------------------------------


def rows(data: Path, name: str) -> list[dict]:
    with open(data / name) as file:
        return [json.loads(line) for line in file]


def case_text(case: dict) -> str:
    return f"\\boxed{{{case['pred']}}}" if case["kind"] == "answer" else case["pred"]


# --- verdicts --------------------------------------------------------------------------------------------------------


def cases(data: Path) -> None:
    table = Table(title="peers' own test cases: share of right verdicts", title_justify="left")
    for column in ("cases", "ours", "math-verify", "TRL accuracy_reward"):
        table.add_column(column, justify="left" if column == "cases" else "right")
    for name in ("peers", "bugs"):
        all_cases = rows(data, f"grader_cases/{name}.jsonl")
        kept = [case for case in all_cases if case.get("group") != "hostile"]
        golds, texts = [case["gold"] for case in kept], [case_text(case) for case in kept]
        expected = [case["expect"] for case in kept]
        ours = [g.correct for g in grade_batch(golds, texts)]
        verified = [_quiet(math_verify_pair, gold, text) for gold, text in zip(golds, texts, strict=True)]
        paid = [_quiet(lambda g, t: trl_rewards([g], [t])[0] == 1.0, g, t) for g, t in zip(golds, texts, strict=True)]
        cells = [_share(sum(map(bool.__eq__, expected, found)), len(kept)) for found in (ours, verified, paid)]
        table.add_row(f"{name} ({len(kept)} without hostile ones)", *cells)
        for case, verdict in zip(kept, ours, strict=True):
            if verdict is not case["expect"]:
                source = case.get("source", case.get("source_issue")).rsplit("/", 1)[-1]
                pair = f"gold {case['gold'][-50:]!r}, answer {case['pred'][-50:]!r}"
                note = f"we say {verdict}, {source} says {case['expect']}"
                CONSOLE.print(f"  differs: {name} {case['id']}: {pair}: {note}", markup=False, highlight=False)
    CONSOLE.print(table)


def _quiet(function, *args):
    try:
        with contextlib.redirect_stdout(None):
            return bool(function(*args))
    except Exception:
        return None


def _share(good: int, total: int) -> str:
    return f"{good} / {total} = {100 * good / total:.1f} %"


def golds(data: Path) -> None:
    table = Table(title="each gold against itself", title_justify="left")
    for column in ("golds", "ours", "math-verify"):
        table.add_column(column, justify="left" if column == "golds" else "right")
    math_test = [row["answer"] for row in rows(data, "math/test.jsonl")]
    math_train = [row["answer"] for row in rows(data, "math/train_answers.jsonl")]
    gsm8k = [row["answer"] for name in ("train", "test") for row in rows(data, f"gsm8k/{name}.jsonl")]
    for name, values, policy, peer in (
        ("MATH test, in a box", math_test, MATH, True),
        ("MATH train and test, in a box", math_test + math_train, MATH, False),
        ("GSM8K, the whole solution", gsm8k, GSM8K, False),
    ):
        texts = [f"\\boxed{{{value}}}" if policy is MATH else value for value in values]
        graded = grade_batch(values, texts, policy, budget=None)
        good = sum(g.correct for g in graded)
        other = "-"
        if peer:
            other = _share(
                sum(bool(_quiet(math_verify_pair, v, t)) for v, t in zip(values, texts, strict=True)), len(values)
            )
        table.add_row(name, _share(good, len(values)), other)
        empty = sum(g.gold is None for g in graded)
        if empty:
            CONSOLE.print(f"  {name}: {empty} golds are empty in the data and get no reward")
    CONSOLE.print(table)


def samples(data: Path) -> None:
    openai = rows(data, "model_outputs/gsm8k_openai_solutions.jsonl")
    graded = grade_batch([r["gold_solution"] for r in openai], [r["solution"] for r in openai], GSM8K)
    same = sum(g.correct is r["is_correct"] for g, r in zip(graded, openai, strict=True))
    CONSOLE.print(f"GSM8K, real solutions with a verdict: {_share(same, len(openai))}")
    qwen = rows(data, "model_outputs/math_qwen25_samples_100x8.jsonl")
    graded = grade_batch([r["gold"] for r in qwen], [r["completion"] for r in qwen], MATH)
    same = sum(g.correct is r["score"] for g, r in zip(graded, qwen, strict=True))
    CONSOLE.print(f"MATH, real samples with a verdict: {_share(same, len(qwen))}")
    for g, r in zip(graded, qwen, strict=True):
        if g.correct is not r["score"]:
            CONSOLE.print(f"  differs: gold {r['gold']!r}, answer {g.extracted!r}: we say {g.correct}", markup=False)


def wrong(data: Path) -> None:
    """Golds paired with other problems' golds. What is paid is printed, so that it can be looked at."""
    values = [row["answer"] for row in rows(data, "math/test.jsonl")]
    gsm8k = [row["answer"] for row in rows(data, "gsm8k/test.jsonl")]
    generator = random.Random(0)
    paid = Counter()
    pairs = 0
    for _ in range(4):
        others = generator.sample(values, len(values))
        for a, b, g in zip(
            values, others, grade_batch(values, [f"\\boxed{{{b}}}" for b in others], MATH, None), strict=True
        ):
            pairs += 1
            if g.correct and a != b:
                paid[a, b] += 1
    CONSOLE.print(f"wrong pairs, MATH: {pairs} pairs, {sum(paid.values())} paid though written differently:")
    for (a, b), _ in sorted(paid.items()):
        CONSOLE.print(f"  {a!r} = {b!r}", markup=False, highlight=False)
    others = gsm8k[1:] + gsm8k[:1]
    finals = [value.rsplit("####", 1)[1].strip().replace(",", "") for value in gsm8k]
    graded = grade_batch(gsm8k, others, GSM8K)
    unequal = sum(g.correct and a != b for g, a, b in zip(graded, finals, finals[1:] + finals[:1], strict=True))
    CONSOLE.print(f"wrong pairs, GSM8K: {len(gsm8k)} pairs, {unequal} paid that are not equal")


def hostile(data: Path) -> None:
    table = Table(title=f"hostile cases (peers are killed after {PEER_SECONDS:.0f} s)", title_justify="left")
    for column in ("grader", "cases", "paid", "over 2 s", "hang or crash", "worst, s"):
        table.add_column(column, justify="left" if column == "grader" else "right")
    kept = [case for case in rows(data, "grader_cases/bugs.jsonl") if case["group"] == "hostile"]
    clear_cache()
    times, paid = [], 0
    for case in kept:
        start = time.monotonic()
        paid += grade(case["gold"], case["pred"]).correct
        times.append(time.monotonic() - start)
    table.add_row("ours", str(len(kept)), str(paid), str(sum(t > 2 for t in times)), "0", f"{max(times):.2f}")
    for name in ("math-verify", "TRL accuracy_reward"):
        times, paid, lost = [], 0, 0
        for case in kept:
            start = time.monotonic()
            result = run_guarded("peer_pair", (name, case["gold"], case["pred"]), PEER_SECONDS)
            times.append(time.monotonic() - start)
            paid += result is True
            lost += result is TIMEOUT or result is ERROR
        table.add_row(name, str(len(kept)), str(paid), str(sum(t > 2 for t in times)), str(lost), f"{max(times):.2f}")
    CONSOLE.print(table)


# --- speed -----------------------------------------------------------------------------------------------------------


def speed(data: Path) -> None:
    gsm8k = rows(data, "gsm8k/test.jsonl")
    correct = [
        (row["answer"], row["answer"].rsplit("####", 1)[0] + "The answer is " + row["answer"].rsplit(" ", 1)[1])
        for row in gsm8k
    ]
    wrong_pairs = [(a[0], b[1]) for a, b in zip(correct, correct[1:] + correct[:1], strict=True)]
    qwen = rows(data, "model_outputs/math_qwen25_samples_100x8.jsonl")
    mix = [(row["gold"], row["completion"]) for row in qwen]
    mix += [(a["gold"], b["completion"]) for a, b in zip(qwen, qwen[8:] + qwen[:8], strict=True)]
    table = Table(title=f"pairs a second, one process, cold caches ({CLOCK.__name__})", title_justify="left")
    for column in ("pairs", "ours", "math-verify", "ratio", "TRL accuracy_reward", "ratio"):
        table.add_column(column, justify="left" if column == "pairs" else "right")
    for name, pairs, policy in (
        ("GSM8K, correct", correct, GSM8K),
        ("GSM8K, wrong", wrong_pairs, GSM8K),
        ("MATH, real samples, right and wrong", mix, MATH),
    ):
        ours = max(_rate(lambda p=pairs, c=policy: _ours(p, c), len(pairs)) for _ in range(3))
        few = pairs[:: max(1, len(pairs) // 300)]
        verified = _rate(lambda p=few: [_quiet(math_verify_pair, *pair) for pair in p], len(few))
        paid = _rate(lambda p=few: _quiet(trl_rewards, *map(list, zip(*p, strict=True))), len(few))
        table.add_row(
            name, f"{ours:,.0f}", f"{verified:,.0f}", f"{ours / verified:.0f}x", f"{paid:,.0f}", f"{ours / paid:.0f}x"
        )
    CONSOLE.print(table)
    code = "import time; s = time.perf_counter(); import reward_fns; print(time.perf_counter() - s)"
    took = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    )
    CONSOLE.print(f"import reward_fns: {1000 * took:.1f} ms")


def _ours(pairs: list[tuple[str, str]], policy: GradePolicy) -> None:
    clear_cache()
    grade_batch([gold for gold, _ in pairs], [text for _, text in pairs], policy)


def _rate(function, count: int) -> float:
    start = CLOCK()
    function()
    return count / (CLOCK() - start)


PARTS = {"cases": cases, "golds": golds, "samples": samples, "wrong": wrong, "hostile": hostile, "speed": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()
    global CLOCK
    CLOCK = time.process_time if args.clock == "cpu" else time.perf_counter
    if not args.data.exists():
        parser.error(f"no data at {args.data}; point --data at it")
    for name in args.only or PARTS:
        CONSOLE.rule(name)
        PARTS[name](args.data)


if __name__ == "__main__":
    main()
