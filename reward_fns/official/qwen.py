r"""MATH and GSM8K as the Qwen2.5-Math evaluation scores them (arXiv 2409.12122).

Source: QwenLM/Qwen2.5-Math at a45202b, `evaluation/parser.py` (`extract_answer`, `strip_string`, `parse_ground_truth`,
`run_execute`), `evaluation/grader.py` (`math_equal`) and the choice letters of `evaluation/math_eval.py`, for the data
sets "math" and "gsm8k"; word2number 1.1.

- The text after the last "boxed", even without a backslash or a closing brace; else after "he answer is", "final
  answer is" or its Chinese form; else the last number anywhere.
- Some 330 unit words go, among them "a", "t", "h", "s", "o", "more" and "ratio", wherever no letter or digit touches
  them: `a + b` is `+ b`. Percent signs go. English number words anywhere make the whole answer a number: "one of the
  two" is 3.
- Numbers are equal within 1e-4, relatively, and also when one is 100 times the other. Braces and parentheses do not
  matter: `(0,1)`, `0,1` and `{0,1}` are the same.
- Then sympy: `parse_latex`, else `parse_expr`, else latex2sympy2; equal prints, `equals`, `simplify`, same equation up
  to sign, or numerically within 1e-4; 3 seconds.

Not done: `parse_expr` and `sympify` run any text. Here such text is only read as mathematics (see `symbolic.py`).
"""

import math
import re
from functools import lru_cache, partial

from ..workers import register
from ._common import (
    CPU_SECONDS,
    Unreadable,
    Verdict,
    apply_to_text,
    brace_shorthand,
    cut_at,
    gsm8k_answer,
    guarded_cached,
    is_solution,
    limited,
    slash_to_frac,
)
from ._sympy_runtime import require_latex_parser
from .deepseek import Symbolic, parse_digits, structures_equal
from .word_numbers import word_to_num

RELATIVE_PRECISION = 1e-4
STOPS = ("</s>", "<|im_end|>", "<|endoftext|>")
CHOICES = frozenset("ABCDE")

register("official.qwen.tidy", "reward_fns.official.qwen:_tidy_in_worker")
register("official.qwen.equal", "reward_fns.official.qwen:_math_equal_in_worker")

# In the order in which they are tried; a point stands for any character, as in the original's patterns.
_UNITS = (
    "east|degree|mph|kmph|ft|m sqaure| m east|sq m|deg|mile|q .|monkey|prime|ratio|profit of rs|rd|o|gm|p . m|lb|"
    "tile|per|dm|lt|gain|ab|way|west|a .|b .|c .|d .|e .|f .|g .|h .|t|a|h|no change|men|soldier|pie|bc|excess|"
    "st|inches|noon|percent|by|gal|kmh|c|acre|rise|a . m|th|π r 2|sq|mark|l|toy|coin|sq . m|gallon|° f|profit|"
    "minw|yr|women|feet|am|pm|hr|cu cm|square|v â € ™|are|rupee|rounds|cubic|cc|mtr|s|ohm|number|kmph|day|hour|"
    "minute|min|second|man|woman|sec|cube|mt|sq inch|mp|∏ cm ³|hectare|more|sec|unit|cu . m|cm 2|rs .|rs|kg|g|"
    "month|km|m|cm|mm|apple|liter|loss|yard|pure|year|increase|decrease|d|less|Surface|litre|pi sq m|s .|metre|"
    "meter|inch"
)
_VARIABLES = tuple(variable + sign for sign in ("=", "\\in", "\\to") for variable in "xyz")

_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
_LINE_BREAK = re.compile(r"\n\s*")
_ARRAY_BEGIN = re.compile(r"\\begin\{array\}\{.*?\}")
_TRAILING_TEXT = re.compile(r"\\text{.*?}$")
_TEXT = re.compile(r"\\text\{(.*?)\}")
_MBOX = re.compile(r"\\mbox{.*?}")
_ZERO_DECIMALS = re.compile(r"(\d+)\.0*([^\d])")
_ZERO_DECIMALS_AT_END = re.compile(r"(\d+)\.0*$")
_ROOT = re.compile(r"\\sqrt(\w+)")
_LETTER = re.compile(r"\b(A|B|C|D|E)\b")
_TRIGGERS = ("choice is", "answer is")
_TRIGGER = re.compile("|".join(_TRIGGERS))
_BRACED_LIST = re.compile(r"\{.*,.*\}")


@lru_cache(maxsize=1)
def _units() -> tuple[tuple[str, re.Pattern], ...]:
    """Pairs of a text that must be there for the pattern to match, and the pattern."""
    singular = _UNITS.split("|")
    names = [*singular, *(name + "s" for name in singular)]
    return tuple((name.partition(".")[0], re.compile(rf"(^|\W){name}($|\W)")) for name in names)


