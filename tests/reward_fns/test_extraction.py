"""Where the answer is found: precedence, retractions, thinking, run-on text, chat shapes and gold columns."""

import pytest

from reward_fns import GradePolicy, grade
from reward_fns.extraction import extract, read_gold, to_text

ORDER = [
    ("boxed", r"so \boxed{1}"),
    ("####", "#### 2"),
    ("final answer", "The final answer is 3."),
    ("<answer>", "<answer>4</answer>"),
    ("bold", "**5**"),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
@pytest.mark.parametrize("reverse", [False, True])
def test_precedence_does_not_depend_on_the_order_in_the_text(first, reverse):
    parts = ORDER[first:]
    text = "\n".join(part for _, part in (reversed(parts) if reverse else parts))
    assert extract(text, "math") == (str(first + 1), ORDER[first][0])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1} wait, no: \boxed{2}", "2"),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"$\boxed{1}$, $\boxed{2}$", "1, 2"),
        (r"\boxed{1}\text{ or }\boxed{2}", "1, 2"),
        (r"\boxed{5} \boxed{5}", "5"),
        (r"\boxed{1} is what I thought first and \boxed{2}", "2"),
        (r"\boxed{12} = 6 \text{ and } \boxed{7}", "7"),
        ("\\boxed{1}\n\nFinal answer\n\n\\boxed{2}", "2"),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"\boxed{28}\%", r"28\%"),
    ],
)
def test_boxes(text, found):
    assert extract(text, "math") == (found, "boxed")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("#### 18", "18"),
        ("####18.", "18"),
        ("#### $1,250", "$1,250"),
        ("#### The answer is 18", "18"),
        ("### 18", "18"),
        ("#### -3", "-3"),
        ("#### 1\n#### 2", "2"),
        (r"#### \frac{1}{2}", r"\frac{1}{2}"),
    ],
)
def test_hashes(text, found):
    assert extract(text, "gsm8k") == (found, "####")


@pytest.mark.parametrize("heading", ["#### Step 2: divide", "### 1. Find x", "#### Conclusion"])
def test_a_markdown_heading_is_no_answer(heading):
    assert extract(f"{heading}\nThe answer is 9.", "math") == ("9", "final answer")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The final answer is $\\frac{1}{2}$. I hope it is correct.", r"\frac{1}{2}"),
        ("Answer: 42", "42"),
        ("Answer:\n42", "42"),
        ("**Answer:** 42", "42"),
        ("The answer is: x = 3.", "x = 3"),
        ("The answer is 3. Hmm, the answer is 4.", "4"),
        ("The answer is 42, since 40 + 2 = 42.", "42"),
        ("Final Answer: The area of the square is 16.", "16"),
        ("The answer is $1$ and $2$.", "1, 2"),
        ("The correct option is (B).", "(B)"),
        ("Therefore, $6$ is our answer.", "6"),
        ("It costs 4.50 each.\nA: 9", "9"),
        ("The answer is 3.5", "3.5"),
    ],
)
def test_stated_answers(text, found):
    assert extract(text, "math") == (found, "final answer")


def test_the_last_number_counts_in_gsm8k_mode_only():
    text = "First 3 apples come, then 4 more, making 7 apples in the basket"
    assert extract(text, "gsm8k") == ("7", "last number")
    assert extract(text, "math").text != "7"
    assert grade("7", text, GradePolicy(mode="gsm8k")).correct
    assert not grade("7", text, GradePolicy(mode="math")).correct


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("he pays $1,234.50 now", "1234.50"),
        ("it fell to -7 degrees", "-7"),
        ("it fell to −7 degrees", "-7"),
        ("it cost -$5", "-5"),
        ("10-7", "7"),
        ("from 3–4 to 5", "5"),
        ("a gain of 15%", r"15\%"),
        ("room A12 has 3 doors", "3"),
        ("we use 1/2 of it", "1/2"),
        ("that is .5 of it", ".5"),
        ("so 12.", "12"),
    ],
)
def test_last_number(text, number):
    assert extract("Well, " + text, "gsm8k") == (number, "last number")


def test_thinking_never_counts():
    assert extract(r"<think>\boxed{1}</think> The answer is 2.", "math").text == "2"
    assert extract(r"<think>\boxed{1}</think>", "math").text is None
    assert extract(r"reasoning \boxed{1}</think>\boxed{2}", "math").text == "2"
    assert extract(r"<think>a</think>\boxed{1}<think>b</think>\boxed{2}", "math").text == "2"


