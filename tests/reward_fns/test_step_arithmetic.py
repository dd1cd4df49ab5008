"""The arithmetic reward: a table of steps with their verdicts, generated equalities, hostile input, and real golds."""

import json
import pickle
import time
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reward_fns.step_arithmetic import (
    StepArithmeticReward,
    check_step,
    find_equalities,
    step_arithmetic_reward,
)

TRUE, FALSE, NONE = True, False, None

TABLE = [
    # (step, verdict, why)
    # --- plain, and GSM8K's calculator marks
    ("12 - 7 = 5", TRUE, "plain"),
    ("12 - 7 = 2", FALSE, "plain"),
    ("12-7=5", TRUE, "no spaces"),
    ("<<48/2=24>>24 clips", TRUE, "mark"),
    ("<<48/2=25>>25 clips", FALSE, "mark"),
    ("48/2 = <<48/2=24>>24 clips", TRUE, "the mark does not stand in the way of the text"),
    ("48/2 = <<48/2=24>>25 clips", FALSE, "the mark is right and the text is wrong"),
    ("She paid 3*2 = $<<3*2=6>>6 and 6+1 = $<<6+1=8>>7.", FALSE, "one mark of two is wrong"),
    ("There are 60+30=<<90=90>>90 in total", TRUE, "a mark without a sum"),
    ("5 = 6", FALSE, "two bare numbers"),
    ("3+4 == 7", TRUE, "as in code"),
    # --- chains
    ("3 + 4 = 7 = 14 / 2", TRUE, "chain"),
    ("3 + 4 = 7 = 15 / 2", FALSE, "the second link is wrong"),
    ("3 + 4 = 8 - 1 = 7", TRUE, "chain"),
    ("10 + 5 = 15 * 2 = 30", FALSE, "a run-on: 15 is not 30"),
    ("total = 3 + 4 = 8", FALSE, "the link of a named quantity is not judged, the next one is"),
    ("Day 3 = 10 + 5 = 15", TRUE, "a number that belongs to a name is not judged"),
    ("So 3 + 4 = 7, and 7 * 2 = 15.", FALSE, "two equalities, one false"),
    # --- units, words, currency, thousands
    ("12 apples - 7 apples = 5 apples", TRUE, "units"),
    ("12 apples - 7 apples = 4 apples", FALSE, "units"),
    ("He has 3 apples + 4 oranges = 7 fruits", TRUE, "different units"),
    ("He has 3 apples + 4 oranges = 8 fruits", FALSE, "different units"),
    ("5 bales/hour x 6 hours = 36 bales", FALSE, "a slash inside a unit"),
    ("$5.00/hour * 8 hours/day * 5 days = $200.00", TRUE, "a slash inside a unit"),
    ("$24 per year / 12 months in a year = $2 per month", TRUE, "several words"),
    ("the 5-mile run + 3 miles = 8 miles", TRUE, "a hyphen inside a unit"),
    ("A = 5 * 3 = 16 cm²", FALSE, "a unit with a power"),
    ("$1,000 + $250 = $1,250", TRUE, "thousands"),
    ("$1,000 + $250 = $1,350", FALSE, "thousands"),
    ("€5 + €6 = 11€", TRUE, "other currencies"),
    ("5 * $.50 = $2.50", TRUE, "no digit before the point"),
    # --- conversions
    ("2 hours = 120 minutes", TRUE, "known units"),
    ("2 hours = 100 minutes", FALSE, "known units"),
    ("3 * 25 cents = $0.75", TRUE, "money"),
    ("5 feet + 6 inches = 66 inches", TRUE, "mixed units"),
    ("2 dozen = 24 eggs", TRUE, "a dozen of something"),
    ("$5k * 3 = $15,000", TRUE, "magnitude"),
    ("3 bags = 12 apples", NONE, "a correspondence, no equation"),
    ("1/2 cup = 4 ounces", NONE, "a correspondence, no equation"),
    # --- percent
    ("20% of 50 = 10", TRUE, "of"),
    ("20% of 50 = 11", FALSE, "of"),
    ("20% of the 50 apples = 10 apples", TRUE, "of, with an article"),
    ("3/4 of 20 = 15", TRUE, "a fraction of"),
    ("10% of the $400 + $1580 = $1980", TRUE, "the equality states the sum"),
    ("1/4 = 25%", TRUE, "hundredths"),
    ("1/4 = 30%", FALSE, "hundredths"),
    ("1/3 = 33%", TRUE, "a percentage is rounded at its last digit"),
    ("1/3 = 34%", FALSE, "a percentage is rounded at its last digit"),
    ("100% - 30% = 60%", FALSE, "percent only"),
    ("19/20 * 100 = 95%", TRUE, "the percent sign as a label"),
    ("100 + 20% = 125", NONE, "added percentages mean several things"),
    # --- fractions and mixed numbers
    ("1/2 + 1/3 = 5/6", TRUE, "fractions"),
    ("1/2 + 1/3 = 2/5", FALSE, "fractions"),
    ("2 1/2 * 4 = 10", TRUE, "mixed number"),
    ("2½ * 4 = 11", FALSE, "one character"),
    ("25 / 1/3 = 75", TRUE, "dividing by a fraction that is written without spaces"),
    ("7/12 / 1/12 = 7", TRUE, "dividing fractions"),
    # --- rounding
    ("1/3 = 0.33", TRUE, "rounded"),
    ("1/3 = 0.34", FALSE, "not what rounding gives"),
    ("1/3 = 0.3333", TRUE, "its own precision"),
    ("2/3 = 0.67", TRUE, "rounded"),
    ("2/3 = 0.66", TRUE, "cut off"),
    ("2/3 = 0.65", FALSE, "neither"),
    ("2/3 = 0.68", FALSE, "neither"),
    ("1/8 = 0.13", TRUE, "a half rounds up"),
    ("1/8 = 0.12", TRUE, "a half rounds to even"),
    ("-2/3 = -0.67", TRUE, "negative"),
    ("200/3 = $66.67", TRUE, "cents"),
    ("10/3 = 3", FALSE, "an integer is no rounded decimal"),
    ("10/3 = 3 remainder 1", TRUE, "but a quotient may have a remainder"),
    ("0.33 * 3 = 1", FALSE, "only a whole side is rounded, not its parts"),
    ("5 + 3 = 8.00", TRUE, "trailing zeros"),
    ("7.99 = 5 + 3", FALSE, "trailing digits"),
    ("15/90 * 100% = 16.66...%", TRUE, "an ellipsis"),
    ("<<4.2+9.45+1.35=14.999999999999998>>", TRUE, "a calculator in double precision"),
    ("0.1 + 0.2 = 0.30000000000000004", TRUE, "a calculator in double precision"),
    ("0.1 + 0.2 = 0.30000000004", FALSE, "too coarse for that"),
    # --- operators
    ("3x4=12", TRUE, "x"),
    ("3 X 4 = 13", FALSE, "X"),
    ("3 × 4 = 12", TRUE, "×"),
    ("3 · 4 = 12", TRUE, "·"),
    ("12 ÷ 4 = 3", TRUE, "÷"),
    ("3 boxes x 4 apples = 12 apples", TRUE, "x between units"),
    ("5 − 8 = −3", TRUE, "unicode minus"),
    ("12 – 7 = 5", TRUE, "en dash"),
    ("5 - 8 = 3", FALSE, "sign"),
    ("1800 - 2000 = 200 less than before", NONE, "the sign is in the words"),
    ("12 - (-7) = 19", TRUE, "negative operand"),
    ("-5 + 3 = -2", TRUE, "negative first operand"),
    ("(3 + 4) * 2 = 14", TRUE, "parentheses"),
    ("[3 + 4] * 2 = 14", TRUE, "brackets"),
    ("3 + 4 * 2 = 11", TRUE, "precedence"),
    ("3 + 4 * 2 = 14", FALSE, "precedence"),
    ("24 / 4 / 2 = 3", TRUE, "from left to right"),
    ("5(3+2) = 25", TRUE, "juxtaposition"),
    ("(2)(3) = 5", FALSE, "juxtaposition"),
    ("2^3 = 8", TRUE, "power"),
    ("2**3 = 9", FALSE, "power"),
    ("-2^2 = -4", TRUE, "a power binds more than a sign"),
    ("5² = 25", TRUE, "superscript"),
    ("12 divided by 4 equals 3", TRUE, "in words"),
    ("12 divided by 4 equals 4", FALSE, "in words"),
    ("5 plus 3 = 8", TRUE, "in words"),
    ("5 times 3 = 16", FALSE, "in words"),
    ("5/0 = 0", FALSE, "division by zero is never equal to anything"),
    # --- LaTeX and Markdown
    (r"$3 \times 4 = 12$", TRUE, "\\times"),
    (r"3 \cdot 4 = 13", FALSE, "\\cdot"),
    (r"12 \div 4 = 3", TRUE, "\\div"),
    (r"\frac{1}{2} + \frac{1}{4} = \frac{3}{4}", TRUE, "\\frac"),
    (r"\dfrac{1}{2} + \frac{1}{4} = \frac{2}{6}", FALSE, "\\dfrac"),
    (r"\frac{\frac{1}{2}}{2} = 0.25", TRUE, "nested \\frac"),
    (r"\$3 + \$4 = \$7", TRUE, "\\$"),
    (r"\[ 20\% \times 50 = 10 \]", TRUE, "\\%"),
    (r"\left( 3 + 4 \right) \times 2 = \boxed{14}", TRUE, "\\left, \\boxed"),
    (r"3 \text{ apples} + 4 \text{ apples} = 8 \text{ apples}", FALSE, "\\text"),
    (r"10{,}000 + 1 = 10{,}001", TRUE, "{,}"),
    (r"2^{10} = 1024", TRUE, "braces"),
    (r"\frac12 + \frac14 = \frac34", TRUE, "\\frac without braces"),
    (r"\frac{19}{10} = \boxed{1\frac{9}{10}}", TRUE, "a mixed number"),
    (r"2\frac{1}{2} = 2 + \frac{1}{2} = \frac{5}{3}", FALSE, "a mixed number"),
    (r"25 \times 25 \times 25 = \boxed{15,\!625}", TRUE, "thousands in LaTeX"),
    (r"90^\circ - 45^\circ = 50^\circ", FALSE, "degrees"),
    (r"\binom{9}{2} = \frac{9 \times 8}{2 \times 1} = 36", TRUE, "a binomial is not read, the rest is"),
    (r"\sqrt[3]{27} = 3", NONE, "a root"),
    (r"\frac{a\sqrt{2}}{2} = 6", NONE, "a fraction that is not read"),
    (r"f\left(\frac{1}{2}\right) = 0", NONE, "function"),
    (r"\frac{1}{2}AB = \frac{1}{2}(12) = 6", TRUE, "a name behind a fraction is not read, the rest is"),
    (r"\frac{1}{2} ab = 4", NONE, "variables"),
    (r"\frac{11}{36} t^2 = 11", NONE, "variable"),
    (r"101_{2} = 1 \cdot 4 + 1 = 5", TRUE, "another base is not read, the rest is"),
    (r"\frac{22}{7} = 3.\overline{142857}", NONE, "a repeating decimal"),
    (r"AC = 3 units and BC = 4 units", NONE, "names"),
    (r"5 \cdot 4 \cdot 3 \cdot 2 \cdot 1 = 5! = 120", NONE, "a factorial is not read"),
    ("**Step 2:** 5 + 3 = **9**", FALSE, "bold"),
    ("2 ** 3 = 8", TRUE, "stars between operands are a power"),
    # --- labels and lists
    ("Step 1: 5 + 3 = 8", TRUE, "label"),
    ("| 3 + 4 = 8 | wrong |", FALSE, "a table"),
    ("2|x - 3| - 1 = 3", NONE, "an absolute value"),
    ("Step 3. 5 + 3 = 9.", FALSE, "label"),
    ("1. 5 + 3 = 8", TRUE, "list item"),
    ("2) 5 + 3 = 9", FALSE, "list item"),
    ("- 5 + 3 = 8", TRUE, "list item, not -5"),
    ("* 5 + 3 = 8", TRUE, "list item"),
    ("He ate 12 (5 + 7 = 12) apples", TRUE, "a remark in parentheses"),
    ("Total:3(4)=12", TRUE, "no space after the colon"),
    ("x = 3 + 4 = 8", FALSE, "only the sum is judged"),
    ("3 + 4 = 7 and 7 * 2 = 15", FALSE, "two equalities in one sentence"),
    ("3 + 4 = 8 (of the apples)", FALSE, "a remark behind"),
    ("Rs. 50 + Rs. 30 = Rs. 80", TRUE, "a currency in letters"),
    # --- not arithmetic
    ("", NONE, "empty"),
    ("He buys 5 apples.", NONE, "no equality"),
    ("#### 5", NONE, "answer line"),
    ("x = 5", NONE, "variable"),
    ("y = 2x", NONE, "variable"),
    ("x + 5 = 10", NONE, "variable"),
    ("5 + x = 10", NONE, "variable"),
    ("2x + 3 = 13", NONE, "variable"),
    ("2x - 5 = 11", NONE, "a variable x before a sign is no multiplication"),
    ("(5/2)x = 930", NONE, "variable after a parenthesis"),
    ("15 + 2a = 35", NONE, "variable that could be an article"),
    ("8/3 = 24/Y", NONE, "variable in a denominator"),
    ("4m + 5 = 25", NONE, "a letter that could be a unit"),
    ("3 + ? = 7", NONE, "unknown"),
    ("total_cost = 6 * 4", NONE, "name"),
    ("dogs * 4 = 24", NONE, "name in a product"),
    ("f(2) = 4", NONE, "function"),
    ("sqrt(16) = 4", NONE, "function"),
    (r"\sqrt{16} = 4", NONE, "function"),
    ("2:30 = 150 minutes", NONE, "time of day"),
    ("5/12/2020 = Monday", NONE, "date"),
    ("the 2nd = 5", NONE, "ordinal"),
    ("Version 1.2.3 = 4", NONE, "version"),
    ("0900 - 0130 = 0730", NONE, "clock"),
    ("10 pm + 8 hours = 6 am", NONE, "clock"),
    ("1 = .05(Number of minutes)", NONE, "a product with a name"),
    ("5C2 = 10", NONE, "binomial"),
    ("17 mod 5 + 1 = 3", NONE, "a word operator that is not known"),
    (" + ".join(["1"] * 200) + " = 2", NONE, "too long"),
    ("2 = " + " + ".join(["1"] * 200), NONE, "too long"),
    ("10/3 ≈ 3", NONE, "an approximation states no equality"),
    ("3 + 4 != 8", NONE, "inequality"),
    ("3 + 4 >= 8", NONE, "inequality"),
    ("7! = 5040", NONE, "factorial"),
    ("twice 5 + 3 = 13", NONE, "a word changes the meaning"),
    ("2 more than 3 * 4 = 14", NONE, "a word changes the meaning"),
    ("half of 20 + 5 = 15", NONE, "a word changes the meaning"),
    ("8 packs of 5 bags * $4 = $160", NONE, "a product that began in words"),
    ("Bob has 3 apples + Cindy has 5 apples = 8", NONE, "a sum that began in words"),
    ("1 hour 30 minutes = 90 minutes", NONE, "a quantity of two numbers"),
    ("$100 000 x 2 = $200", NONE, "a number in groups"),
    ("3,5 + 1,5 = 4", NONE, "decimal commas"),
    ("9" * 41 + " = 1", NONE, "too many digits"),
    ("2^65 = 1", NONE, "too large an exponent"),
]


