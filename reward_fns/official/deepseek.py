r"""MATH and GSM8K as the DeepSeekMath evaluation scores them (arXiv 2402.03300), without its execution of model text.

Source: deepseek-ai/DeepSeek-Math at 21cc5c6, `evaluation/`, the chain-of-thought tasks "math-test" and "gsm8k-test" of
`configs/zero_shot_test_configs.json`: `data_processing/answer_extraction.py` (`extract_math_answer`,
`extract_last_single_answer`, `strip_string`), `data_processing/process_utils.py` (golds), `eval/eval_script.py`
(`eval_math`, `is_correct`) and `eval/eval_utils.py` (`math_equal`).

- Answers of MATH are lists: every box of the completion, of which as many from the end count as the gold has.
- Numbers are equal within 0.001, absolutely, and also when one is 100 times the other: 50 is 0.5.
- Unions, tuples and intervals are compared part by part, and `(0,1)` is `[0,1]`.
- Then sympy: `parse_latex`, else `parse_expr`; `simplify` of the difference is 0, or both are within 0.001.

Not done: the official program runs Python code of the model in its tool-integrated task, and its `parse_expr` and
`sympify` run any text. Here such text is only read as mathematics (see `symbolic.py`).
"""

import math
import re
from collections.abc import Callable
from functools import lru_cache, partial

from ..workers import register
from ._common import (
    CPU_SECONDS,
    INLINE_CHARS,
    Unreadable,
    Verdict,
    brace_shorthand,
    gsm8k_answer,
    guarded,
    guarded_cached,
    is_solution,
    limited,
    slash_to_frac,
)
from ._sympy_runtime import require_latex_parser

PRECISION = 1e-3
Symbolic = Callable[[str, str], bool]
Equal = Callable[[str, str], bool]

register("official.deepseek.strip", "reward_fns.official.deepseek:_strip_in_worker")
register("official.deepseek.math", "reward_fns.official.deepseek:_eval_math_in_worker")
register("official.deepseek.single", "reward_fns.official.deepseek:_is_correct_in_worker")

_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
_AND = re.compile(r"\\text\{\s*and\s*\}")
_TRAILING_TEXT = re.compile(r"\\text{.*?}$")
_METRES = re.compile(r"\{(c|m)?m\}(\^(2|3))?")
_AFTERNOON = re.compile(r"p\.m\.$")
_TONNES = re.compile(r"(\d)\s*t$")
_MBOX = re.compile(r"\\mbox{.*?}")
_ZERO_DECIMALS = re.compile(r"(\d+)\.0+([^\d])")
_ZERO_DECIMALS_AT_END = re.compile(r"(\d+)\.0+$")
_ROOT = re.compile(r"\\sqrt(-?[0-9.a-zA-Z]+)")
_SPACED_ROOT = re.compile(r"\\sqrt\s+(\w+)$")
_TAN = re.compile(r"\\tan(-?[0-9.a-zA-Z]+)")
_SPACED_TAN = re.compile(r"\\tan\s+(\w+)$")
_TAIL = re.compile(r"(\\|,|\.)+$")
_BRACKETED = re.compile(r"(\(|\[).+(\)|\])")
_MATRIX_BEGINS = ("\\begin{pmatrix}", "\\begin{bmatrix}")
_MATRIX_ENDS = ("\\end{pmatrix}", "\\end{bmatrix}")


@lru_cache(maxsize=8192)
def _strip_short(text: str) -> str:
    """`strip_string` with a memory, for texts up to INLINE_CHARS: a group of completions has few different answers."""
    return strip_string(text)


def strip_string(text: str) -> str:
    """The normalisation of an extracted answer."""
    text = text.strip().replace("\n", "").rstrip(".").replace("\\!", "")
    if text.startswith("\\text{") and text.endswith("}"):
        text = text[len("\\text{") : -1]
    for kind in ("tfrac", "dfrac", "cfrac"):
        text = text.replace(kind, "frac")
    text = text.replace("\\left", "").replace("\\right", "")
    text = _TRAILING_TEXT.sub("", text).strip() or text
    text = text.replace("^{\\circ}", "").strip().replace("^\\circ", "").strip()
    text = _METRES.sub("", text).strip()
    text = _AFTERNOON.sub("", text).strip()
    text = _TONNES.sub(r"\1", text).strip()
    text = text.replace("\\$", "").replace("$", "").replace("x\\in", "").replace("\\%", "%")
    text = text.replace(" .", " 0.").replace("{.", "{0.").replace("\\cdot", "")
    text = text.replace("infinity", "\\infty")
    if "\\infty" not in text:
        text = text.replace("inf", "\\infty")
    text = text.replace("+\\inity", "\\infty").replace("\\mathbf", "").replace("\\mathrm", "")
    text = _MBOX.sub("", text)
    if "j" in text and "i" not in text:
        text = text.replace("j", "i")
    text = _ZERO_DECIMALS.sub(r"\1\2", text)
    text = _ZERO_DECIMALS_AT_END.sub(r"\1", text)
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    text = _SPACED_ROOT.sub(r"\\sqrt{\1}", _ROOT.sub(r"\\sqrt{\1}", text))
    text = _SPACED_TAN.sub(r"\\tan{\1}", _TAN.sub(r"\\tan{\1}", text))
    text = brace_shorthand(text.replace(" ", ""), tolerate_bare=True)
    return _TAIL.sub("", slash_to_frac(text, keep_sqrt=True))