def test_unfinished_thinking_is_a_policy():
    text = r"<think>It is \boxed{7}"
    assert grade("7", text).reason == "no answer"
    assert grade("7", text, GradePolicy(unfinished_thinking="read")).correct


@pytest.mark.parametrize(
    "tail",
    [
        "\n\nQuestion: Tom has 5 apples.\nAnswer: 5",
        "\nQ: 1 + 1?\nA: 2",
        "\n\nProblem: what is 3?\n#### 3",
        "<|im_end|>\n<|im_start|>user\n\\boxed{3}",
        "<|endoftext|>\\boxed{3}",
        "</s> The answer is 3.",
        "\nUser: thanks\nThe answer is 3.",
    ],
)
def test_run_on_text_is_cut(tail):
    assert grade("18", "The answer is 18." + tail).correct


def test_a_restated_question_is_not_run_on_text():
    assert grade("18", "\nQuestion: how many?\nAnswer: 18").correct


def test_a_box_that_was_cut_off_is_no_answer():
    result = grade("42", r"So the result is $\boxed{42")
    assert (result.correct, result.reason) == (False, "no answer")


SHAPES = [
    r"\boxed{7}",
    [{"role": "assistant", "content": r"\boxed{7}"}],
    {"role": "assistant", "content": r"\boxed{7}"},
    [{"content": r"\boxed{7}"}],
    [{"role": "assistant", "content": [{"type": "text", "text": r"\boxed"}, {"type": "text", "text": "{7}"}]}],
    [
        {"role": "assistant", "content": r"\boxed{1}"},
        {"role": "tool", "content": r"\boxed{2}"},
        {"role": "assistant", "content": r"\boxed{7}"},
        {"role": "user", "content": r"\boxed{3}"},
    ],
    [{"role": "assistant", "content": r"\boxed{7}"}, {"role": "assistant", "content": None, "tool_calls": []}],
    [{"role": "assistant", "reasoning_content": r"\boxed{3}", "content": r"\boxed{7}"}],
    [{"type": "text", "text": r"\boxed{7}"}],
    [r"\boxed", "{7}"],
]


@pytest.mark.parametrize("completion", SHAPES)
def test_completion_shapes(completion):
    assert to_text(completion) == r"\boxed{7}"
    assert grade("7", completion).correct


@pytest.mark.parametrize(
    "completion", [None, "", "  \n", [], {}, [{}], [{"role": "user", "content": "7"}], [None], 0.0]
)
def test_empty_completions_have_no_answer(completion):
    result = grade("7", completion)
    assert not result.correct and result.gold == "7"


@pytest.mark.parametrize(
    ("gold", "read"),
    [
        (r"\frac{1}{2}", [r"\frac{1}{2}"]),
        (r"$\frac{1}{2}$", [r"\frac{1}{2}"]),
        (r"$$x^2$$", ["x^2"]),
        (r"\(x\)", ["x"]),
        (r"\boxed{3}", ["3"]),
        (r"Long solution. So it is $\boxed{3}$.", ["3"]),
        (r"It is \boxed{1} and \boxed{2}.", ["1, 2"]),
        ("48/2 = <<48/2=24>>24 clips.\n#### 72", ["72"]),
        ("She has <<2+3=5>>5.\nA: 5", ["5"]),
        ("$125$ miles", ["125 miles"]),
        ("$1$ and $2$", ["1 and 2"]),
        ("We compute and find after a long way that the answer is 12.", ["12"]),
        (7, ["7"]),
        (7.0, ["7"]),
        (0.25, ["0.25"]),
        (["1/2", 0.5], ["1/2", "0.5"]),
        ({"answer": "3"}, ["3"]),
        (None, []),
        ("", []),
        (" ", []),
        (r"\boxed{}", []),
        (float("nan"), []),
        ([], []),
    ],
)
def test_gold_forms(gold, read):
    assert [found.text for found in read_gold(gold)] == read


def test_numpy_golds():
    numpy = pytest.importorskip("numpy")
    assert [found.text for found in read_gold(numpy.int64(7))] == ["7"]
    assert [found.text for found in read_gold(numpy.array(["1", "2"]))] == ["1", "2"]
    assert grade(numpy.float32(0.5), r"\boxed{\frac12}").correct