@pytest.mark.parametrize(("step", "verdict", "why"), TABLE, ids=[f"{why}: {step[:40]}" for step, _, why in TABLE])
def test_table(step, verdict, why):
    assert check_step(step) is verdict, find_equalities(step)


@pytest.mark.parametrize(("step", "verdict", "why"), TABLE)
def test_prose_around_an_equality_does_not_turn_its_verdict(step, verdict, why):
    """Words may put an equality in doubt, but never make a true one false or a false one true."""
    for wrapped in (f"So {step}.", f"{step}, which means that he is done.", f"In total, she needs {step}"):
        assert check_step(wrapped) in (verdict, None), find_equalities(wrapped)


# --- Generated equalities ---


SPELLINGS = {"*": ["*", "×", "x", "·"], "/": ["/", "÷"], "-": ["-", "−"], "+": ["+"], "^": ["^"]}


@st.composite
def expressions(draw, depth=2):
    """(text, value, binding): sums, products, powers and quotients of integers and decimals, written at random."""
    if depth == 0 or (depth == 1 and draw(st.booleans())):
        value = draw(st.one_of(st.integers(0, 999), st.integers(1000, 9_999_999), st.decimals(0, 99, places=2)))
        value = Fraction(value)
        if value.denominator == 1:
            text = draw(st.sampled_from([f"{int(value)}", f"{int(value):,}"]))
        else:
            text = f"{float(value):.2f}"
        return text, value, 3
    operator = draw(st.sampled_from("+-*/^"))
    left, a, left_binding = draw(expressions(depth=depth - 1))
    right, b, right_binding = draw(expressions(depth=depth - 1))
    binding = {"+": 0, "-": 0, "*": 1, "/": 1, "^": 2}[operator]
    if operator == "^":
        b = Fraction(draw(st.integers(0, 3)))
        right, right_binding = str(b), 3
    if operator == "/":
        assume(b != 0)
    # Quotients are always bracketed: `a / b / c` may also be read with b / c as a fraction.
    if left_binding < binding or (operator == "^" and left_binding < 3) or ("/" in left and operator in "*/"):
        left = f"({left})"
    if right_binding <= binding:
        right = f"({right})"
    if operator in "+-*":
        value = {"+": a + b, "-": a - b, "*": a * b}[operator]
    else:
        value = a / b if operator == "/" else a ** int(b)
    sign, space = draw(st.sampled_from(SPELLINGS[operator])), draw(st.sampled_from(["", " "]))
    return f"{left}{space}{sign}{space}{right}", value, binding


