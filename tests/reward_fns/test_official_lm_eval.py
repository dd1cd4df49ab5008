"""The harness' modes and Hendrycks' against the code of lm-evaluation-harness itself, where it is installed.

    pip install --no-deps lm-eval==0.4.13 && pip install 'antlr4-python3-runtime==4.11.*' sacrebleu

The second half needs antlr 4.11 exactly, because the harness asks for it.
"""

import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from reward_fns.official import OFFICIAL_MODES
from reward_fns.official import hendrycks as our_hendrycks
from reward_fns.official import minerva as our_minerva

LM_EVAL = importlib.util.find_spec("lm_eval")
pytestmark = pytest.mark.skipif(LM_EVAL is None, reason="lm-eval is not installed; see the docstring of this file")

FILTERS = {
    "gsm8k_strict": {"regex_pattern": "#### (\\-?[0-9\\.\\,]+)"},
    "gsm8k_flexible": {"group_select": -1, "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"},
}


def load_task(name):
    """A task's `utils.py`, by path: the package `lm_eval.tasks` would import what few have installed."""
    path = Path(LM_EVAL.submodule_search_locations[0]) / "tasks" / name / "utils.py"
    spec = importlib.util.spec_from_file_location(f"lm_eval_{name}", path)
    module = importlib.util.module_from_spec(spec)
    # They name `datasets.Dataset` in an annotation only.
    stub = {} if importlib.util.find_spec("datasets") else {"datasets": SimpleNamespace(Dataset=object)}
    try:
        with mock.patch.dict(sys.modules, stub):
            spec.loader.exec_module(module)
    except (ImportError, AssertionError) as error:
        pytest.skip(f"lm-eval's {name} cannot be imported here: {error}")
    return module


@pytest.fixture(scope="module")
def minerva():
    module = load_task("minerva_math")

    class NoAlarm:
        """Their time limit is an alarm signal, which belongs to pytest-timeout here."""

        def __init__(self, **_):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    module.timeout = NoAlarm
    return module


@pytest.fixture(scope="module")
def hendrycks():
    module = load_task("hendrycks_math")
    theirs = module.fix_a_slash_b

    def as_in_the_original(text):
        try:
            return theirs(text)
        except ValueError:
            return text

    # The harness' copy lets the ValueError of int() out, which the original's bare except swallows.
    module.fix_a_slash_b = as_in_the_original
    return module


def read(path):
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


CHANGES = [
    lambda s: s,
    lambda s: re.sub(r"\d", lambda m: str((int(m.group()) + 1) % 10), s, count=1),
    lambda s: s.replace("frac", "dfrac"),
    lambda s: re.sub(r"\\frac\{(\w+)\}\{(\w+)\}", r"\1/\2", s),
    lambda s: re.sub(r"\\frac\{(\w)\}\{(\w)\}", r"\\frac\1\2", s),
    lambda s: s + r"\text{ units}",
    lambda s: s + r"^\circ",
    lambda s: "x=" + s,
    lambda s: s + ".",
    lambda s: f"${s}$",
    lambda s: s + "\\%",
    lambda s: s.replace(" ", ""),
    lambda s: s.replace("(", r"\left(").replace(")", r"\right)"),
    lambda s: f"({s})",
    lambda s: "+".join(reversed(s.split("+"))),
    lambda s: ", ".join(reversed(s.split(","))),
    lambda s: s.replace("sqrt{", "sqrt ").replace("}", ""),
    lambda s: s + " cm",
    lambda s: s + ".0",
    lambda s: f"\\text{{{s}}}",
    lambda s: s + " dollars",
    lambda s: s[:-1],
    lambda s: s * 2,
    lambda s: s.replace("^", "**"),
    lambda s: re.sub(r"(\d)(\d{3})\b", r"\1,\2", s),
    lambda s: s + "/2",
    lambda s: f"\\boxed{{{s}}}",
    lambda s: s.replace("\\sqrt", "sqrt"),
]


def changed_pairs(shared_data, count, seed=0):
    golds = [row["answer"] for row in read(shared_data("math/test.jsonl"))]
    rng = random.Random(seed)
    for _ in range(count):
        gold = rng.choice(golds)
        text = rng.choice(golds) if rng.random() < 0.1 else gold
        for _ in range(rng.choice((1, 1, 2))):
            text = rng.choice(CHANGES)(text)
        yield gold, text


