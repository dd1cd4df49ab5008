r"""Tables of (gold, completion, verdict, why) for the official grading modes.

The verdicts are those of the sources that the modes name, worked out from the sources' rules. Where a mathematics
teacher would say otherwise, the reason says so with "though".
"""

import pytest

from reward_fns.official import OFFICIAL_MODES
from reward_fns.official.hendrycks import is_equiv
from reward_fns.official.hendrycks import strip_string as hendrycks_strip
from reward_fns.official.minerva import get_unnormalized_answer, normalize_final_answer
from reward_fns.official.word_numbers import word_to_num

MATRIX = r"\begin{pmatrix}1\\2\end{pmatrix}"

GSM8K_STRICT = [
    ("... #### 18", "so #### 18", True, "the format of the data set"),
    ("... #### 18", "The answer is 18.", False, "no ####, though right"),
    ("... #### 18", "#### $18", False, "the dollar sign stops the pattern, though right"),
    ("... #### 18", "####18", False, "one space is needed"),
    ("... #### 18", "#### 18\n#### 19", True, "the first counts, though the last was meant"),
    ("... #### 1,800", "#### 1800", True, "commas are removed"),
    ("... #### 1800", "#### 1,8,00", True, "every comma is removed"),
    ("... #### 18", "#### 18.", True, "one point at the end is removed"),
    ("... #### 18", "#### 18..", False, "only one"),
    ("... #### 18", "#### 18.0", False, "strings are compared, though equal"),
    ("... #### 18", "#### -18", False, "the sign counts"),
    ("... #### -18", "#### -18 dollars", True, "text may follow"),
    ("... #### 18", "#### 018", False, "strings are compared"),
    ("18", "#### 18", True, "a bare gold"),
    ("... #### 18", "no\n\nQuestion: next\nAnswer: #### 18", False, "the generation ends before a next question"),
    ("... #### 18", "#### 18<|im_end|>#### 19", True, "and at the end token"),
]
GSM8K_FLEXIBLE = [
    ("... #### 18", "The answer is 18.", True, "the last number"),
    ("... #### 18", "She makes $18 a day.", True, "the dollar sign is matched and then removed"),
    ("... #### 18", "18 of the 20", False, "the last number, though 18 was meant"),
    ("... #### 18", "18 eggs in week 1", False, "the last number is 1"),
    ("... #### 18", "18... ", False, "one point is removed, two stay"),
    ("... #### 18", "It is 18, ...", False, "the last match is the three points"),
    ("... #### 18", "no number", False, "no answer"),
    ("... #### 5", "10-5", False, "the minus belongs to the number"),
    ("... #### 1800", "1,800", True, "commas are removed"),
    ("... #### 18", r"\boxed{18}", True, "any last number"),
    ("... #### 7", r"\sqrt{\sqrt{7}}", True, "any last number, though it is no answer"),
    ("... #### 18", "18\n\nQuestion: 19", True, "the generation ends before a next question"),
]
HENDRYCKS = [
    (r"\frac{1}{2}", r"\boxed{\frac12}", True, "braces are put in"),
    (r"\frac{1}{2}", r"\boxed{\dfrac{1}{2}}", True, "dfrac"),
    (r"\frac{1}{2}", r"\boxed{\tfrac12}", True, "tfrac"),
    (r"\frac{1}{2}", r"\boxed{1/2}", True, "integer / integer"),
    (r"\frac{1}{2}", r"\boxed{ 1/2 }", True, "spaces go before the slash is read"),
    (r"\frac{x}{2}", r"\boxed{x/2}", False, "only integers, though equal"),
    (r"\frac{1}{2}", r"\boxed{0.5}", True, "the one decimal that is known"),
    (r"\frac{1}{2}", r"\boxed{.5}", True, "a 0 is put before the point first"),
    (r"\frac{1}{4}", r"\boxed{0.25}", False, "no other decimal, though equal"),
    (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", False, "no mathematics, though equal"),
    (r"\frac{1}{72}", r"\boxed{\frac1{72}}", True, "one-character numerator"),
    (r"\frac{72}{1}", r"\boxed{\frac{72}1}", False, "not after a braced numerator"),
    (r"\frac{1}{2}3", r"\boxed{\frac123}", True, "one character each"),
    (r"\sqrt{3}", r"\boxed{\sqrt3}", True, "braces are put in"),
    (r"\sqrt{12}", r"\boxed{\sqrt12}", False, "one character"),
    (r"\sqrt[3]{8}", r"\boxed{\sqrt[3]{8}}", True, "both are broken in the same way"),
    (r"50\%", r"\boxed{50}", True, "an escaped percent sign goes"),
    (r"50", r"\boxed{50%}", False, "a bare one stays, though equal"),
    (r"90^\circ", r"\boxed{90}", True, "degrees go"),
    (r"90", r"\boxed{90^{\circ}}", True, "degrees go"),
    (r"90", r"\boxed{90\,^{\circ}}", False, "the thin space stays"),
    (r"\$18.90", r"\boxed{18.90}", True, "an escaped dollar goes"),
    (r"18.9", r"\boxed{18.90}", False, "strings, though equal"),
    (r"10", r"\boxed{10\text{ cm}}", True, "a unit in text with a leading space goes"),
    (r"10", r"\boxed{10\text{cm}}", False, "without the space it stays"),
    (r"10", r"\boxed{10 \text{ a} \text{ b}}", False, "two of them: the raw strings are compared"),
    (r"10,000", r"\boxed{10000}", False, "commas stay, though equal"),
    (r"10,\!000", r"\boxed{10,000}", True, "negative space goes"),
    (r"5", r"\boxed{k = 5}", True, "a left side of at most two characters goes, the space included"),
    (r"5", r"\boxed{x=5}", True, "the same"),
    (r"5", r"\boxed{f(x)=5}", False, "a longer one stays"),
    (r"(1,2)", r"\boxed{\left(1, 2\right)}", True, "left and right go"),
    (r"x+1", r"\boxed{1+x}", False, "no mathematics, though equal"),
    (MATRIX, r"\boxed{\begin{pmatrix}1\2\end{pmatrix}}", True, "a double backslash becomes one"),
    (r"5", r"\boxed{4} no, \boxed{5}", True, "the last box"),
    (r"5", r"\boxed{5} no, \boxed{4", False, "the last box stays open: no answer"),
    (r"5", r"\fbox{5}", False, "a framed box is found but not read, though right"),
    (r"5", r"5", False, "no box"),
    (r"5", r"\boxed 5", False, "no braces, though right"),
    (r"We get $\boxed{5}$.", r"\boxed{5}", True, "a solution as gold"),
    (r"We get $\fbox{5}$.", r"nothing", True, "neither side has a readable box: the original calls that equal"),
    (r"\frac", r"\boxed{\frac}", True, "it stumbles, and the raw strings are equal"),
    (r"... #### 18", r"\boxed{18}", True, "the answer of a GSM8K gold"),
]
FINAL = "Final Answer: The final answer is ${}$. I hope it is correct."
MINERVA = [
    ("5", FINAL.format("5"), True, "the format of the prompt"),
    ("5", r"\boxed{5}", False, "no final answer sentence, though right"),
    ("5", "Final Answer: The final answer is $5$. ", True, "the hope is appended by the harness"),
    ("5", "Final Answer: The final answer is $5$.", False, "but not the space before it, though right"),
    ("5", "Final Answer: The final answer is $5$.\nI hope it is correct.", False, "a new line ends it, though right"),
    ("5", "Final Answer: The final answer is $5$. I hope it is correct", True, "what the harness appends follows"),
    (
        "5",
        "Final Answer: The final answer is $5$. I hope it is correct\n",
        False,
        "on the same line only, though right",
    ),
    ("5", "The final answer is $5$. I hope it is correct.", False, "the first words are needed"),
    ("5", FINAL.format("4") + " " + FINAL.format("5"), False, "the first sentence counts"),
    ("5", FINAL.format("x = 5"), True, "after the last equals sign"),
    ("5", FINAL.format("5 \\text{ cm}"), True, "units"),
    ("5", FINAL.format("5 square units"), True, "units"),
    ("1000", FINAL.format("1,000"), True, "thousands"),
    ("0,1", FINAL.format("01"), False, "a tuple is no number"),
    (r"\frac{1}{2}", FINAL.format("0.5"), True, "simplify: 1/2 - 0.5 is 0"),
    (r"\frac{1}{2}", FINAL.format("\\frac{2}{4}"), True, "sympy"),
    ("x+1", FINAL.format("1+x"), True, "sympy"),
    (r"\sqrt{8}", FINAL.format("2\\sqrt{2}"), True, "sympy"),
    (r"\frac{1}{3}", FINAL.format("0.333"), False, "no rounding"),
    ("(1,2)", FINAL.format("(1,2)"), True, "equal strings need no parser"),
    ("(1,2)", FINAL.format("(1, 2)"), True, "spaces go"),
    ("(1,2)", FINAL.format("(\\frac{2}{2},2)"), False, "parse_latex reads no tuple, though equal"),
    ("1,2", FINAL.format("1,3"), True, "parse_latex stops at the comma, though wrong"),
    ("2,1", FINAL.format("1,2"), False, "order"),
    ("50", FINAL.format("50\\%"), False, "parse_latex knows no percent sign, though equal"),
    ("Evelyn", FINAL.format("nylevE"), True, "letters are a product, though wrong"),
    ("5", FINAL.format("6"), False, "wrong"),
    (r"We get $\boxed{5}$.", FINAL.format("5"), True, "a solution as gold"),
    (r"We get $\boxed 5$.", FINAL.format("5"), True, "a box without braces in the gold"),
    ("5", "Problem: a next one. " + FINAL.format("5"), False, "the generation ends before a next problem"),
]
DEEPSEEK = [
    ("5", r"\boxed{5}", True, "a box"),
    ("5", r"\boxed{4} and \boxed{5}", True, "as many boxes from the end as the gold has"),
    ("5", "The answer is 5.", True, "no box: after the words"),
    ("5", "we get 3 and 5", True, "else the last number"),
    ("5", "final answer is $5$. I hope", True, "minerva's sentence first"),
    ("5", r"final answer is $5$. I hope \boxed{6}", True, "even before a box"),
    ("5", "```output\n5\n```", True, "a program's output"),
    ("5", r"\boxed{5", False, "an open box is none, and nothing else is looked at"),
    ("0.5", r"\boxed{50}", True, "100 times is as good, though wrong"),
    ("0.5", r"\boxed{50\%}", True, "percent"),
    (r"50\%", r"\boxed{0.5}", True, "percent"),
    ("3.1416", r"\boxed{3.1410}", True, "within 0.001, though wrong"),
    (r"\frac{1}{3}", r"\boxed{0.3333}", True, "numerically within 0.001"),
    (r"\frac{1}{3}", r"\boxed{0.33}", False, "not within 0.001"),
    ("0.02", r"\boxed{0.0009}", True, "a hundredth of the gold, absolutely within 0.001, though wrong"),
    ("0.02", r"\boxed{0.0013}", False, "not within 0.001"),
    ("0.0005", r"\boxed{0}", True, "absolutely within 0.001, though wrong"),
    ("(0,1)", r"\boxed{[0,1]}", True, "kind of bracket does not matter, though wrong"),
    ("(1,2)", r"\boxed{(2,1)}", False, "order in a tuple"),
    ("x=5", r"\boxed{5}", True, "a short left side"),
    ("x+y=1", r"\boxed{1=x+y}", True, "the same equation"),
    ("x+y=1", r"\boxed{2x+2y=2}", False, "a multiple is not the same, though equivalent"),
    (MATRIX, r"\boxed{\begin{bmatrix}1\\2.0\end{bmatrix}}", True, "entry by entry"),
    (MATRIX, r"\boxed{\begin{pmatrix}1\\3\end{pmatrix}}", False, "entry by entry"),
    (r"(-\infty,1)\cup(2,\infty)", r"\boxed{(2,\infty)\cup(-\infty,1)}", True, "unions in any order"),
    (r"5\text{ and }6", r"\boxed{6 \text{ and } 5}", True, "lists at 'and' in any order"),
    (r"5\text{ and }6", r"\boxed{5}, \boxed{6}", True, "or in two boxes"),
    (r"10\text{ cm}", r"\boxed{10}", True, "trailing text goes"),
    (r"\text{even}", r"\boxed{even}", True, "text command"),
    ("2i", r"\boxed{2j}", True, "j is i"),
    ("5", r"\boxed{5.}", True, "point at the end"),
    ("5", r"\boxed{x}", False, "wrong"),
    (r"One box $\boxed{5}$, and $\boxed{6}$.", r"\boxed{6}", False, "a solution with two boxes has two answers"),
    ("... #### 1,800", r"\boxed{1800}", True, "a GSM8K gold"),
    ("... #### 1,800", "It is 1,800", True, "and the last number"),
]
QWEN = [
    ("5", r"\boxed{5}", True, "a box"),
    ("5", r"\boxed{4}, or rather \boxed{5}", True, "the last"),
    ("5", r"\boxed{5", True, "an open box reaches to the end"),
    ("5", "boxed 5$", True, "even without backslash and braces"),
    ("5", "The answer is 5.", True, "no box: after the words"),
    ("5", "答案是5\n\n6", True, "in Chinese"),
    ("5", "first 3, then 5", True, "else the last number"),
    ("5", "", False, "nothing"),
    ("0.5", r"\boxed{50}", True, "100 times is as good, though wrong"),
    (r"50\%", r"\boxed{50}", True, "percent signs go"),
    ("100000", r"\boxed{100009}", True, "within 1e-4, though wrong"),
    ("100000", r"\boxed{100011}", False, "not within 1e-4"),
    ("3.1416", r"\boxed{3.1420}", False, "3e-4 away"),
    (r"\frac{1}{3}", r"\boxed{0.33333}", True, "numerically"),
    ("5", r"\boxed{5 \text{ cm}}", True, "units"),
    ("5", r"\boxed{5 meters}", True, "units"),
    ("5", r"\boxed{x = 5}", True, "x = goes"),
    ("2", r"\boxed{two}", True, "number words"),
    ("3", r"\boxed{one of the two}", True, "their sum, though no number was said"),
    ("a+b", r"\boxed{c+b}", True, "a and c are units, though wrong"),
    ("(0,1)", r"\boxed{0,1}", True, "parentheses do not matter"),
    ("(0,1)", r"\boxed{[0,1]}", True, "kind of bracket does not matter, though wrong"),
    ("1,2", r"\boxed{1,3}", False, "the comma is a thousands separator: 12 and 13"),
    ("1,2", r"\boxed{12}", True, "the comma is a thousands separator, though wrong"),
    ("1,x", r"\boxed{1,y}", True, "parse_latex stops at the comma, though wrong"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", True, "a Python set"),
    (MATRIX, r"\boxed{\begin{bmatrix}1\\2\end{bmatrix}}", True, "bmatrix becomes pmatrix"),
    (MATRIX, r"\boxed{\begin{array}{c}1\\2\end{array}}", True, "so does an array"),
    (MATRIX, r"\boxed{\begin{pmatrix}1\\\frac{4}{2}\end{pmatrix}}", True, "entry by entry"),
    (rf"2{MATRIX}", rf"\boxed{{2\cdot {MATRIX}}}", True, "latex2sympy2 reads a multiple of a matrix"),
    ("k+n=w+2", r"\boxed{2+w=n+k}", True, "the same equation up to sign"),
    ("k+n=1", r"\boxed{1=n+k}", False, "a left side of at most two characters goes, though equal"),
    ("x+y=1", r"\boxed{1=x+y}", False, "y= goes, which leaves x+1, though equal"),
    (r"(x+1)^2", r"\boxed{x^2+2x+1}", True, "sympy"),
    (r"\text{(C)}", r"\boxed{C}", True, "parentheses do not matter"),
    ("C", r"\boxed{\text{(C) } 12}", True, "a choice letter"),
    ("C", "It is B. The answer is C, not D", True, "the first letter after the words"),
    ("AB", r"\boxed{A, B}", True, "several letters: all else goes"),
    ("5", r"\boxed{6}", False, "wrong"),
    (r"We get $\boxed{5}$.", r"\boxed{5}", True, "a solution as gold"),
    ("... #### 1,800", r"\boxed{1800}", True, "a GSM8K gold"),
    ("5", r"\boxed{5}</s> \boxed{6}", True, "the generation ends at the end token"),
]
TABLES = {
    "gsm8k_strict": GSM8K_STRICT,
    "gsm8k_flexible": GSM8K_FLEXIBLE,
    "hendrycks_math": HENDRYCKS,
    "minerva_math": MINERVA,
    "deepseek_math": DEEPSEEK,
    "qwen25_math": QWEN,
}


@pytest.mark.parametrize(
    ("mode", "gold", "completion", "verdict", "why"),
    [(mode, *row) for mode, rows in TABLES.items() for row in rows],
)
def test_verdict(mode, gold, completion, verdict, why):
    correct, extracted, read_gold = OFFICIAL_MODES[mode](gold, completion)
    assert type(correct) is bool
    assert correct is verdict, f"{why}: {extracted!r} against {read_gold!r}"


def test_the_modes_are_the_six_that_are_documented():
    assert list(OFFICIAL_MODES) == list(TABLES)


@pytest.mark.parametrize(
    ("mode", "gold", "completion", "extracted", "shown_gold"),
    [
        ("gsm8k_strict", "x\n#### 1,234", "#### 1,234.", "1234", "1234"),
        ("gsm8k_strict", "#### 5", "five", None, "5"),
        ("hendrycks_math", r"so $\boxed{\frac12}$", r"\boxed{0.5}", "0.5", r"\frac12"),
        ("hendrycks_math", "5", "5", None, "5"),
        ("minerva_math", r"\boxed{x=1,\!000}", FINAL.format("1,000 cm"), "1000", "1000"),
        ("minerva_math", "5", "5", None, "5"),
        ("deepseek_math", r"5\text{ and }6", r"\boxed{6}, \boxed{5}", "6, 5", "5, 6"),
        ("deepseek_math", "5", r"\boxed{5", None, "5"),
        ("qwen25_math", "5", r"\boxed{x = 5 \text{ cm}}", "5", "5"),
        ("qwen25_math", "5", "nothing", None, "5"),
        # Normalised twice: the first time removes the space, the second one puts the braces in.
        ("qwen25_math", r"\sqrt{3}", r"\boxed{\sqrt 3}", r"\sqrt{3}", r"\sqrt{3}"),
    ],
)
def test_extraction_and_gold(mode, gold, completion, extracted, shown_gold):
    assert OFFICIAL_MODES[mode](gold, completion)[1:] == (extracted, shown_gold)


def test_deepseek_splits_at_commas_only_when_the_problem_says_so():
    grade = OFFICIAL_MODES["deepseek_math"]
    question = "Find all roots, separated by commas."
    assert grade("1,x", r"\boxed{x, 1}", question=question)[0]
    assert not grade("1,x", r"\boxed{x, 1}")[0]
    assert not grade("1,x", r"\boxed{x, 2}", question=question)[0]


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("tfrac12", r"frac12"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"x \in [0,.5]", r"x\in[0,.5]"),
        (r"\frac{.5}{2}", r"\frac{0.5}{2}"),
        ("1 .5", "10.5"),
        ("3/4", r"\frac{3}{4}"),
        ("03/4", "03/4"),
        ("1_0/4", "1_0/4"),
        ("q=1", "1"),
        ("", ""),
    ],
)
def test_hendrycks_strip_string(text, normal):
    assert hendrycks_strip(text) == normal


