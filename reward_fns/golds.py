"""Checks a data set's golds before a run is paid for: how each is read, which are unreadable, which are ambiguous."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .answers import Answer
from .exact import Refused
from .grading import GUESSED_METHODS, first_readable, grade_batch, read_gold_answers, screen
from .policy import GradePolicy
from .rewards import GOLD_COLUMNS

__all__ = ["GoldReport", "GoldRow", "validate_golds"]

SHOWN_ROWS = 20


@dataclass(frozen=True, slots=True)
class GoldRow:
    """How one gold is read.

    Attributes:
        index: Row of the data set.
        column: The column that it was taken from.
        raw: The column's value, shortened.
        read: The gold answer that was found in it, or None.
        method: How it was found: "bare", "boxed", "####", "final answer", "number", ...
        kind: What it is: "number", "list", "set", "tuple", "union", "matrix", "relation", "word", "choice", ...
        status: "ok"; "unreadable" (empty, or too large: the reward is None for it); "ambiguous" (more than one
            reading, see `note`); "symbolic" (outside of the exact arithmetic: each comparison needs sympy).
        note: Why.
    """

    index: int
    column: str
    raw: str
    read: str | None
    method: str
    kind: str
    status: str
    note: str = ""


@dataclass(slots=True)
class GoldReport:
    """All rows, with counts. `str(report)` is a table of what needs a look."""

    rows: list[GoldRow]
    columns: tuple[str, ...]
    counts: Counter = field(init=False)

    def __post_init__(self):
        self.counts = Counter(row.status for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ok(self) -> bool:
        """Whether every gold can be read."""
        return not self.counts["unreadable"]

    def with_status(self, *statuses: str) -> list[GoldRow]:
        return [row for row in self.rows if row.status in statuses]

    def kinds(self) -> Counter:
        return Counter(row.kind for row in self.rows)

    def methods(self) -> Counter:
        return Counter(row.method for row in self.rows)

    def summary(self) -> str:
        total = len(self.rows)
        parts = [f"{total} golds from column {' / '.join(self.columns)}"]
        parts += [f"{self.counts[status]} {status}" for status in ("ok", "symbolic", "ambiguous", "unreadable")]
        return ", ".join(parts)

    def __str__(self) -> str:
        lines = [self.summary()]
        lines.append("kinds: " + ", ".join(f"{kind} {count}" for kind, count in self.kinds().most_common()))
        lines.append("found as: " + ", ".join(f"{method} {count}" for method, count in self.methods().most_common()))
        for row in self.with_status("unreadable", "ambiguous")[:SHOWN_ROWS]:
            lines.append(f"  row {row.index}: {row.status}: {row.raw!r} read as {row.read!r} ({row.note})")
        return "\n".join(lines)


def validate_golds(
    dataset: Any, column: str | None = None, policy: GradePolicy | None = None, limit: int | None = None
) -> GoldReport:
    """Reads every gold of a data set as the rewards would, and grades each against itself in a box.

    Args:
        dataset: A `datasets.Dataset`, a list of dicts, or a list of golds.
        column: The gold's column. None: the first of `solution`, `answer`, `gold`, `final_answer`, `ground_truth` that
            holds a readable gold, row by row, as in `MathReward`.
        policy: As in the reward.
        limit: Read only so many rows.

    Raises:
        ValueError: The data set has none of the columns.
    """
    policy = policy or GradePolicy(mode="math")
    values, columns = _values(dataset, column, limit)
    rows, boxed = [], []
    for index, (name, value) in enumerate(values):
        row = _row(index, name, value)
        rows.append(row)
        if row.status != "unreadable":
            boxed.append((index, value, f"\\boxed{{{row.read}}}"))
    grades = grade_batch([value for _, value, _ in boxed], [text for _, _, text in boxed], policy, budget=None)
    for (index, _, _), grade in zip(boxed, grades, strict=True):
        if not grade.correct:
            row = rows[index]
            rows[index] = GoldRow(
                row.index, row.column, row.raw, row.read, row.method, row.kind, "ambiguous",
                f"does not equal itself in a box: {grade.reason}",
            )  # fmt: skip
    return GoldReport(rows, columns)


def _values(dataset: Any, column: str | None, limit: int | None) -> tuple[list[tuple[str, Any]], tuple[str, ...]]:
    names = getattr(dataset, "column_names", None)
    if isinstance(names, dict):
        raise ValueError(f"validate_golds needs one split, and the data set has {sorted(names)}: pass dataset[split]")
    rows: Iterable = dataset if limit is None else _head(dataset, limit)
    rows = list(rows)
    if rows and not isinstance(rows[0], dict):
        return [("gold", value) for value in rows], ("gold",)
    if names is None:
        names = sorted({name for row in rows for name in row})
    wanted: Sequence[str] = (column,) if column else GOLD_COLUMNS
    present = tuple(name for name in wanted if name in names)
    if rows and not present:
        raise ValueError(f"the data set has no gold column {list(wanted)}; its columns are {sorted(names)}")
    return [_first(row, present) for row in rows], present


def _head(dataset: Any, limit: int) -> list:
    out = []
    for row in dataset:
        if len(out) == limit:
            break
        out.append(row)
    return out


def _first(row: dict, names: Sequence[str]) -> tuple[str, Any]:
    name = names[first_readable([row.get(name) for name in names])]
    return name, row.get(name)


def _row(index: int, column: str, value: Any) -> GoldRow:
    raw = " ".join(str(value).split())
    raw = raw if len(raw) <= 60 else raw[:12] + " … " + raw[-45:]
    golds = read_gold_answers(value)
    readable = [gold for gold in golds if gold.answer is not None]
    if not readable:
        note = "too long or too large" if golds else "empty"
        return GoldRow(
            index, column, raw, None, golds[0].found.method if golds else "none", "none", "unreadable", note
        )
    found, answer = readable[0]
    status, note = _status(found.text, answer)
    if found.method in GUESSED_METHODS:
        status, note = "ambiguous", "a text in which no answer is marked"
    if len(readable) > 1 and status == "ok":
        note = f"{len(readable)} alternatives"
    return GoldRow(index, column, raw, found.text, found.method, answer.kind, status, note)


def _status(text: str, answer: Answer) -> tuple[str, str]:
    if answer.kind == "false":
        return "ambiguous", "contradicts itself"
    # `2,125` is a number by convention; only `2,12` leaves a doubt.
    grouped = answer.kind == "number" and answer.decimals is not None
    readings = [a for a in answer.alternatives if a.kind != answer.kind or a.key != answer.key]
    readings = [a for a in readings if not (grouped and a.kind == "list")]
    if readings and answer.kind not in ("choice", "word", "set", "union", "time"):
        other = readings[0]
        return "ambiguous", f"{answer.kind}, or {other.kind} {other.text}{' ' + other.unit if other.unit else ''}"
    try:
        unread = [item for item in _leaves(answer) if item.kind == "number" and item.form is None]
    except Refused:
        return "symbolic", "a number too large to be computed: equal only when written alike"
    unread = [item for item in unread if not re.fullmatch(r"[+-]?\s*\\infty", item.text)]
    if answer.undefined if answer.kind == "number" else False:
        return "ambiguous", "division by zero"
    if unread:
        if re.search(r"[A-Za-z]{5,}", re.sub(r"\\[a-zA-Z]+", "", text)):
            return "ambiguous", "words and mathematics: equal only when written alike"
        if screen(answer.source):
            return "symbolic", f"equal only when written alike: {screen(answer.source)}"
        return "symbolic", "compared by sympy"
    return "ok", ""


def _leaves(answer: Answer) -> list[Answer]:
    if answer.kind == "matrix":
        return [leaf for row in answer.items for cell in row for leaf in _leaves(cell)]
    if answer.items:
        return [leaf for item in answer.items for leaf in _leaves(item)]
    return [answer]
