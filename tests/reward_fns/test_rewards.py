"""Rewards as TRL calls them."""

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from reward_fns import (
    FormatReward,
    Grade,
    GradePolicy,
    GSM8KReward,
    MathReward,
    format_reward,
    grade,
    grade_batch,
    gsm8k_reward,
    math_reward,
)

GSM8K_GOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.mark.parametrize("column", ["solution", "answer", "gold", "final_answer", "ground_truth"])
def test_gold_columns(column):
    completions = ["#### 72", "#### 71", "72 clips"]
    assert gsm8k_reward(completions, **{column: [GSM8K_GOLD] * 3}) == [1.0, 0.0, 1.0]


def test_called_as_trl_calls_it():
    extra, metrics = {}, {}
    rewards = gsm8k_reward(
        prompts=[[{"role": "user", "content": "?"}]] * 4,
        completions=[[{"role": "assistant", "content": text}] for text in ("#### 72", "#### 7", "", "#### 72")],
        completion_ids=[[1, 2]] * 4,
        question=["?"] * 4,
        answer=[GSM8K_GOLD] * 3 + [None],
        trainer_state=None,
        log_extra=lambda name, values: extra.__setitem__(name, values),
        log_metric=lambda name, value: metrics.__setitem__(name, value),
    )
    assert rewards == [1.0, 0.0, 0.0, None]
    assert extra == {
        "gsm8k_reward/extracted": ["72", "7", "", "72"],
        "gsm8k_reward/gold": ["72", "72", "72", ""],
        "gsm8k_reward/method": ["####", "####", "none", "####"],
        "gsm8k_reward/verdict": ["correct", "incorrect", "incorrect", "skipped"],
        "gsm8k_reward/reason": ["correct", "wrong", "no answer", "no gold"],
    }
    assert metrics["gsm8k_reward/correct"] == pytest.approx(1 / 3)
    assert metrics["gsm8k_reward/wrong"] == pytest.approx(1 / 3)
    assert metrics["gsm8k_reward/no_answer"] == pytest.approx(1 / 3)
    assert metrics["gsm8k_reward/unparseable"] == metrics["gsm8k_reward/timeout"] == 0
    assert metrics["gsm8k_reward/no_gold"] == pytest.approx(1 / 4)


def test_one_result_for_each_completion_in_order():
    golds = [str(i) for i in range(200)]
    completions = [rf"\boxed{{{i if i % 3 else i + 1}}}" for i in range(200)]
    assert math_reward(completions, answer=golds) == [float(bool(i % 3)) for i in range(200)]


def test_none_only_for_a_gold_that_cannot_be_read():
    completions = [r"\boxed{1}"] * 6
    golds = ["", None, "1", r"\boxed{}", "forty two", "9" * 20_000]
    assert math_reward(completions, answer=golds) == [None, None, 1.0, None, 0.0, None]


def test_the_first_readable_column_of_a_row_counts():
    rewards = math_reward([r"\boxed{2}"] * 3, solution=["", r"... \boxed{2}", None], answer=["2", "5", "2"])
    assert rewards == [1.0, 1.0, 1.0]


def test_a_solution_without_a_marked_answer_yields_to_the_answer():
    solution = "She sold 48 clips in April and then half as many, 24 clips, in May, which makes 72 clips in all"
    assert math_reward([r"\boxed{72}"], solution=[solution], answer=["72"]) == [1.0]
    assert math_reward([r"\boxed{72}"], solution=[solution + r": $\boxed{73}$"], answer=["72"]) == [0.0]


def test_a_missing_column_is_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"math_reward needs a gold answer.*target"):
        math_reward(["1"], target=["1"])
    assert MathReward(gold_columns=["target"])(["1"], target=["1"]) == [1.0]


def test_a_column_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="one gold for each of the 2"):
        math_reward(["1", "2"], answer=["1"])
    with pytest.raises(ValueError, match="must be a list"):
        math_reward(["1"], answer="1")


def test_weights():
    reward = MathReward(correct=2.0, wrong=-1.0, unparseable=-2.0)
    completions = [r"\boxed{3}", r"\boxed{4}", "", r"\boxed{\frac{}{}}"]
    assert reward(completions, answer=["3"] * 4) == [2.0, -1.0, -2.0, -2.0]