def _remove_units(text: str) -> str:
    for _ in range(2):
        for needle, pattern in _units():
            if needle in text:
                text = pattern.sub(r"\1\2", text) or text
    return text


def _words_to_number(text: str) -> str:
    try:
        return str(word_to_num(text))
    except ValueError:
        return text


def strip_string(text: str) -> str:
    """The normalisation of an extracted answer."""
    text = text.strip().replace("\n", "").rstrip(".").replace("\\!", "")
    text = _ARRAY_BEGIN.sub(r"\\begin{pmatrix}", text).replace("\\end{array}", "\\end{pmatrix}")
    text = text.replace("bmatrix", "pmatrix").replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.replace("\\neq", "\\ne").replace("\\leq", "\\le").replace("\\geq", "\\ge")
    text = text.replace("\\left", "").replace("\\right", "").replace("\\{", "{").replace("\\}", "}")
    text = _TRAILING_TEXT.sub("", text).strip() or text
    text = _remove_units(text)
    for removed in ("^{\\circ}", "^\\circ", "\\$", "$", "\\(", "\\)"):
        text = text.replace(removed, "")
    text = _TEXT.sub(r"\1", _words_to_number(text))
    for removed in _VARIABLES:
        text = text.replace(removed, "")
    text = text.replace("\\emptyset", "{}").replace("(-\\infty,\\infty)", "\\mathbb{R}")
    text = text.replace("\\%", "").replace("%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = text.replace("infinity", "\\infty")
    if "\\infty" not in text:
        text = text.replace("inf", "\\infty")
    text = text.replace("+\\inity", "\\infty").replace("and", "").replace("\\mathbf", "")
    text = _MBOX.sub("", text)
    if "j" in text and "i" not in text:
        text = text.replace("j", "i")
    text = _ZERO_DECIMALS.sub(r"\1\2", text)
    text = _ZERO_DECIMALS_AT_END.sub(r"\1", text)
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    if text.count("=") == 1 and text.index("=") <= 2:
        text = text.partition("=")[2]
    text = brace_shorthand(_ROOT.sub(r"\\sqrt{\1}", text).replace(" ", ""), tolerate_bare=True)
    return slash_to_frac(text, keep_sqrt=True)


def _after_boxed(text: str) -> str:
    rest = text.rsplit("boxed", 1)[1]
    if not rest.startswith("{"):
        return rest.partition("$")[0].strip()
    depth = 0
    for position, character in enumerate(rest):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return rest[1:position]
    return rest[1:]


def raw_answer(text: str) -> str:
    """The answer as it stands in a text."""
    text = text.replace("\u043a\u0438", "")
    if "final answer is $" in text and "$. I hope" in text:
        return text.split("final answer is $", 1)[1].split("$. I hope", 1)[0].strip()
    if "boxed" in text:
        return _after_boxed(text)
    for words in ("he answer is", "final answer is"):
        if words in text:
            return text.rsplit(words, 1)[1].strip()
    if "答案是" in text:
        return text.split("答案是")[1].strip().split("\n\n")[0].strip()
    return (_LAST_NUMBER.findall(text.replace(",", "")) or [""])[-1]


@lru_cache(maxsize=8192)
def _tidy_short(answer: str) -> str:
    """`tidy` with a memory, for texts up to INLINE_CHARS: a group of completions has few different answers."""
    return tidy(answer)


def tidy(answer: str) -> str:
    """From the raw to the compared answer. The official program normalises twice, which is not the same as once."""
    answer = _LINE_BREAK.sub("", answer).removeprefix(":").removesuffix(".").removesuffix("/")
    return strip_string(strip_string(answer))


def _last_letter(text: str, first: bool = False) -> str:
    text = text.strip("\n").rstrip(".").rstrip("/").strip(" ").lstrip(":")
    letters = _LETTER.findall(text.upper())
    choice = letters[0 if first else -1] if letters else text.strip().strip(".")
    return choice.rstrip(".").rstrip("/")


def choice_in_completion(text: str) -> str:
    """The letter of a multiple choice answer in a whole completion; the first after "answer is", else the last."""
    text = text.strip("\n")
    if any(text.count(trigger) > 1 for trigger in _TRIGGERS):
        text = text.split("\n\n")[0]
    parts = _TRIGGER.split(text)
    return _last_letter(parts[-1], first=len(parts) > 1)


def _as_choice(prediction: str, reference: str, completion: str) -> str:
    if reference in CHOICES and prediction not in CHOICES:
        return choice_in_completion(completion)
    if CHOICES.issuperset(reference) and not CHOICES.issuperset(prediction):
        return "".join(letter for letter in prediction if letter in CHOICES)
    return prediction


def numbers_equal(prediction: str, reference: str) -> bool | None:
    """As in `deepseek.numbers_equal`, with a relative precision."""
    number, target = parse_digits(prediction), parse_digits(reference)
    if number is None or target is None:
        return None
    return any(math.isclose(item, number, rel_tol=RELATIVE_PRECISION) for item in (target / 100, target, target * 100))


def _braces_to_matrix(text: str) -> str:
    r"""`{1,2}` as `\begin{pmatrix}1\2\end{pmatrix}`; with one backslash, as in the original."""
    found = _BRACED_LIST.findall(text.strip())
    return ", ".join("\\begin{pmatrix}" + item.strip("{}").replace(",", "\\") + "\\end{pmatrix}" for item in found)


def _without_brackets(text: str, other: str) -> tuple[str, str]:
    pair = [text, other]
    if (text.startswith("[") and text.endswith("]") and not other.startswith("(")) or (
        text.startswith("(") and text.endswith(")") and not other.startswith("[")
    ):
        pair = [item.strip("[]()") for item in pair]
    table = str.maketrans("", "", "{}()")
    return pair[0].translate(table).lower(), pair[1].translate(table).lower()


def decided_as_text(prediction: str, reference: str) -> bool | None:
    """The verdict when no sympy is needed for it, else None."""
    if prediction.strip().lower() == reference.strip().lower():
        return True
    if reference in CHOICES and _last_letter(prediction) == reference:
        return True
    numeric = numbers_equal(prediction, reference)
    if numeric is not None:
        return numeric
    if not prediction:
        return False
    prediction, reference = _matrix_form(prediction, reference)
    first, second = _without_brackets(prediction, reference)
    return True if first == second else None


def _matrix_form(prediction: str, reference: str) -> tuple[str, str]:
    prediction, reference = prediction.strip(), reference.strip()
    if "pmatrix" in prediction and "pmatrix" not in reference:
        reference = _braces_to_matrix(reference)
    return prediction, reference


def math_equal(prediction: str, reference: str, symbolic: Symbolic) -> bool:
    """The official comparison; `symbolic` is asked last."""
    decided = decided_as_text(prediction, reference)
    if decided is not None:
        return decided
    prediction, reference = _matrix_form(prediction, reference)
    return structures_equal(prediction, reference, symbolic, partial(math_equal, symbolic=symbolic))


def _tidy_in_worker(answer: str, seconds: float) -> str:
    with limited(seconds):
        return tidy(answer)


def _math_equal_in_worker(prediction: str, reference: str, seconds: float) -> bool:
    from .symbolic import qwen_symbolic_equal

    with limited(seconds):
        return math_equal(prediction, reference, qwen_symbolic_equal)


@lru_cache(maxsize=8192)
def _gold(gold: str, timeout: float) -> str:
    if is_solution(gold):
        return apply_to_text(_tidy_short, "official.qwen.tidy", raw_answer(gold), timeout)
    short = gsm8k_answer(gold)
    return apply_to_text(_tidy_short, "official.qwen.tidy", gold, timeout) if short is None else strip_string(short)


def qwen25_math(gold: str, completion: str, *, timeout: float = CPU_SECONDS) -> Verdict:
    r"""The Qwen2.5-Math evaluation's verdict on one completion.

    Args:
        gold: A MATH solution with a box, a bare answer, or a GSM8K answer (`... #### 18`).
        completion: The model's text.
        timeout: Seconds of processor time for sympy; the official limit is 3 seconds by the clock.

    Returns:
        `(correct, extracted, gold)`, the last two normalised.

    Raises:
        ImportError: antlr4-python3-runtime cannot run sympy's LaTeX parser.
    """
    completion = cut_at(completion.strip(), STOPS).strip()
    try:
        reference = _gold(gold, timeout)
    except Unreadable:
        return False, None, None
    if not completion or completion == "error":
        return False, None, reference
    try:
        prediction = apply_to_text(_tidy_short, "official.qwen.tidy", raw_answer(completion), timeout)
    except Unreadable:
        return False, None, reference
    prediction = _as_choice(prediction, reference, completion)
    shown = (prediction or None, reference)
    decided = decided_as_text(prediction, reference)
    if decided is not None:
        return decided, *shown
    require_latex_parser("qwen25_math")
    try:
        return guarded_cached("official.qwen.equal", (prediction, reference), timeout), *shown
    except Unreadable:
        return False, *shown
