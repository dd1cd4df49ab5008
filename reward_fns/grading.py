"""`grade` and `grade_batch`: extraction, then exact comparison, then sympy in a worker for what is left."""

import re
import time
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from .answers import Answer, read_answer
from .compare import compare
from .exact import Refused, const_value
from .extraction import NOTHING, Found, extract, read_gold, to_text
from .policy import OFFICIAL_MODE_NAMES, Grade, GradePolicy

__all__ = ["clear_cache", "first_readable", "grade", "grade_batch", "read_gold_answers", "screen"]

# Seconds for all symbolic comparisons of one batch.
DEFAULT_BUDGET = 30.0
# Trees are written as nested JSON, and a worker walks them by recursion.
MAX_TREE_DEPTH = 150
CACHE_SIZE = 20_000
# Completions are long, and only those of one batch come again.
COMPLETION_CACHE_SIZE = 4096


class Gold(NamedTuple):
    """A gold answer: how it was found, and how it was read (None: it cannot be)."""

    found: Found
    answer: Answer | None


def _read(found: Found) -> Gold:
    try:
        answer = read_answer(found.text)
        if answer.kind == "word" and not answer.value[0]:
            return Gold(found, None)
    except Refused:
        return Gold(found, None)
    return Gold(found, answer)


# A text without a marked answer: what is taken from it is a guess.
GUESSED_METHODS = ("bold", "math", "prose", "last number")


def first_readable(values: Sequence[Any]) -> int:
    """Index of the value that holds a gold: a marked or bare one if there is one, else a guess, else 0."""
    readings = [read_gold_answers(value) for value in values]
    for guessed in (False, True):
        for i, golds in enumerate(readings):
            if any(g.answer is not None and (guessed or g.found.method not in GUESSED_METHODS) for g in golds):
                return i
    return 0


class _Golds(NamedTuple):
    """The readable golds of one column value, and what is asked of them for each completion."""

    readable: tuple[Gold, ...]
    texts: tuple[str, ...]
    numeric: bool
    plain: str | None


@lru_cache(maxsize=CACHE_SIZE)
def _read_gold_text(text: str) -> tuple[Gold, ...]:
    return tuple(_read(found) for found in read_gold(text))


def read_gold_answers(value: Any) -> tuple[Gold, ...]:
    """All readings of a gold column's value. Empty when there is no gold in it."""
    if isinstance(value, str):
        return _read_gold_text(value)
    return tuple(_read(found) for found in read_gold(value))


@lru_cache(maxsize=CACHE_SIZE)
def _gold_set_of_text(text: str) -> _Golds:
    return _gold_set(_read_gold_text(text))


def _gold_set(golds: Sequence[Gold]) -> _Golds:
    readable = tuple(gold for gold in golds if gold.answer is not None)
    texts = tuple(gold.found.text for gold in readable)
    plain = _plain_number(texts[0]) if len(texts) == 1 else None
    return _Golds(readable, texts, _is_numeric(readable), plain)


def _is_numeric(golds: Sequence[Gold]) -> bool:
    for _, answer in golds:
        if answer is not None and answer.kind == "number":
            if answer.decimals is not None:
                return True
            try:
                if answer.form is not None and const_value(answer.form) is not None:
                    return True
            except Refused:
                pass
    return False


_PLAIN_NUMBER = re.compile(r"(-?)\$?(\d{1,12}|[1-9]\d{0,2}(?:,\d{3}){1,3})(?:\.(\d{1,2}))?\.?")


def _plain_number(text: str) -> str | None:
    """A short decimal in its only spelling, so that two of them are equal when they are the same string."""
    if text.isdigit() and len(text) < 13 and text.isascii():
        return text.lstrip("0") or "0"
    match = _PLAIN_NUMBER.fullmatch(text)
    if match is None or not text.isascii():
        return None
    whole = match[2].replace(",", "").lstrip("0") or "0"
    decimals = (match[3] or "").rstrip("0")
    number = f"{whole}.{decimals}" if decimals else whole
    return f"-{number}" if match[1] and number != "0" else number


# --- what may go to sympy --------------------------------------------------------------------------------------------