def their_gsm8k(mode, gold, completion):
    pytest.importorskip("sacrebleu", reason="lm_eval.api.metrics imports it")
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    for stop in ("Question:", "</s>", "<|im_end|>"):
        completion = completion.split(stop)[0]
    prediction = RegexFilter(**FILTERS[mode]).apply([[completion]], [{}])[0][0]
    score = exact_match_hf_evaluate(
        predictions=[prediction],
        references=[gold],
        regexes_to_ignore=[",", "\\$", "(?s).*#### ", "\\.$"],
        ignore_case=True,
        ignore_punctuation=False,
    )
    return bool(score["exact_match"])


@pytest.mark.parametrize("mode", list(FILTERS))
def test_gsm8k_on_real_solutions(shared_data, mode):
    golds = {row["question"]: row["answer"] for row in read(shared_data("gsm8k/test.jsonl"))}
    rng = random.Random(0)
    forms = ("A: ", "#### ", "#### $", "####", "The answer is ", "**")
    for row in read(shared_data("model_outputs/gsm8k_openai_solutions.jsonl")):
        completion = row["solution"].replace("A: ", rng.choice(forms)) + rng.choice(("", ".", " dollars.", "\n#### 7"))
        gold = golds[row["question"]]
        assert OFFICIAL_MODES[mode](gold, completion)[0] == their_gsm8k(mode, gold, completion), completion


@pytest.mark.parametrize("mode", list(FILTERS))
def test_gsm8k_on_random_text(mode):
    rng = random.Random(1)
    tokens = ["#### ", "18", "-", "$", ".", ",", " ", "\n", "####", "Question:", "</s>", "1", "0", "a", "٣"]
    golds = ["... #### 18", "#### 1,018", "18", "#### -1.0", "#### ٣"]
    for _ in range(5000):
        completion = "".join(rng.choice(tokens) for _ in range(rng.randint(0, 9)))
        gold = rng.choice(golds)
        ours = OFFICIAL_MODES[mode](gold, completion)[0]
        assert ours == their_gsm8k(mode, gold, completion), (gold, completion)


def test_hendrycks(shared_data, hendrycks):
    for gold, text in changed_pairs(shared_data, 10_000):
        assert our_hendrycks.is_equiv(text, gold) == bool(hendrycks.is_equiv(text, gold)), (gold, text)


def test_minerva_texts(shared_data, minerva):
    sentences = (
        "Final Answer: The final answer is {}. I hope it is correct.",
        "Final Answer: The final answer is ${}$. I hope it is correct. Final Answer: The final answer is 1. I hope it",
        "Final Answer: The final answer is {}.\nI hope it is correct.",
        "Final Answer: The final answer is {}. ",
        "\\boxed{{{}}}",
        "so $\\boxed {}$.",
        "\\fbox{{{}}}",
    )
    rng = random.Random(2)
    for _, text in changed_pairs(shared_data, 10_000, seed=1):
        assert our_minerva.normalize_final_answer(text) == minerva.normalize_final_answer(text), text
        completion = rng.choice(sentences).format(text)
        theirs = minerva.get_unnormalized_answer(completion)
        assert our_minerva.get_unnormalized_answer(completion) == (None if theirs == "[invalidanswer]" else theirs)
        try:
            boxed = minerva.remove_boxed(minerva.last_boxed_only_string(completion))
        except (AssertionError, TypeError):
            boxed = None
        assert our_minerva.last_box_or_bare(completion) == boxed, completion


def test_minerva_verdicts(shared_data, minerva):
    for gold, text in changed_pairs(shared_data, 400, seed=2):
        completion = f"Final Answer: The final answer is ${text}$. I hope it is correct."
        answer = minerva.normalize_final_answer(minerva.get_unnormalized_answer(completion))
        theirs = bool(minerva.is_equiv(answer, minerva.normalize_final_answer(gold)))
        assert OFFICIAL_MODES["minerva_math"](gold, completion)[0] == theirs, (gold, text)
