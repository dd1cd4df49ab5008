r"""MATH as `minerva_math` of EleutherAI/lm-evaluation-harness scores it (arXiv 2206.14858, appendix D).

Source: lm-eval 0.4.13, `lm_eval/tasks/minerva_math/utils.py` and `minerva_math_algebra.yaml` (task version 3.1), its
`exact_match` metric.

- The generation ends before the first "Problem:".
- The answer is what stands in `Final Answer: The final answer is(...). I hope it is correct.` and nothing else: a
  completion that only boxes its answer is wrong. The last words may be missing, since the harness appends
  "I hope it is correct." before it searches, but not the point and the space before them.
- Gold and answer are normalised: the part after the last "=", without unit words, articles, text commands and LaTeX
  spacing, only the part between the first two "$".
- Equal strings are correct; otherwise both are read by sympy's `parse_latex`, and the answer is correct when
  `simplify` of the difference is 0 within 5 seconds. `parse_latex` stops at the first token that cannot go on:
  `1,2` is read as 1.
"""

import re
from functools import lru_cache

from ..workers import register
from ._common import (
    CPU_SECONDS,
    Unreadable,
    Verdict,
    apply_to_text,
    cut_at,
    gsm8k_answer,
    guarded_cached,
    is_solution,
    last_box,
    limited,
)
from ._sympy_runtime import require_latex_parser

STOPS = ("Problem:",)
PREFIX = "Final Answer: The final answer is"
SUFFIX = " I hope it is correct"
END = "I hope it is correct."

_FIRST_WORDS = "square ways integers dollars mph inches ft hours km units"
_MORE_WORDS = (
    "sue points feet minutes digits cents degrees cm gm pounds meters meals edges students childrentickets multiples"
)
# In the order of the original.
_REMOVED = (
    *_FIRST_WORDS.split(),
    "\\ldots",
    *_MORE_WORDS.split(),
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}"),
    *("\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_WHOLE_WORDS = tuple(re.compile(rf"(?<!\\)\b{word}\b") for word in _REMOVED if word.isalpha())
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_COMMAND = re.compile(r"(\\[a-zA-Z]+)")
_DOLLARS = re.compile(r".*?\$(.*?)\$.*")
_WRAPPERS = tuple(
    re.compile(pattern)
    for pattern in (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}", r"\\boxed\{(.*)\}")
)
_FRAC = re.compile(r"frac([^{])(.)")
_INDEXED_ROOT = re.compile(r"sqrt(\[[^\]]*\])(\w)")
_ROOT = re.compile(r"sqrt(?!\[)([^{])")
_GROUPED = re.compile(r"-?\d{1,3}(,\d{3})+")
_INTEGER = re.compile(r"-?[0-9]{1,18}")

register("official.minerva.normalize", "reward_fns.official.minerva:_normalize_in_worker")
register("official.minerva.equal", "reward_fns.official.symbolic:minerva_equal_in_worker")


def last_box_or_bare(text: str) -> str | None:
    r"""The harness' own reader of a solution: the inside of the last box, where `\boxed 5$` counts as well.

    Returns None where the harness would stop with an assertion.
    """
    if "\\boxed " in text:
        return text.rsplit("\\boxed ", 1)[1].partition("$")[0]
    box = last_box(text)
    return box[len("\\boxed{") : -1] if box is not None and box.startswith("\\boxed{") else None


def get_unnormalized_answer(text: str) -> str | None:
    """What stands between the fixed words, or None. One pass, where the original pattern can need quadratic time."""
    text += END
    start = text.find(PREFIX)
    while start >= 0:
        start += len(PREFIX)
        line_end = text.find("\n", start)
        line_end = len(text) if line_end < 0 else line_end
        # One character of any kind before SUFFIX and one after it, all on the line of PREFIX.
        stop = text.find(SUFFIX, start + 1, line_end - 1)
        if stop >= 0:
            return text[start : stop - 1].strip()
        start = text.find(PREFIX, line_end)
    return None


def normalize_final_answer(answer: str) -> str:
    """The normalisation of both sides."""
    answer = answer.rpartition("=")[2]
    for word in _WHOLE_WORDS:
        answer = word.sub("", answer)
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for removed in _REMOVED:
        if removed.isalpha():
            parts = _COMMAND.split(answer)
            parts[::2] = [part.replace(removed, "") for part in parts[::2]]
            answer = "".join(parts)
        else:
            answer = answer.replace(removed, "")
    answer = _DOLLARS.sub(r"$\1$", answer)
    for wrapper in _WRAPPERS:
        answer = wrapper.sub(r"\1", answer)
    answer = _FRAC.sub(r"frac{\1}{\2}", answer)
    answer = _INDEXED_ROOT.sub(r"sqrt\1{\2}", answer)
    answer = _ROOT.sub(r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    return answer.replace(",", "") if _GROUPED.fullmatch(answer) else answer


def _normalize_in_worker(answer: str, seconds: float) -> str:
    with limited(seconds):
        return normalize_final_answer(answer)


@lru_cache(maxsize=8192)
def _gold(gold: str) -> str | None:
    answer = gsm8k_answer(gold)
    if is_solution(gold):
        answer = last_box_or_bare(gold)
    elif answer is None:
        answer = gold
    return (
        None
        if answer is None
        else apply_to_text(normalize_final_answer, "official.minerva.normalize", answer, CPU_SECONDS)
    )


def is_equiv(first: str, second: str, timeout: float = CPU_SECONDS) -> bool:
    """Whether two normalised answers are equal strings or, for sympy, equal expressions. Runs sympy in a worker."""
    if first and first == second:
        return True
    if _INTEGER.fullmatch(first) and _INTEGER.fullmatch(second):
        return int(first) == int(second)
    require_latex_parser("minerva_math")
    try:
        return guarded_cached("official.minerva.equal", (first, second), timeout)
    except Unreadable:
        return False


def minerva_math(gold: str, completion: str, *, timeout: float = CPU_SECONDS) -> Verdict:
    r"""The harness' minerva_math `exact_match` on one completion.

    Args:
        gold: A solution with a box (the `solution` column), or the bare answer.
        completion: The model's text.
        timeout: Seconds of processor time for sympy; the official limit is 5 seconds by the clock.

    Returns:
        `(correct, extracted, gold)`, the last two normalised; `extracted` None where the harness has
        "[invalidanswer]".

    Raises:
        ImportError: antlr4-python3-runtime cannot run sympy's LaTeX parser.
    """
    try:
        reference = _gold(gold)
    except Unreadable:
        reference = None
    answer = get_unnormalized_answer(cut_at(completion, STOPS))
    if answer is None:
        return False, None, reference
    try:
        prediction = apply_to_text(normalize_final_answer, "official.minerva.normalize", answer, timeout)
    except Unreadable:
        return False, None, reference
    if reference is None:
        return False, prediction, None
    return is_equiv(prediction, reference, timeout), prediction, reference