_DIGITS = re.compile(r"\d+")
_LIMITS = re.compile(r"\\(sum|prod|int|bigcup|bigcap|lim|iint|oint)(?![a-zA-Z])")
_FACTORIAL = re.compile(r"(\d+|[)}\]!])\s*!")
_EXPONENT = re.compile(r"\^\s*(?:\{([^{}]*)\}|(\w+)|\{)")


def screen(text: str) -> str | None:
    """Why an expression must not be given to sympy, or None when it may."""
    if len(text) > 800:
        return "too long"
    depth = deepest = 0
    tower = highest = 0
    braces: list[bool] = []
    previous = ""
    for char in text:
        if char in "({[":
            depth += 1
            deepest = max(deepest, depth)
            raised = previous == "^"
            braces.append(raised)
            tower += raised
            highest = max(highest, tower)
        elif char in ")}]":
            depth -= 1
            if braces and braces.pop():
                tower -= 1
        if not char.isspace():
            previous = char
    if deepest > 25:
        return "nested too deeply"
    if highest > 2 or re.search(r"\^[^\^{}()+\-*\s]*\^[^\^{}()+\-*\s]*\^", text):
        return "tower of exponents"
    if re.search(r"[\d)}]\s*\^\s*\{?\s*\(?\d+\)?\s*\^", text):
        return "tower of exponents"
    numbers = [match[0] for match in _DIGITS.finditer(text)]
    if any(len(number) > 200 for number in numbers):
        return "too many digits"
    if highest == 2 and any(len(number) > 1 for number in numbers):
        return "tower of exponents"
    for match in _EXPONENT.finditer(text):
        inside = match[1] if match[1] is not None else match[2] or ""
        if any(len(number) > 3 for number in _DIGITS.findall(inside)):
            return "exponent too large"
        if "!" in inside:
            return "factorial in an exponent"
    factorials = [match[1] for match in _FACTORIAL.finditer(text)]
    if any(f == "!" for f in factorials) or any(f.isdigit() and (len(f) > 3 or int(f) > 300) for f in factorials):
        return "factorial too large"
    if sum(f in ")}]" for f in factorials) and any(f.isdigit() for f in factorials):
        return "factorial of a factorial"
    if re.search(r"\\sqrt\s*\[\s*\d{4}", text):
        return "root of a large order"
    limits = _LIMITS.findall(text)
    if len(limits) > 3:
        return "too many sums or integrals"
    if limits and any(len(number) > 3 for number in numbers):
        return "limit too large"
    if re.search(r"__|[`\"#@]|\b(?:import|eval|exec|lambda|open|os|sys)\b", text):
        return "not mathematics"
    return None


_INFINITE = re.compile(r"\\(?:sum|prod)(?![a-zA-Z]).*?\\infty", re.DOTALL)
_INTEGRAL = re.compile(r"\\(?:[io]*int)(?![a-zA-Z])")


def _unevaluated(gold: str, answer: str) -> bool:
    """An integral, or an infinite sum or product, where the gold has none: that is no final answer."""
    return any(pattern.search(answer) and not pattern.search(gold) for pattern in (_INFINITE, _INTEGRAL))


# --- one pair --------------------------------------------------------------------------------------------------------


class _Pending(NamedTuple):
    """A pair that only sympy can decide."""

    kind: str
    gold: object
    answer: object


Outcome = tuple[bool, str]  # correct, reason


def _decide(gold: Gold, answer: Answer, policy: GradePolicy) -> Outcome | _Pending:
    try:
        return _decide_in_process(gold, answer, policy)
    except (Refused, RecursionError):
        return False, "refused"


def _decide_in_process(gold: Gold, answer: Answer, policy: GradePolicy) -> Outcome | _Pending:
    verdict = compare(gold.answer, answer, policy)
    if verdict is True:
        return (True, "correct") if _has_form(gold.answer, answer, policy) else (False, "wrong")
    if verdict is False:
        return False, "unparseable" if _unreadable(answer) else "wrong"
    if policy.form != "any" and not _has_form(gold.answer, answer, policy):
        return False, "wrong"
    if screen(gold.answer.source) or screen(answer.source) or _unevaluated(gold.answer.source, answer.source):
        return False, "refused"
    if gold.answer.kind == answer.kind == "number" and gold.answer.tree is not None and answer.tree is not None:
        if max(_depth(gold.answer.tree), _depth(answer.tree)) > MAX_TREE_DEPTH:
            return False, "refused"
        return _Pending("trees_equal", gold.answer.tree, answer.tree)
    return _Pending("symbolic_equal", _for_sympy(gold.answer), _for_sympy(answer))