def boxes(text: str) -> list[str]:
    """The inside of every closed `boxed{`, in order of opening; a "%" right after the box keeps the closing brace."""
    found = []
    for piece in text.split("boxed{")[1:]:
        depth = 0
        for position, character in enumerate(piece):
            if character == "{":
                depth += 1
            elif character == "}":
                depth -= 1
                if depth < 0:
                    percent = piece[position + 1 : position + 2] == "%"
                    found.append(piece[: position + 1] if percent else piece[:position])
                    break
    return found


def program_output(text: str) -> str:
    """What stands in the last ```` ```output ```` block."""
    if "```output" not in text:
        return ""
    return text.rsplit("```output", 1)[1].split("```", 1)[0].strip()


def raw_answers(text: str) -> list[str]:
    """Every answer, as it stands in the completion."""
    if "final answer is $" in text and "$. I hope" in text:
        return [text.split("final answer is $", 1)[1].split("$. I hope", 1)[0].strip()]
    if "boxed" in text:
        return boxes(text)
    if "he answer is" in text:
        return [text.rsplit("he answer is", 1)[1].strip()]
    output = program_output(text)
    if output:
        return [output]
    numbers = _LAST_NUMBER.findall(text.replace(",", ""))
    return numbers[-1:]


def first_line(answer: str) -> str:
    return answer.strip().split("\n")[0].lstrip(":").rstrip(".").rstrip("/")


def _strip_all(answers: list[str], timeout: float) -> list[str]:
    lines = [first_line(answer) for answer in answers]
    return [
        _strip_short(line) if len(line) <= INLINE_CHARS else guarded("official.deepseek.strip", (line,), timeout)
        for line in lines
    ]


def extract_math_answer(question: str, answers: list[str]) -> list[str]:
    """Splits stripped answers: at commas when the problem asks for that, else at "and" in text mode."""
    result: list[str] = []
    for answer in answers:
        if "separated by commas" in question and not any(bracket in answer for bracket in "()[]"):
            result += [part.strip() for part in answer.split(",")]
        elif _AND.search(answer):
            result += [part.strip() for part in _AND.sub("[SEP]", answer).split("[SEP]")]
        else:
            result.append(answer.strip())
    return result


def parse_digits(text: str) -> float | None:
    """The number that a text is, without commas; `5%` is 0.05. None when it is no number."""
    text = text.replace(",", "")
    try:
        return float(text)
    except ValueError:
        if not text.endswith("%"):
            return None
    try:
        return float(text[:-1].removesuffix("\\")) / 100
    except ValueError:
        return None


def _pairwise(first: list[str], second: list[str], equal: Equal) -> bool:
    return len(first) == len(second) and all(equal(a, b) for a, b in zip(first, second, strict=True))


def _is_matrix(text: str) -> bool:
    return text.startswith(_MATRIX_BEGINS) and text.endswith(_MATRIX_ENDS)


def _rows(matrix: str) -> list[list[str]]:
    lines = matrix[len(_MATRIX_BEGINS[0]) : -len(_MATRIX_ENDS[0])].split("\\\\")
    return [line.strip().split("&") for line in lines if line.strip()]


def _matrices_equal(first: str, second: str, equal: Equal) -> bool:
    rows, other = _rows(first), _rows(second)
    return len(rows) == len(other) and all(_pairwise(a, b, equal) for a, b in zip(rows, other, strict=True))


def numbers_equal(prediction: str, reference: str) -> bool | None:
    """Whether two numbers are equal, each of 1/100, 1 and 100 times the gold allowed; None when one is no number."""
    number, target = parse_digits(prediction), parse_digits(reference)
    if number is None or target is None:
        return None
    return any(math.isclose(item, number, abs_tol=PRECISION) for item in (target / 100, target, target * 100))


def _difference(equation: str) -> str:
    left, right = equation.split("=")
    return f"{left.strip()} - ({right.strip()})"


def _assigned(text: str) -> str | None:
    """The right side of `x = 5`, whose left side has at most two characters."""
    left, equals, right = text.partition("=")
    return right if equals and "=" not in right and len(left.strip()) <= 2 else None


def math_equal(prediction: str, reference: str, symbolic: Symbolic) -> bool:
    """The official comparison; `symbolic` is asked last."""
    if prediction == reference:
        return True
    numeric = numbers_equal(prediction, reference)
    if numeric is not None:
        return numeric
    if not prediction:
        return False
    equal = partial(math_equal, symbolic=symbolic)
    return structures_equal(prediction.strip(), reference.strip(), symbolic, equal)