@st.composite
def results(draw, value):
    """(text, place): the value exactly, or rounded or cut off at some decimal; `place` is that of the last digit."""
    if value.denominator == 1 and draw(st.booleans()):
        return f"{int(value):,}" if draw(st.booleans()) else str(int(value)), Fraction(1)
    places = draw(st.integers(1, 5))
    scaled = abs(value) * 10**places
    digits = scaled // 1 if draw(st.booleans()) else (scaled + Fraction(1, 2)) // 1
    sign = "-" if value < 0 and digits else ""
    whole, part = divmod(int(digits), 10**places)
    return f"{sign}{whole}.{part:0{places}d}", Fraction(1, 10**places)


TEMPLATES = ["{}", "Step 2: {}", "So he has {} left.", "Now {}, as asked.", "<<{}>>", "The total is {}\n", "$ {} $"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_true_equalities_score_one(data):
    left, value, _ = data.draw(expressions())
    assume(value < 10**9)
    right, _ = data.draw(results(value))
    template = data.draw(st.sampled_from(TEMPLATES))
    step = template.format(f"{left} = {right}")
    assert check_step(step) is True, find_equalities(step)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_perturbed_equalities_score_zero(data):
    left, value, _ = data.draw(expressions())
    assume(abs(value) < 10**9)
    right, place = data.draw(results(value))
    wrong = (
        Fraction(right.replace(",", "")) + data.draw(st.sampled_from([-1, 1])) * data.draw(st.integers(2, 50)) * place
    )
    decimals = len(right.partition(".")[2])
    sign, (whole, part) = "-" if wrong < 0 else "", divmod(int(abs(wrong) / place), 10**decimals)
    right = f"{sign}{whole}.{part:0{decimals}d}" if decimals else f"{sign}{whole}"
    template = data.draw(st.sampled_from(TEMPLATES))
    step = template.format(f"{left} = {right}")
    assert check_step(step) is False, find_equalities(step)


@settings(max_examples=100, deadline=None)
@given(
    numbers=st.lists(st.integers(1, 500), min_size=2, max_size=8),
    unit=st.sampled_from(["apples", "red marbles", "miles per hour", "kg", "pages of the book", "clips/day", "cm"]),
    signs=st.data(),
    error=st.integers(-3, 3),
)
def test_units_do_not_matter(numbers, unit, signs, error):
    total, text = numbers[0], f"{numbers[0]} {unit}"
    for number in numbers[1:]:
        sign = signs.draw(st.sampled_from("+-"))
        total += number if sign == "+" else -number
        text += f" {sign} {number} {unit}"
    assert check_step(f"Together they have {text} = {total + error} {unit}.") is (error == 0)


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from("0123456789 .,+-*/=x()$%<>^abof\n½²\\{}:~≈'\""), max_size=60))
def test_any_text_gets_a_verdict(text):
    assert check_step(text) in (True, False, None)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_any_unicode_gets_a_verdict(text):
    assert check_step(text + " = " + text) in (True, False, None)


