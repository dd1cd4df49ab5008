"""Verdicts on real golds, real solutions with a label, and other graders' test cases."""

import json
import random
import re
from collections import Counter

import pytest

from reward_fns import GradePolicy, grade_batch

GSM8K, MATH = GradePolicy(mode="gsm8k"), GradePolicy(mode="math")

# Where we differ from a peer's expectation, and why.
DIFFERENCES = {
    ("peers", 187): "a strict option of math-verify; we read an inequality as its interval (policy `intervals`)",
    ("peers", 197): "garbled gold of which math-verify joins two distant boxes; we never merge a retracted one",
    ("peers", 285): "decimals for exact roots (policy `approximate`)",
    ("peers", 286): "a decimal for an exact multiple of pi (policy `approximate`)",
}


def _rows(path) -> list[dict]:
    with open(path) as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("name", ["peers", "bugs"])
def test_other_graders_cases(shared_data, name):
    cases = _rows(shared_data(f"grader_cases/{name}.jsonl"))
    texts = [rf"\boxed{{{case['pred']}}}" if case["kind"] == "answer" else case["pred"] for case in cases]
    grades = grade_batch([case["gold"] for case in cases], texts)
    differing = {(name, c["id"]) for c, g in zip(cases, grades, strict=True) if g.correct is not c["expect"]}
    assert differing <= DIFFERENCES.keys()


def test_bare_answers_get_the_verdict_of_boxed_ones(shared_data):
    cases = [case for case in _rows(shared_data("grader_cases/peers.jsonl")) if case["kind"] == "answer"]
    golds = [case["gold"] for case in cases]
    boxed = grade_batch(golds, [rf"\boxed{{{case['pred']}}}" for case in cases])
    bare = grade_batch(golds, [case["pred"] for case in cases])
    assert [g.correct for g in boxed] == [g.correct for g in bare]


def test_every_math_gold_equals_itself(shared_data):
    golds = [row["answer"] for row in _rows(shared_data("math/test.jsonl"))]
    assert len(golds) == 5000
    golds += [row["answer"] for row in _rows(shared_data("math/train_answers.jsonl"))]
    grades = grade_batch(golds, [rf"\boxed{{{gold}}}" for gold in golds], MATH, budget=None)
    failed = [gold for gold, grade in zip(golds, grades, strict=True) if not grade.correct]
    assert failed == ["", ""]  # two golds of the train split are empty in the data


def test_math_golds_are_found_in_their_solutions(shared_data):
    rows = _rows(shared_data("math/test.jsonl"))
    grades = grade_batch([row["solution"] for row in rows], [row["solution"] for row in rows], MATH, budget=None)
    assert sum(not grade.correct for grade in grades) <= 2


def test_every_gsm8k_gold_equals_itself(shared_data):
    golds = [row["answer"] for split in ("train", "test") for row in _rows(shared_data(f"gsm8k/{split}.jsonl"))]
    assert len(golds) == 8792
    assert all(grade.correct for grade in grade_batch(golds, golds, GSM8K))


def test_real_gsm8k_solutions(shared_data):
    rows = _rows(shared_data("model_outputs/gsm8k_openai_solutions.jsonl"))
    grades = grade_batch([row["gold_solution"] for row in rows], [row["solution"] for row in rows], GSM8K)
    assert [grade.correct for grade in grades] == [row["is_correct"] for row in rows]


def test_real_math_samples(shared_data):
    rows = _rows(shared_data("model_outputs/math_qwen25_samples_100x8.jsonl"))
    grades = grade_batch([row["gold"] for row in rows], [row["completion"] for row in rows], MATH)
    differing = [(r["gold"], g.extracted) for r, g in zip(rows, grades, strict=True) if g.correct is not r["score"]]
    assert len(differing) <= 1, differing
    assert Counter(grade.method for grade in grades)["boxed"] > 700


def test_wrong_pairs_are_not_paid(shared_data):
    """What is paid though it is written differently must have the same value: checked by sympy, not by us."""
    sympy = pytest.importorskip("sympy")
    golds = [row["answer"] for row in _rows(shared_data("math/test.jsonl"))]
    others = random.Random(0).sample(golds, len(golds))
    grades = grade_batch(golds, [rf"\boxed{{{other}}}" for other in others], MATH, budget=None)
    paid = [(a, b) for a, b, grade in zip(golds, others, grades, strict=True) if grade.correct and a != b]
    assert len(paid) < 40
    for a, b in paid:
        plain = [_plain(text) for text in (a, b)]
        assert plain[0] == plain[1] or sympy.simplify(f"({plain[0]}) - ({plain[1]})") == 0, (a, b)


def _plain(text: str) -> str:
    text = re.sub(r"\\(?:text|mbox|textnormal)\s*\{[^}]*\}(?:\^\{?\d\}?)?|\\[$%!,; ]|\^\{?\\circ\}?|[$,\s]", "", text)
    text = re.sub(r"^[a-z]=|\.$|_\{?\d+\}?$", "", text)
    text = re.sub(r"\\[dt]?frac\{?(-?\d+)\}?\{?(\d+)\}?", r"(\1)/(\2)", text)
    return re.sub(r"\\sqrt\{?(\d+)\}?", r"*sqrt(\1)", text).lstrip("*")


def _other_digit(gold: str, generator: random.Random) -> str | None:
    without_base = re.sub(r"_\{?\d+\}?$", lambda match: "_" * len(match[0]), gold)
    places = [match.start() for match in re.finditer(r"\d", without_base)]
    if not places:
        return None
    i = generator.choice(places)
    return f"{gold[:i]}{(int(gold[i]) + generator.randint(1, 9)) % 10}{gold[i + 1 :]}"


def _other_sign(gold: str, generator: random.Random) -> str | None:
    return gold.replace("+", "-", 1) if "+" in gold else None


def _other_end(gold: str, generator: random.Random) -> str | None:
    return gold.replace("[", "(", 1) if "[" in gold else None


@pytest.mark.parametrize("change", [_other_digit, _other_sign, _other_end])
def test_a_gold_with_one_character_changed_is_not_paid(shared_data, change):
    generator = random.Random(4)
    golds = [row["answer"] for row in _rows(shared_data("math/test.jsonl"))]
    pairs = [(gold, change(gold, generator)) for gold in golds]
    pairs = [(gold, changed) for gold, changed in pairs if changed]
    assert len(pairs) > 20
    grades = grade_batch([a for a, _ in pairs], [rf"\boxed{{{b}}}" for _, b in pairs], MATH, budget=None)
    assert [pair for pair, grade in zip(pairs, grades, strict=True) if grade.correct] == []


def test_wrong_gsm8k_pairs_are_not_paid(shared_data):
    golds = [row["answer"] for row in _rows(shared_data("gsm8k/test.jsonl"))]
    others = golds[1:] + golds[:1]
    finals = [float(gold.rsplit("####", 1)[1].replace(",", "")) for gold in golds]
    grades = grade_batch(golds, others, GSM8K)
    expected = [a == b for a, b in zip(finals, finals[1:] + finals[:1], strict=True)]
    assert [grade.correct for grade in grades] == expected
