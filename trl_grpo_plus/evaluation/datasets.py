"""Problems to evaluate on: GSM8K, MATH and MATH-500 by name, any hub data set or local file with the usual columns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

QUESTION_COLUMNS = ("question", "problem", "prompt", "input")
GOLD_COLUMNS = ("answer", "gold", "solution", "target", "ground_truth", "gold_solution")
SUBJECT_COLUMNS = ("subject", "type", "category")
ID_COLUMNS = ("id", "unique_id", "problem_id", "uuid")


class DatasetError(ValueError):
    """The data set cannot be evaluated as given; the message names the file, row and column."""


@dataclass(frozen=True)
class Source:
    """Where a named data set lives on the hub."""

    path: str
    name: str | None
    split: str
    kind: str


NAMED = {
    "gsm8k": Source("openai/gsm8k", "main", "test", "gsm8k"),
    "math": Source("DigitalLearningGmbH/MATH-lighteval", None, "test", "math"),
    "math500": Source("HuggingFaceH4/MATH-500", None, "test", "math"),
}


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        id: unique within the data set; samples and paired tests are joined on it.
        question: text put to the model.
        gold: gold answer as the data set gives it (a GSM8K answer with its `#### N`, a MATH answer or boxed solution).
        level, subject: of MATH, where given.
    """

    id: str
    question: str
    gold: str
    level: str | None = None
    subject: str | None = None


@dataclass(frozen=True)
class ProblemSet:
    """Problems and what names them in a result: `name`, `kind` ("gsm8k" or "math"), SHA-256 of the rows."""

    name: str
    kind: str
    problems: tuple[Problem, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.problems)

    def head(self, limit: int | None) -> ProblemSet:
        """The first `limit` problems."""
        if limit is None or limit >= len(self.problems):
            return self
        if limit < 1:
            raise DatasetError(f"limit must be at least 1, got {limit}")
        return problem_set(self.name, self.problems[:limit], self.kind)


def load_problems(
    dataset: str,
    *,
    split: str | None = None,
    config: str | None = None,
    limit: int | None = None,
    question_column: str | None = None,
    gold_column: str | None = None,
    kind: str | None = None,
) -> ProblemSet:
    """Loads problems.

    Args:
        dataset: "gsm8k", "math", "math500", a file (.jsonl, .json, .csv, .parquet), a `save_to_disk` directory, or a
            hub id.
        split, config: of a hub data set; the named ones have theirs.
        limit: take the first so many problems.
        question_column, gold_column: where they are not among `QUESTION_COLUMNS` and `GOLD_COLUMNS`.
        kind: "gsm8k" or "math", where it cannot be told from the gold answers (`#### N` means GSM8K).

    Raises:
        DatasetError: not found, empty, or without the columns; the message lists the columns that there are.
    """
    if dataset in NAMED:
        source = NAMED[dataset]
        rows = _from_hub(source.path, config or source.name, split or source.split)
        kind = kind or source.kind
    elif Path(dataset).exists():
        rows = read_rows(Path(dataset), split)
    elif Path(dataset).suffix in (".jsonl", ".json", ".csv", ".parquet"):
        raise DatasetError(f"data set file {dataset} does not exist")
    else:
        rows = _from_hub(dataset, config, split or "test")
    name = Path(dataset).name if Path(dataset).exists() else dataset
    return from_rows(
        rows,
        name=name,
        limit=limit,
        question_column=question_column,
        gold_column=gold_column,
        kind=kind,
        where=dataset,
    )


def from_rows(
    rows: Iterable[Mapping],
    *,
    name: str,
    limit: int | None = None,
    question_column: str | None = None,
    gold_column: str | None = None,
    kind: str | None = None,
    where: str | None = None,
) -> ProblemSet:
    """Problems of rows with the usual columns (a list of dicts or a `datasets.Dataset`); see `load_problems`."""
    where = where or name
    problems: list[Problem] = []
    if limit is not None and limit < 1:
        raise DatasetError(f"limit must be at least 1, got {limit}")
    for i, row in enumerate(rows):
        if limit is not None and len(problems) >= limit:
            break
        question = _pick(row, question_column, QUESTION_COLUMNS, "question", where, i)
        gold = _pick(row, gold_column, GOLD_COLUMNS, "gold answer", where, i)
        identity = next((row[c] for c in ID_COLUMNS if row.get(c) is not None), i)
        level = row.get("level")
        subject = next((row[c] for c in SUBJECT_COLUMNS if row.get(c) is not None), None)
        problems.append(
            Problem(
                id=str(identity),
                question=question,
                gold=gold,
                level=None if level is None else _level(level),
                subject=None if subject is None else str(subject),
            )
        )
    if not problems:
        raise DatasetError(f"{where} has no rows")
    return problem_set(name, problems, kind)