@pytest.mark.parametrize(
    "step",
    [
        "9" * 100_000 + " = 1",
        "9^9^9^9 = 1",
        "10^64^64 = 5",
        "99^64^64 * 99^64 = 5",
        "(" * 20_000 + "1" + ")" * 20_000 + " = 1",
        "-" * 20_000 + "1 = 1",
        "1+" * 20_000 + "1 = 20001",
        "((1+" * 30 + "1" + ")" * 60 + "=5",
        "1 = " * 10_000 + "1",
        "1 " * 30_000 + "= 2",
        "<<" * 20_000,
        "\\frac{" * 5_000 + "1" + "}{2}" * 5_000 + " = 1",
        "{" * 50_000 + "=1",
        "5% of " * 10_000 + "5 = 1",
        "5 x " * 20_000 + "5 = 5",
        " " * 100_000 + "= 1",
        "1,000" * 10_000 + " = 1",
        "a-" * 50_000 + " = 4",
        "\\" * 50_000 + "=1",
        "½" * 20_000 + "= 5",
        "\n" * 50_000 + "1 = 1",
        "\x00\ud800 ٣ + ٤ = ٧",
    ],
    ids=lambda step: step[:12],
)
def test_hostile_input_takes_linear_time(step):
    # Processor time, so that a busy machine cannot fail it; quadratic work on these would take minutes.
    start = time.process_time()
    assert check_step(step) in (True, False, None)
    assert time.process_time() - start < 10


