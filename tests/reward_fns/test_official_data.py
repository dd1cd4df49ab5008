"""The official modes on real data: Qwen's own verdicts, OpenAI's labels, and every gold against itself."""

import json
import re

import pytest

from reward_fns.official import OFFICIAL_MODES


def rows(path):
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_qwen_own_verdicts_and_predictions(shared_data):
    """800 completions with the prediction and the verdict that the Qwen2.5-Math evaluation recorded."""
    data = rows(shared_data("model_outputs/math_qwen25_samples_100x8.jsonl"))
    for gold_column in ("gold_solution", "gold"):
        graded = [OFFICIAL_MODES["qwen25_math"](row[gold_column], row["completion"]) for row in data]
        assert [correct for correct, _, _ in graded] == [row["score"] for row in data]
        assert [extracted or "" for _, extracted, _ in graded] == [row["pred"] for row in data]
    assert len(data) == 800


def test_gsm8k_modes_on_openai_labels(shared_data):
    """5,276 labelled solutions; `A: 18` is written as the task's few-shot prompt makes a model write it."""
    data = rows(shared_data("model_outputs/gsm8k_openai_solutions.jsonl"))
    golds = {row["question"]: row["answer"] for row in rows(shared_data("gsm8k/test.jsonl"))}
    for mode in ("gsm8k_strict", "gsm8k_flexible"):
        wrong = []
        for row in data:
            completion = re.sub(r"^A: ", "#### ", row["solution"], flags=re.MULTILINE)
            correct, extracted, gold = OFFICIAL_MODES[mode](golds[row["question"]], completion)
            if correct != row["is_correct"]:
                wrong.append((row["id"], row["model"], extracted, gold))
        assert wrong == []
    assert len(data) == 5276


def test_gsm8k_golds_against_themselves(shared_data):
    for name in ("gsm8k/test.jsonl", "gsm8k/train.jsonl"):
        for row in rows(shared_data(name)):
            for mode in ("gsm8k_strict", "gsm8k_flexible", "deepseek_math", "qwen25_math"):
                completion = (
                    row["answer"] if mode.startswith("gsm8k") else f"\\boxed{{{row['answer'].split('####')[1]}}}"
                )
                assert OFFICIAL_MODES[mode](row["answer"], completion)[0], (mode, row["answer"])


def test_math_golds_against_themselves(shared_data):
    """A solution as completion gets its own gold, except by minerva's rule, which wants its sentence."""
    data = rows(shared_data("math/test.jsonl"))
    failed = {mode: [] for mode in ("hendrycks_math", "deepseek_math", "qwen25_math", "minerva_math")}
    for row in data:
        for mode, failures in failed.items():
            completion = row["solution"]
            if mode == "minerva_math":
                completion += f"\nFinal Answer: The final answer is ${row['answer']}$. I hope it is correct."
            if not OFFICIAL_MODES[mode](row["solution"], completion)[0]:
                failures.append(row["answer"])
    # The sentence of minerva has to be on one line.
    assert failed.pop("minerva_math") == ["90\\text{ square\nunits}"]
    assert failed == {mode: [] for mode in failed}
    assert len(data) == 5000


def test_a_bare_gold_is_read_as_its_solution(shared_data):
    """The `answer` and the `solution` column of MATH give the same gold."""
    differing = dict.fromkeys(("hendrycks_math", "minerva_math", "qwen25_math"), 0)
    for row in rows(shared_data("math/test.jsonl")):
        for mode in differing:
            bare, whole = (OFFICIAL_MODES[mode](row[column], "")[2] for column in ("answer", "solution"))
            differing[mode] += bare != whole
    # One solution ends with the remark that it has "not boxed the correct answer", and Qwen's reader finds that word.
    assert differing == {"hendrycks_math": 0, "minerva_math": 0, "qwen25_math": 1}


@pytest.mark.parametrize("mode", ["hendrycks_math", "minerva_math", "deepseek_math", "qwen25_math"])
def test_a_wrong_number_is_never_paid(shared_data, mode):
    data = [row["answer"] for row in rows(shared_data("math/math500.jsonl")) if row["answer"].isdigit()]
    assert len(data) > 200
    for gold in data:
        wrong = str(int(gold) + 1 if int(gold) < 5000 else 2 * int(gold))
        completion = f"\\boxed{{{wrong}}} Final Answer: The final answer is ${wrong}$. I hope it is correct."
        correct, extracted, _ = OFFICIAL_MODES[mode](gold, completion)
        assert (correct, extracted) == (False, wrong)