def problem_set(name: str, problems: Iterable[Problem], kind: str | None = None) -> ProblemSet:
    """A `ProblemSet` of problems at hand; ids must be unique."""
    problems = tuple(problems)
    seen: dict[str, int] = {}
    for i, problem in enumerate(problems):
        if problem.id in seen:
            raise DatasetError(f"{name}: rows {seen[problem.id]} and {i} have the same id {problem.id!r}")
        seen[problem.id] = i
    if kind is None:
        kind = "gsm8k" if all("####" in p.gold for p in problems) else "math"
    if kind not in ("gsm8k", "math"):
        raise DatasetError(f"kind must be 'gsm8k' or 'math', got {kind!r}")
    digest = hashlib.sha256(json.dumps([[p.id, p.question, p.gold] for p in problems]).encode()).hexdigest()
    return ProblemSet(name, kind, problems, digest)


def read_rows(path: Path, split: str | None = None) -> list[dict]:
    """Rows of a local .jsonl, .json, .csv or .parquet file, or of a `save_to_disk` directory.

    Raises:
        DatasetError: an empty file, a line that is not a JSON object (it is named), or an unknown kind of file.
    """
    if path.is_dir():
        from datasets import DatasetDict, load_from_disk

        try:
            data = load_from_disk(str(path))
        except FileNotFoundError as error:
            raise DatasetError(f"{path} is a directory, but not of a data set saved with save_to_disk") from error
        if isinstance(data, DatasetDict):
            if (split or "test") not in data:
                raise DatasetError(f"{path} has no split {split or 'test'!r}, but {', '.join(data)}")
            data = data[split or "test"]
        return list(data)
    if path.suffix == ".jsonl":
        rows = []
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DatasetError(f"{path}:{number} is not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise DatasetError(f"{path}:{number} is not a JSON object")
                rows.append(row)
    elif path.suffix == ".json":
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise DatasetError(f"{path} is not JSON: {error}") from error
        if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
            raise DatasetError(f"{path} is not a JSON list of objects")
    elif path.suffix in (".csv", ".parquet"):
        import pandas as pd

        if path.stat().st_size == 0:
            raise DatasetError(f"{path} is empty")
        frame = pd.read_csv(path, dtype=str, keep_default_na=False) if path.suffix == ".csv" else pd.read_parquet(path)
        rows = frame.to_dict("records")
    else:
        raise DatasetError(f"{path}: kind of file {path.suffix!r} is not .jsonl, .json, .csv or .parquet")
    if not rows:
        raise DatasetError(f"{path} is empty")
    return rows


def _from_hub(path: str, name: str | None, split: str) -> Iterable[Mapping]:
    from datasets import load_dataset

    try:
        return load_dataset(path, name, split=split)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DatasetError(
            f"cannot load data set {path!r} (config {name!r}, split {split!r}): {reason}. "
            "Check the id, or give a local file with --dataset FILE"
        ) from error


def _pick(row: Mapping, chosen: str | None, usual: tuple[str, ...], what: str, where: str, index: int) -> str:
    if chosen is not None and chosen not in row:
        raise DatasetError(f"{where} has no column {chosen!r}, but {', '.join(map(str, row))}")
    column = chosen or next((c for c in usual if row.get(c) is not None), None)
    if column is None:
        raise DatasetError(
            f"{where} row {index} has no {what}: none of the columns {', '.join(usual)} among "
            f"{', '.join(map(str, row)) or 'no columns'}"
        )
    value = row[column]
    if isinstance(value, list) and value and isinstance(value[-1], Mapping) and "content" in value[-1]:
        value = value[-1]["content"]
    if value is None or not str(value).strip():
        raise DatasetError(f"{where} row {index}: column {column!r} is empty")
    return str(value)


def _level(level) -> str:
    """MATH says "Level 3" in one release and 3 in the other."""
    text = str(level).strip()
    return f"Level {text}" if text.isdigit() else text