# --- The reward ---


def test_reward_shapes_and_values():
    steps = [["12 - 7 = 5", "so 5 * 2 = 11", "#### 11"], [], ["no sum"]]
    assert step_arithmetic_reward(steps=steps) == [[1.0, 0.0, None], [], [None]]
    scores = step_arithmetic_reward(
        prompts=["p"], completions=["c"], completion_ids=[[1]], steps=[["1 + 1 = 2"]], answer=["2"], trainer_state=None
    )
    assert scores == [[1.0]] and type(scores[0][0]) is float
    assert step_arithmetic_reward.__name__ == "step_arithmetic_reward"


def test_other_values_and_pickle():
    reward = StepArithmeticReward(true_value=0.5, false_value=-1.0, unchecked_value=0.0)
    again = pickle.loads(pickle.dumps(reward))
    for each in (reward, again):
        assert each(steps=[["1 + 1 = 2", "1 + 1 = 3", "x"]]) == [[0.5, -1.0, 0.0]]
        assert each.__name__ == "step_arithmetic_reward"
    assert pickle.loads(pickle.dumps(step_arithmetic_reward)) is step_arithmetic_reward


def test_bad_input():
    with pytest.raises(ValueError, match="process_reward_funcs"):
        step_arithmetic_reward(prompts=["p"], completions=["1 + 1 = 2"])
    with pytest.raises(TypeError, match=r"steps\[0\] must be a list of strings"):
        step_arithmetic_reward(steps=["1 + 1 = 2"])
    with pytest.raises(TypeError, match=r"steps\[1\]"):
        step_arithmetic_reward(steps=[[], [3]])
    with pytest.raises(TypeError, match="true_value"):
        StepArithmeticReward(true_value="1")
    with pytest.raises(TypeError, match="unchecked_value"):
        StepArithmeticReward(unchecked_value=True)