def test_hendrycks_two_missing_answers_are_equal_and_one_is_not():
    assert is_equiv(None, None) is True
    assert is_equiv(None, "5") is False


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("2\\pi cm", "2\\pi"),
        (r"\left(0,1\right)", r"\left(0,1\right)"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"\sqrt[3]8", r"\sqrt[3]{8}"),
        (r"\text{east}", "east"),
        ("-1,234,567", "-1234567"),
        ("1,23", "1,23"),
        ("an apple a day", "appleday"),
        ("the $5$ of $6$", "5"),
        (r"\boxed{7}", "7"),
    ],
)
def test_minerva_normalization(text, normal):
    assert normalize_final_answer(text) == normal


def test_minerva_extraction_is_linear_where_the_pattern_is_quadratic():
    text = "Final Answer: The final answer is" * 20_000
    assert get_unnormalized_answer(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("twenty-one", 21),
        ("two hundred and five", 205),
        ("two million three hundred thousand four", 2_300_004),
        ("point five", 0.5),
        ("three point one four", 3.14),
        ("007", 7),
        ("two million three thousand", 2_004_003),
    ],
)
def test_number_words(text, number):
    assert word_to_num(text) == number


@pytest.mark.parametrize("text", ["", "no word", "two thousand thousand", "thousand million", "²"])
def test_number_words_that_are_refused(text):
    with pytest.raises(ValueError):
        word_to_num(text)
