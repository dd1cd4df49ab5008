"""What the official modes share: reading a gold column, and running long or symbolic work in a worker."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ..workers import ERROR, TIMEOUT, run_guarded

# (correct, extracted answer or None, gold answer or None)
Verdict = tuple[bool, str | None, str | None]

# Processor seconds for one comparison in sympy. The official limits are 3 to 15 seconds by the clock; a quarter of
# this changed no verdict on 6,000 pairs (docs/official_grading.md), and what needs more is a power tower or its like.
CPU_SECONDS = 1.0
# A worker that waits for a busy processor may take this many times longer by the clock.
WALL_FACTOR = 1.8
# What a worker may need before that, to import the LaTeX parser on a busy machine.
IMPORT_SECONDS = 20.0

# Some official patterns need quadratic time. Up to this length that is milliseconds; longer answers go to a worker.
INLINE_CHARS = 1000


class Unreadable(Exception):
    """An official function raised, ran out of memory or out of time, where the official program stops or scores 0."""


def guarded(kind: str, payload: tuple, timeout: float) -> Any:
    """Runs a registered worker function; raises `Unreadable` when it has no result.

    The verdict must not depend on what else the machine does, so `timeout` is processor time: the worker function
    gets it as its last argument and keeps to it with `limited`.
    """
    result = run_guarded(kind, (*payload, timeout), IMPORT_SECONDS + WALL_FACTOR * timeout)
    if result is TIMEOUT or result is ERROR:
        raise Unreadable(f"{kind}: {result!r}")
    return result


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """In a worker: ends the process when the block takes this much processor time, or WALL_FACTOR times by the clock.

    By signals with their default action, which also end a computation that never comes back to Python.
    """
    if not hasattr(signal, "setitimer"):
        yield
        return
    limits = (
        (signal.ITIMER_PROF, signal.SIGPROF, seconds),
        (signal.ITIMER_REAL, signal.SIGALRM, WALL_FACTOR * seconds),
    )
    for timer, number, limit in limits:
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer, _, _ in limits:
            signal.setitimer(timer, 0)


@lru_cache(maxsize=8192)
def guarded_cached(kind: str, payload: tuple, timeout: float) -> Any:
    """`guarded` with a memory of results. A time-out raises and so is never remembered: it may have been the load."""
    return guarded(kind, payload, timeout)


def apply_to_text(function: Callable[..., Any], kind: str, text: str, timeout: float) -> Any:
    """`function(text)`: here when the text is short, in a worker when the function could be slow on it."""
    if len(text) <= INLINE_CHARS:
        return function(text)
    return guarded(kind, (text,), timeout)


def is_solution(gold: str) -> bool:
    """Whether a gold column holds a worked solution with a boxed answer, rather than the answer alone."""
    return "\\boxed" in gold or "\\fbox" in gold


def gsm8k_answer(gold: str) -> str | None:
    """The text after the last `####`, or None when this is no GSM8K gold."""
    _, marker, answer = gold.rpartition("####")
    return answer.strip() if marker else None


def cut_at(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop string, as the official programs cut a generation."""
    for stop in stops:
        text = text.split(stop, 1)[0]
    return text


def last_box(text: str) -> str | None:
    r"""From the last `\boxed` (else `\fbox`) to the brace that closes it; None when there is none or it stays open."""
    start = text.rfind("\\boxed")
    if start < 0:
        start = text.rfind("\\fbox")
    if start < 0:
        return None
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start : position + 1]
    return None


def brace_shorthand(text: str, tolerate_bare: bool) -> str:
    r"""Puts the braces into `\frac12`, `\frac1{72}` and the like; not into `\frac{72}1`.

    The one function that the Hendrycks, DeepSeek and Qwen graders have in common. A numerator or denominator without
    braces is one character, whatever that character is. A `\frac` at the end of the text makes the Hendrycks form
    raise IndexError (`tolerate_bare=False`), and one character after it leaves the whole text alone.
    """
    head, *tails = text.split("\\frac")
    pieces = [head]
    for tail in tails:
        if not tail and not tolerate_bare:
            raise IndexError("\\frac at the end")
        if tail.startswith("{"):
            pieces.append(tail)
            continue
        if len(tail) < 2:
            return text
        numerator, denominator, rest = tail[0], tail[1], tail[2:]
        if denominator == "{":
            pieces.append("{" + numerator + "}{" + rest)
        else:
            pieces.append("{" + numerator + "}{" + denominator + "}" + rest)
    return "\\frac".join(pieces)


def slash_to_frac(text: str, keep_sqrt: bool) -> str:
    r"""`a/b` with two plain integers becomes `\frac{a}{b}`; with `keep_sqrt` a side that contains "sqrt" may stay."""
    parts = text.split("/")
    if len(parts) != 2:
        return text
    shown = []
    for part in parts:
        if keep_sqrt and "sqrt" in part:
            shown.append(part)
            continue
        try:
            shown.append(str(int(part)))
        except ValueError:
            return text
    if f"{shown[0]}/{shown[1]}" != text:
        return text
    return "\\frac{" + shown[0] + "}{" + shown[1] + "}"