def test_reasons_are_given():
    (first, second) = find_equalities("2x + 1 = 3 and 4 + 4 = 9")
    assert first.holds is None and first.reason == "a letter stands for a number"
    assert (second.left, second.right, second.holds) == ("4 + 4", "9", False)


# --- Real data ---

# (row, line) of the steps of GSM8K's own solutions that hold a false equality: wrong sums, typing errors and run-on
# chains. docs/step_arithmetic.md names each.
WRONG_GOLDS = {
    "train": {
        *((167, 4), (168, 1), (198, 5), (224, 0), (502, 0), (716, 0), (1817, 6), (2249, 0), (3002, 0), (3334, 7)),
        *((3409, 1), (3411, 0), (3411, 2), (3859, 0), (4379, 0), (4691, 0), (4973, 0), (5152, 0), (5195, 0)),
        *((5350, 2), (5781, 2), (6001, 0), (6157, 4), (6256, 1), (6700, 1), (6713, 1), (6760, 3), (6812, 0)),
        *((6842, 0), (7178, 3), (7444, 3)),
    },
    "test": {(410, 0), (501, 2), (598, 5), (1024, 4)},
}


@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.slow), "test"])
def test_no_false_alarm_on_gold_solutions(shared_data, split):
    flagged, judged, with_sign = set(), 0, 0
    for row, line in enumerate(shared_data(f"gsm8k/{split}.jsonl").open(encoding="utf-8")):
        for number, step in enumerate(json.loads(line)["answer"].split("\n")):
            verdict = check_step(step)
            with_sign += "=" in step
            judged += "=" in step and verdict is not None
            if verdict is False:
                flagged.add((row, number))
    assert flagged == WRONG_GOLDS[split]
    assert judged / with_sign > 0.95, "most equalities are judged"


def test_flagged_steps_are_wrong_in_human_eyes(shared_data):
    """Steps before the first one that a person called wrong are right: none but one may be flagged."""
    before, first = [], []
    for line in shared_data("model_outputs/mr_gsm8k_steps.jsonl").open(encoding="utf-8"):
        row = json.loads(line)
        wrong = int(row["model_output_solution_first_error_step"])
        for number, step in enumerate(row["model_output_steps"][:wrong], start=1):
            (before if number < wrong else first).append((step, check_step(step)))
    false_alarms = [step for step, verdict in before if verdict is False]
    assert len(false_alarms) == 1 and "74 - 5 = 70" in false_alarms[0], "which is false, whatever the label says"
    assert sum(verdict is False for _, verdict in first) >= 56