def _depth(tree: tuple) -> int:
    level, depth = [tree], 0
    while level:
        level = [part for node in level for part in node if isinstance(part, tuple)]
        depth += 1
    return depth


def _for_sympy(answer: Answer) -> str:
    return answer.text if answer.kind == "number" else answer.source


def _payload(task: _Pending) -> tuple:
    if task.kind == "trees_equal":
        return _as_json(task.gold), _as_json(task.answer)
    return task.gold, task.answer


def _as_json(tree: Any) -> Any:
    if isinstance(tree, tuple):
        return [_as_json(part) for part in tree]
    return str(tree) if isinstance(tree, Fraction) else tree


def _unreadable(answer: Answer) -> bool:
    return answer.kind == "number" and answer.tree is None and not answer.alternatives


_INTEGER = re.compile(r"-?\d+")
_FRACTION = re.compile(r"-?\\frac\{?(-?\d+)\}?\{?(\d+)\}?|-?(\d+)/(\d+)")


def _has_form(gold: Answer, answer: Answer, policy: GradePolicy) -> bool:
    if policy.form == "any":
        return True
    if policy.form == "same":
        return gold.key == answer.key and gold.unit == answer.unit
    text = answer.key
    if policy.form == "decimal":
        return answer.decimals is not None
    if _INTEGER.fullmatch(text):
        return True
    match = _FRACTION.fullmatch(text)
    if not match:
        return False
    from math import gcd

    top, bottom = int(match[1] or match[3]), int(match[2] or match[4])
    return bottom > 1 and gcd(top, bottom) == 1


_VERDICTS: dict[tuple, Outcome] = {}


def _remember(key: tuple, outcome: Outcome) -> None:
    if len(_VERDICTS) >= CACHE_SIZE:
        _VERDICTS.clear()
    _VERDICTS[key] = outcome


def clear_cache() -> None:
    """Forgets all verdicts and readings, for measurements."""
    _VERDICTS.clear()
    for cached in (_read_gold_text, _gold_set_of_text, _extract_cached, read_answer):
        cached.cache_clear()


class _Job(NamedTuple):
    """A completion whose verdict waits for sympy."""

    index: int
    found: Found
    gold: str
    key: tuple
    pending: tuple[_Pending, ...]
    fallback: Outcome


@lru_cache(maxsize=COMPLETION_CACHE_SIZE)
def _extract_cached(text: str, mode: str, numeric: bool, unfinished: str) -> Found:
    return extract(text, mode, numeric, unfinished)


def grade(gold: Any, completion: Any, policy: GradePolicy = GradePolicy()) -> Grade:  # noqa: B008
    """Grades one completion.

    Args:
        gold: The gold answer in any usual form: bare LaTeX, `$...$`, `\\boxed{...}`, a whole solution, a GSM8K answer
            with `####`, a number, or a list of alternatives (one of them has to be met).
        completion: The completion: str, chat messages (the last assistant turn counts), content parts, or None.
        policy: What counts as the same answer.

    Returns:
        A `Grade`. Never raises on any gold or completion.
    """
    return grade_batch([gold], [completion], policy)[0]


def grade_batch(
    golds: Sequence[Any],
    completions: Sequence[Any],
    policy: GradePolicy = GradePolicy(),  # noqa: B008
    budget: float | None = DEFAULT_BUDGET,
) -> list[Grade]:
    """Grades many completions, in order. Equal pairs are compared once; what needs sympy runs on all workers.

    Args:
        golds: One gold for each completion, as in `grade`.
        completions: As in `grade`.
        policy: What counts as the same answer.
        budget: Seconds for all symbolic comparisons of the batch together; what is open then is "timeout". None: no
            limit but `policy.timeout` for each.

    Raises:
        ValueError: The two lists differ in length.
    """
    if len(golds) != len(completions):
        raise ValueError(f"{len(golds)} golds for {len(completions)} completions: there must be one for each")
    if policy.mode in OFFICIAL_MODE_NAMES:
        return [_official(gold, completion, policy.mode) for gold, completion in zip(golds, completions, strict=True)]
    grades: list[Grade | None] = [None] * len(golds)
    jobs: list[_Job] = []
    for i, (gold, completion) in enumerate(zip(golds, completions, strict=True)):
        result = _grade_fast(i, gold, completion, policy)
        if isinstance(result, _Job):
            jobs.append(result)
        else:
            grades[i] = result
    if jobs:
        _grade_symbolically(jobs, grades, policy, budget)
    return grades  # type: ignore[return-value]