def test_list_of_alternatives():
    assert math_reward([r"\boxed{0.5}", r"\boxed{2}", r"\boxed{3}"], answer=[["1/2", "2"]] * 3) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "reward", [gsm8k_reward, math_reward, format_reward, MathReward(wrong=-1), GSM8KReward(), FormatReward("think")]
)
def test_picklable_and_named(reward):
    copy = pickle.loads(pickle.dumps(reward))
    completions = [r"<think>a</think> \boxed{1}", "nothing"]
    assert copy(completions, answer=["1", "1"]) == reward(completions, answer=["1", "1"])
    assert isinstance(copy.__name__, str) and copy.__name__ == reward.__name__


def test_pickled_policy_and_grade():
    policy = GradePolicy(units="required", digits=4)
    assert pickle.loads(pickle.dumps(policy)) == policy
    result = grade("1", "1")
    assert pickle.loads(pickle.dumps(result)) == result


def test_by_dotted_path():
    for name in ("gsm8k_reward", "math_reward", "format_reward"):
        module, _, attribute = f"reward_fns.{name}".rpartition(".")
        function = getattr(importlib.import_module(module), attribute)
        assert function.__name__ == name
        assert function([r"\boxed{1}"], answer=["1"]) == [1.0]


def test_import_is_light():
    code = (
        "import sys, time; start = time.perf_counter(); import reward_fns; took = time.perf_counter() - start;"
        "from reward_fns import gsm8k_reward, GradePolicy; gsm8k_reward(['#### 1'], answer=['1']);"
        "heavy = {'torch', 'trl', 'transformers', 'sympy', 'math_verify', 'trl_grpo_plus', 'numpy'};"
        "heavy &= set(sys.modules);"
        "print(took, sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )
    took, _, heavy = done.stdout.strip().partition(" ")
    assert heavy == "[]"
    assert float(took) < 0.1


def test_grade_batch_wants_equal_lengths():
    with pytest.raises(ValueError, match="2 golds for 1 completions"):
        grade_batch(["1", "2"], ["1"])
    assert grade_batch([], []) == []


def test_reasons():
    def reason(gold, completion, **policy):
        return grade(gold, completion, GradePolicy(**policy)).reason

    assert reason("7", r"\boxed{7}") == "correct"
    assert reason("7", r"\boxed{8}") == "wrong"
    assert reason("7", "") == "no answer"
    assert reason("7", r"\boxed{\frac{}}") == "unparseable"
    assert reason("7", r"\boxed{9^{9^{9^9}}}") == "refused"
    hard = r"\lim_{n\to\infty} \prod_{k=1}^{n} (1 + \frac{\sin k}{k^3})"
    assert reason(hard.replace("sin", "cos"), rf"\boxed{{{hard}}}", timeout=0.2) != "correct"


def test_no_gold_gives_a_grade_without_gold():
    assert grade("", r"\boxed{7}") == Grade(False, "7", None, "boxed", "unparseable")


@pytest.mark.parametrize(
    ("policy", "gold", "answer", "correct"),
    [
        ({"percent": "value"}, r"50\%", "50", False),
        ({"percent": "value"}, r"50\%", "0.5", True),
        ({"percent": "value"}, "50", r"50\%", False),
        ({"units": "required"}, r"5\text{ cm}", "5", False),
        ({"units": "required"}, r"5\text{ cm}", r"5\text{ cm}", True),
        ({"units": "ignored"}, r"5\text{ cm}", r"5\text{ km}", True),
        ({"list_order": "same"}, "1, 2", "2, 1", False),
        ({"list_order": "same"}, "1, 2", "1, 2", True),
        ({"brackets": "strict"}, "1, 2", "(1, 2)", False),
        ({"brackets": "strict"}, r"\begin{pmatrix}1\\2\end{pmatrix}", "(1, 2)", False),
        ({"intervals": "strict"}, "(0, 1)", "0 < x < 1", False),
        ({"approximate": "never"}, r"\frac13", "0.33333333", False),
        ({"approximate": "rational"}, r"\frac13", "0.33333333", True),
        ({"approximate": "rational"}, r"\pi", "3.14159265", False),
        ({"approximate": "always"}, r"\pi", "3.14159265", True),
        ({"approximate": "always"}, r"\pi", "3.15", False),
        ({"approximate": "always", "digits": 4}, r"\sqrt3", "1.732", True),
        ({"approximate": "always", "digits": 6}, r"\sqrt3", "1.732", False),
        ({"approximate": "always"}, "7", "7.0001", False),
        ({"base": "required"}, "1010_2", "1010", False),
        ({"base": "required"}, "1010_2", "1010_2", True),
        ({"variables": "any"}, "x = 5", "y = 5", True),
        ({"form": "same"}, r"\frac{1}{2}", r"\dfrac12", True),
        ({"form": "same"}, r"\frac{1}{2}", "0.5", False),
        ({"form": "fraction"}, "0.5", r"\frac12", True),
        ({"form": "fraction"}, "0.5", r"\frac24", False),
        ({"form": "fraction"}, r"\frac12", "0.5", False),
        ({"form": "decimal"}, r"\frac12", "0.5", True),
        ({"form": "decimal"}, r"\frac12", r"\frac12", False),
    ],
)
def test_policies(policy, gold, answer, correct):
    assert grade(gold, rf"\boxed{{{answer}}}", GradePolicy(**policy)).correct is correct


def test_a_wrong_option_is_named():
    with pytest.raises(ValueError, match=r"GradePolicy.percent must be one of"):
        GradePolicy(percent="yes")
    with pytest.raises(ValueError, match=r"GradePolicy.mode"):
        GradePolicy(mode="nothing")
    with pytest.raises(ValueError, match=r"GradePolicy.timeout"):
        GradePolicy(timeout=0)
    with pytest.raises(ValueError, match=r"FormatReward.style"):
        FormatReward("nothing")


@pytest.mark.parametrize(
    ("style", "text", "kept"),
    [
        ("any", r"\boxed{1}", True),
        ("any", "#### 1", True),
        ("any", "<answer>1</answer>", True),
        ("any", "the answer is 1", False),
        ("any", r"<think>\boxed{1}</think> one", False),
        ("any", r"\boxed{1", False),
        ("any", r"\boxed{}", False),
        ("boxed", "#### 1", False),
        ("gsm8k", "#### 1", True),
        ("gsm8k", r"\boxed{1}", False),
        ("answer", "<answer>1</answer>", True),
        ("answer", r"<answer>\boxed{1}</answer>", True),
        ("answer", r"\boxed{1}", False),
        ("think", "<think>a</think> b", True),
        ("think", "<think>a</think>", False),
        ("think", "<think>a<think>b</think> c", False),
        ("think", "a</think> b", False),
        ("think_answer", "<think>a</think>\n<answer>b</answer>", True),
        ("think_answer", "<think>a</think>\n<answer>b</answer> c", False),
        ("think_answer", "<think>a</think> b", False),
    ],
)
def test_format_reward(style, text, kept):
    assert FormatReward(style, right=1.0, wrong=-1.0)([text]) == [1.0 if kept else -1.0]


def test_format_pattern():
    assert FormatReward(pattern=r"yes|no")(["yes", "maybe", None]) == [1.0, 0.0, 0.0]


def test_with_the_trainer_of_trl(tmp_path):
    """Plain TRL takes the rewards by their function, with a conversational and a standard data set."""
    torch = pytest.importorskip("torch")
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    from tests.tiny import char_tokenizer, llama

    tokenizer = char_tokenizer()
    torch.manual_seed(0)
    data = Dataset.from_list([{"prompt": "1 + 1 =", "answer": "#### 2"}, {"prompt": "2 + 2 =", "answer": ""}])
    config = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        max_steps=1,
        bf16=False,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=llama(len(tokenizer)),
        reward_funcs=[gsm8k_reward, format_reward, MathReward(name="strict")],
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.train()
    logged = {key for entry in trainer.state.log_history for key in entry}
    assert {"rewards/gsm8k_reward/mean", "rewards/format_reward/mean", "rewards/strict/mean"} <= logged