def structures_equal(prediction: str, reference: str, symbolic: Symbolic, equal: Equal) -> bool:
    """Lists, matrices and equations part by part by `equal`, then all by `symbolic`: the part that Qwen took over."""
    if (
        _BRACKETED.match(prediction)
        and _BRACKETED.match(reference)
        and _pairwise(prediction[1:-1].split(","), reference[1:-1].split(","), equal)
    ):
        return True
    if _is_matrix(prediction) and _is_matrix(reference) and _matrices_equal(prediction, reference, equal):
        return True
    if prediction.count("=") == 1 and reference.count("=") == 1:
        first, second = _difference(prediction), _difference(reference)
        if symbolic(first, second) or symbolic(f"-({first})", second):
            return True
    else:
        first, second = prediction, reference
        if "=" not in reference and (value := _assigned(prediction)) is not None:
            first = value
        elif "=" not in prediction and (value := _assigned(reference)) is not None:
            second = value
        if (first, second) != (prediction, reference) and equal(first, second):
            return True
    return symbolic(prediction, reference)


def decided_as_text(prediction: str, reference: str) -> bool | None:
    """The verdict on one pair when no sympy is needed for it, else None."""
    if "\\cup" in prediction and "\\cup" in reference:
        return None
    try:
        if abs(float(prediction.replace(",", "")) - float(reference.replace(",", ""))) < PRECISION:
            return True
    except ValueError:
        pass
    if prediction == reference:
        return True
    return numbers_equal(prediction, reference) if prediction else False


def is_correct(prediction: str, reference: str, symbolic: Symbolic) -> bool:
    """`eval_script.py:is_correct` on two texts."""
    if "\\cup" in prediction and "\\cup" in reference:
        return matches(prediction.split("\\cup"), reference.split("\\cup"), symbolic)
    decided = decided_as_text(prediction, reference)
    return math_equal(prediction, reference, symbolic) if decided is None else decided


def matches(predictions: list[str], references: list[str], symbolic: Symbolic) -> bool:
    """`is_correct` on two lists: every prediction has a partner and every reference has one."""
    table = [[is_correct(prediction, reference, symbolic) for reference in references] for prediction in predictions]
    return all(any(row) for row in table) and all(any(row[j] for row in table) for j in range(len(references)))


def _unique(items: list[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _strip_in_worker(text: str, seconds: float) -> str:
    with limited(seconds):
        return strip_string(text)


def _is_correct_in_worker(prediction: str, reference: str, seconds: float) -> bool:
    from .symbolic import deepseek_symbolic_equal

    with limited(seconds):
        return is_correct(prediction, reference, deepseek_symbolic_equal)


def _eval_math_in_worker(predictions: list[str], references: list[str], seconds: float) -> bool:
    from .symbolic import deepseek_symbolic_equal

    with limited(seconds):
        return matches(predictions, references, deepseek_symbolic_equal)


@lru_cache(maxsize=8192)
def _gold_list(gold: str, question: str, timeout: float) -> tuple[str, ...]:
    answers = raw_answers(gold) if is_solution(gold) else [gold]
    return tuple(_unique(extract_math_answer(question, _strip_all(answers, timeout))))


def _shown(answers: list[str] | tuple[str, ...]) -> str | None:
    return ", ".join(answers) if answers else None


def deepseek_math(gold: str, completion: str, *, question: str = "", timeout: float = CPU_SECONDS) -> Verdict:
    r"""The DeepSeekMath evaluation's verdict on one completion.

    Args:
        gold: A MATH solution with boxes, a bare MATH answer, or a GSM8K answer (`... #### 18`), which is scored by the
            rules of the GSM8K task.
        completion: The model's text.
        question: The problem. Official only with it: the answers of a problem that says "separated by commas" are
            split at commas. Without it they are compared as they stand, in order.
        timeout: Seconds of processor time for sympy; the official limit is 15 seconds by the clock.

    Returns:
        `(correct, extracted, gold)`, the last two normalised, several answers joined by ", ".

    Raises:
        ImportError: antlr4-python3-runtime cannot run sympy's LaTeX parser.
    """
    short = None if is_solution(gold) else gsm8k_answer(gold)
    try:
        if short is not None:
            references = (short.replace(",", ""),)
            predictions = (_strip_all(raw_answers(completion), timeout) or [""])[-1:]
        else:
            references = _gold_list(gold, question, timeout)
            predictions = _unique(extract_math_answer(question, _strip_all(raw_answers(completion), timeout)))
            predictions = predictions[-len(references) :]
    except Unreadable:
        return False, None, None
    shown = (_shown(predictions), _shown(references))
    if tuple(predictions) == references:
        return True, *shown
    if not predictions or not references:
        return False, *shown
    if len(predictions) == len(references) == 1:
        decided = decided_as_text(predictions[0], references[0])
        if decided is not None:
            return decided, *shown
    require_latex_parser("deepseek_math")
    kind, payload = (
        ("official.deepseek.math", (tuple(predictions), references))
        if short is None
        else ("official.deepseek.single", (predictions[0], references[0]))
    )
    try:
        return guarded_cached(kind, payload, timeout), *shown
    except Unreadable:
        return False, *shown