def _official(gold: Any, completion: Any, mode: str) -> Grade:
    from .official import OFFICIAL_MODES

    if isinstance(gold, (list, tuple)):
        grades = [_official(one, completion, mode) for one in gold]
        return next((g for g in grades if g.correct), grades[0] if grades else _no_gold(NOTHING))
    if gold is None or (isinstance(gold, str) and not gold.strip()):
        return _no_gold(NOTHING)
    text = to_text(completion)
    correct, extracted, gold_read = OFFICIAL_MODES[mode](gold if isinstance(gold, str) else _gold_string(gold), text)
    reason = "correct" if correct else ("no answer" if extracted is None else "wrong")
    return Grade(bool(correct), extracted, gold_read, mode, reason)


def _gold_string(gold: Any) -> str:
    found = read_gold(gold)
    return found[0].text if found else ""


def _no_gold(found: Found) -> Grade:
    return Grade(False, found.text, None, found.method, "unparseable")


def _grade_fast(index: int, gold: Any, completion: Any, policy: GradePolicy) -> Grade | _Job:
    golds = _gold_set_of_text(gold) if isinstance(gold, str) else _gold_set(read_gold_answers(gold))
    readable = golds.readable
    text = completion if isinstance(completion, str) else to_text(completion)
    found = _extract_cached(text, policy.mode, golds.numeric, policy.unfinished_thinking)
    if not readable:
        return _no_gold(found)
    shown = golds.texts[0]
    if found.text is None:
        return Grade(False, None, shown, found.method, "no answer")
    if golds.plain is not None and policy.form == "any":
        plain = _plain_number(found.text)
        if plain is not None:
            same = plain == golds.plain
            return Grade(same, found.text, shown, found.method, "correct" if same else "wrong")
    key = (golds.texts, found.text, policy)
    outcome = _VERDICTS.get(key)
    if outcome is not None:
        return Grade(outcome[0], found.text, shown, found.method, outcome[1])
    try:
        answer = read_answer(found.text)
    except Refused:
        _remember(key, (False, "refused"))
        return Grade(False, found.text, shown, found.method, "refused")
    pending = []
    worst = (False, "wrong")
    for one in readable:
        outcome = _decide(one, answer, policy)
        if isinstance(outcome, _Pending):
            pending.append(outcome)
        elif outcome[0]:
            _remember(key, outcome)
            return Grade(True, found.text, one.found.text, found.method, "correct")
        elif outcome[1] != "wrong":
            worst = outcome
    if pending:
        return _Job(index, found, shown, key, tuple(pending), worst)
    _remember(key, worst)
    return Grade(False, found.text, shown, found.method, worst[1])


def _grade_symbolically(jobs: list[_Job], grades: list, policy: GradePolicy, budget: float | None) -> None:
    from .workers import ERROR, TIMEOUT, run_guarded_many

    tasks = list(dict.fromkeys(task for job in jobs for task in job.pending))
    start = time.monotonic()
    answers = run_guarded_many([(task.kind, _payload(task)) for task in tasks], policy.timeout, budget)
    results = dict(zip(tasks, answers, strict=True))
    over_budget = budget is not None and time.monotonic() - start >= budget
    for job in jobs:
        outcome = job.fallback
        for task in job.pending:
            result = results[task]
            if result == "equal":
                outcome = (True, "correct")
                break
            if result is TIMEOUT:
                outcome = (False, "timeout")
            elif outcome[1] == "wrong" and (result is ERROR or result == "answer unparseable"):
                outcome = (False, "unparseable")
        if outcome[1] != "timeout" and not over_budget:
            _remember(job.key, outcome)
        grades[job.index] = Grade(outcome[0], job.found.text, job.gold, job.found.method, outcome[1])
