"""Samples on disk, their verdicts, and the summary of a model's samples.

`samples.jsonl` is appended to while sampling, one line a sample, and rewritten in one move with the verdicts when all
samples are there. A line that a kill cut short is dropped on reading; nothing else is ever lost.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from trl_grpo_plus.evaluation import metrics
from trl_grpo_plus.evaluation.datasets import (
    GOLD_COLUMNS,
    ID_COLUMNS,
    QUESTION_COLUMNS,
    SUBJECT_COLUMNS,
    DatasetError,
    ProblemSet,
    _level,
    read_rows,
)

# The greedy completion that goes with k samples; samples count from 0.
GREEDY = -1

COMPLETION_COLUMNS = ("completion", "response", "output", "generated_text", "prediction", "solution")
VERDICT_COLUMNS = ("correct", "score", "is_correct", "acc")
ANSWER_COLUMNS = ("extracted", "pred", "predicted_answer")
SCORE_COLUMNS = ("rm_score", "orm_score", "reward_score")
SAMPLE_COLUMNS = ("sample", "sample_index", "sample_idx")

Record = dict[str, Any]


class SampleStore:
    """Append-only file of samples that survives a kill at any moment.

    Args:
        path: of `samples.jsonl`; a last line without its end is cut off, any other bad line is an error.
    """

    def __init__(self, path: Path):
        self.path = path
        self.records: dict[tuple[str, int], Record] = {}
        if path.exists():
            self._recover()
        self._file = None

    def _recover(self) -> None:
        raw = self.path.read_bytes()
        whole = raw.rfind(b"\n") + 1
        if whole < len(raw):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        for number, line in enumerate(raw[:whole].splitlines(), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                key = (str(record["problem_id"]), int(record["sample"]))
            except (ValueError, KeyError, TypeError) as error:
                raise DatasetError(f"{self.path}:{number} is not a sample: {error}") from error
            self.records[key] = record

    def has(self, problem_id: str, sample: int) -> bool:
        """Whether the sample is there and did not fail."""
        record = self.records.get((problem_id, sample))
        return record is not None and record.get("finish_reason") != "error"

    def append(self, record: Record) -> None:
        """Writes one sample through to the operating system, so that only a power cut can lose it."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()
        self.records[(record["problem_id"], record["sample"])] = record

    def rewrite(self, records: Sequence[Record]) -> None:
        """Replaces the whole file in one move."""
        self.close()
        write_atomically(self.path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        self.records = {(r["problem_id"], r["sample"]): r for r in records}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def write_atomically(path: Path, text: str) -> None:
    """Writes a file such that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_samples_file(path: Path, problems: ProblemSet | None = None) -> dict[str, list[Record]]:
    """Reads samples of this package or of another tool, in rows of the usual columns.

    Args:
        path: .jsonl, .json, .csv or .parquet with a completion a row, its problem's id or question, and its gold
            answer unless `problems` has it.
        problems: gold answers, joined by id, or by question where the ids do not match.

    Returns:
        model name -> records; rows without a model column belong to the file's name. `file_correct` and
        `file_extracted` hold the verdict and answer that the file came with.

    Raises:
        DatasetError: a column is missing, or two rows are the same sample of the same problem.
    """
    by_id = {p.id: p for p in problems.problems} if problems else {}
    by_question = {p.question.strip(): p for p in problems.problems} if problems else {}
    models: dict[str, dict[tuple[str, int], Record]] = defaultdict(dict)
    counts: Counter = Counter()
    rows = read_rows(path)
    for i, row in enumerate(rows):
        completion = _first(row, COMPLETION_COLUMNS)
        if completion is None:
            raise DatasetError(
                f"{path} row {i} has no completion: none of the columns {', '.join(COMPLETION_COLUMNS)} among "
                f"{', '.join(map(str, row))}"
            )
        question = _first(row, QUESTION_COLUMNS)
        identity = _first(row, ("problem_id", *ID_COLUMNS))
        problem_id = str(identity if identity is not None else question)
        if identity is None and question is None:
            raise DatasetError(f"{path} row {i} has neither an id nor a question to tell its problem by")
        problem = None
        if problems is not None:
            problem = by_question.get(str(question).strip()) if question is not None else by_id.get(problem_id)
            if problem is None:
                raise DatasetError(f"{path} row {i}: problem {problem_id!r} is not in data set {problems.name}")
            problem_id = problem.id
        gold_columns = [c for c in ("gold", "answer", "gold_solution", *GOLD_COLUMNS) if row.get(c) is not completion]
        gold = problem.gold if problem else _first(row, gold_columns)
        if gold is None:
            raise DatasetError(
                f"{path} row {i} has no gold answer: none of the columns {', '.join(dict.fromkeys(gold_columns))} "
                f"among {', '.join(map(str, row))}; name the data set with --dataset"
            )
        model = str(row.get("model") or path.stem)
        sample = _first(row, SAMPLE_COLUMNS)
        if sample is None:
            sample = counts[model, problem_id]
        counts[model, problem_id] += 1
        key = (problem_id, int(sample))
        if key in models[model]:
            raise DatasetError(f"{path} row {i}: sample {sample} of problem {problem_id!r} of {model} appears twice")
        subject = problem.subject if problem else _first(row, SUBJECT_COLUMNS)
        level = problem.level if problem else row.get("level")
        models[model][key] = {
            "model": model,
            "problem_id": problem_id,
            "sample": int(sample),
            "greedy": bool(row.get("greedy", False)),
            "question": str(question or (problem.question if problem else "")),
            "gold": str(gold),
            "level": None if level is None else _level(level),
            "subject": None if subject is None else str(subject),
            "completion": str(completion),
            "num_tokens": row.get("num_tokens"),
            "finish_reason": row.get("finish_reason") or "stop",
            "error": row.get("error"),
            "rm_score": _number(_first(row, SCORE_COLUMNS)),
            "steps": row.get("steps"),
            "step_scores": row.get("step_scores"),
            "file_correct": _verdict(_first(row, VERDICT_COLUMNS)),
            "file_extracted": _first(row, ANSWER_COLUMNS),
        }
    return {model: list(records.values()) for model, records in models.items()}


def _first(row: dict, columns: Iterable[str]):
    return next((row[c] for c in columns if row.get(c) is not None), None)


def _number(value) -> float | None:
    return None if value is None else float(value)


def _verdict(value) -> bool | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.strip().lower() in ("true", "1", "1.0", "yes")
    return bool(value)


def grade_records(
    records: Sequence[Record], policy: Any, progress: Callable[[int], None] | None = None, chunk: int = 256
) -> None:
    """Adds `correct`, `extracted`, `gold_read`, `method` and `reason` to each record, in place.

    A sample that failed on a server is not graded: its verdict is None and `reason` is "error".
    """
    from reward_fns import grade_batch

    graded = [r for r in records if r["finish_reason"] != "error"]
    for record in records:
        if record["finish_reason"] == "error":
            record.update(correct=None, extracted=None, gold_read=None, method=None, reason="error")
    for start in range(0, len(graded), chunk):
        part = graded[start : start + chunk]
        grades = grade_batch([r["gold"] for r in part], [r["completion"] for r in part], policy, budget=None)
        for record, g in zip(part, grades, strict=True):
            record.update(
                correct=bool(g.correct), extracted=g.extracted, gold_read=g.gold, method=g.method, reason=g.reason
            )
        if progress is not None:
            progress(len(part))


def keep_file_verdicts(records: Sequence[Record]) -> None:
    """Takes verdicts and answers from the samples file instead of grading.

    Raises:
        DatasetError: a row came without a verdict.
    """
    for record in records:
        if record.get("file_correct") is None:
            raise DatasetError(
                f"problem {record['problem_id']!r} sample {record['sample']} has no verdict in the file "
                f"(columns {', '.join(VERDICT_COLUMNS)})"
            )
        correct = record["file_correct"]
        record.update(
            correct=correct,
            extracted=record["file_extracted"],
            gold_read=record["gold"],
            method="samples file",
            reason="correct" if correct else ("no answer" if record["file_extracted"] in (None, "") else "wrong"),
        )


def answers_equal() -> Callable[[str, str], bool]:
    """Equivalence of two extracted answers by the grader's default policy; each pair is compared once."""
    from reward_fns import GradePolicy, grade_batch

    policy = GradePolicy(mode="math")
    known: dict[tuple[str, str], bool] = {}

    def equal(a: str, b: str) -> bool:
        if (a, b) not in known:
            known[a, b] = grade_batch([f"\\boxed{{{a}}}"], [f"\\boxed{{{b}}}"], policy, budget=None)[0].correct
        return known[a, b]

    return equal


def default_ks(n: int) -> list[int]:
    """1, 2, 4, ... and n."""
    ks = [2**i for i in range(n.bit_length()) if 2**i <= n]
    return ks if ks[-1] == n else [*ks, n]


def summarize(
    records: Sequence[Record],
    *,
    ks: Sequence[int] | None = None,
    equal: Callable[[str, str], bool] | None = None,
    score_transform: str = "auto",
    step_aggregation: str = "min",
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Any]:
    """Metrics of one model's graded samples.

    Args:
        records: graded; those that failed on a server are left out and counted.
        ks: sizes of votes and pass@k; by default the powers of two up to the fewest samples of a problem, and that
            number.
        equal: equivalence of two answers for the clusters of maj@k; by default the grader's.
        score_transform: of reward-model scores into vote weights: "none", "sigmoid", "exp", or "auto": as they are
            where all of them are in [0, 1], through the sigmoid otherwise.
        step_aggregation: min, last, mean or product of the step scores.
        confidence: of the intervals.
        seed: of bootstrap and of subsets that are too many to enumerate.

    Returns:
        dict with "problems", "samples" (the k that all problems have), "metrics" (name -> value, low, high, method),
        "by_level", "by_subject", "rates", "per_problem" (what paired tests need), "reasons" and "failed".
    """
    equal = equal or answers_equal()
    failed = sum(r["finish_reason"] == "error" for r in records)
    usable = [r for r in records if r["finish_reason"] != "error"]
    greedy = {r["problem_id"]: r for r in usable if r["sample"] == GREEDY}
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in sorted((r for r in usable if r["sample"] != GREEDY), key=lambda r: r["sample"]):
        groups[record["problem_id"]].append(record)
    if not groups and not greedy:
        raise DatasetError("there is no sample to summarize: all of them failed" if failed else "there is no sample")

    per_problem: dict[str, dict[str, float]] = defaultdict(dict)
    for problem_id, record in greedy.items():
        per_problem[problem_id]["greedy"] = float(record["correct"])
    n = min(map(len, groups.values()), default=0)
    ks = list(ks or default_ks(n)) if n else []
    if any(k < 1 or k > n for k in ks):
        raise DatasetError(f"every k must be between 1 and {n}, the fewest samples of a problem; got {list(ks)}")
    single_greedy = n == 1 and all(r["greedy"] for g in groups.values() for r in g)
    sources = _score_sources(groups.values(), step_aggregation, score_transform)
    for problem_id, group in groups.items():
        correct = [float(r["correct"]) for r in group]
        values = per_problem[problem_id]
        if single_greedy:
            values["greedy"] = correct[0]
        else:
            values[f"mean@{n}"] = float(np.mean(correct))
        for k in ks if not single_greedy else ():
            values[f"pass@{k}"] = metrics.pass_at_k(len(group), int(sum(correct)), k)
        if n > 1:
            answers = [r["extracted"] for r in group]
            clusters = metrics.cluster_answers(answers, equal, [bool(c) for c in correct])
            for record, label in zip(group, clusters, strict=True):
                record["cluster"] = label
            for k in ks[1:] if ks[0] == 1 else ks:
                values[f"maj@{k}"] = metrics.majority_at_k(clusters, correct, k)
                values[f"maj@{k}_string"] = metrics.string_vote(answers, correct, k)
            for name, source in sources.items():
                scores = [source["scores"].get((problem_id, r["sample"])) for r in group]
                if any(score is None for score in scores):
                    continue
                for k in ks[1:] if ks[0] == 1 else ks:
                    values[f"best@{k}_{name}"] = metrics.best_of_k(correct, scores, k)
                    values[f"vote@{k}_{name}"] = metrics.weighted_vote_at_k(
                        clusters, correct, scores, k, source["transform"], seed
                    )
    table: dict[str, Any] = {}
    partial: dict[int, list[str]] = {}
    for name in dict.fromkeys(key for values in per_problem.values() for key in values):
        column = [values[name] for values in per_problem.values() if name in values]
        if len(column) < len(per_problem):
            partial.setdefault(len(column), []).append(name)
        bounds = metrics.interval(column, confidence, seed)
        table[name] = {
            "value": float(np.mean(column)),
            "low": bounds.low,
            "high": bounds.high,
            "method": bounds.method,
            "problems": len(column),
        }
    notes = [
        f"{', '.join(names)}: {count} of {len(per_problem)} problems, the others lack scores or samples"
        for count, names in partial.items()
    ]
    first = {r["problem_id"]: r for r in usable}
    main = main_metric(table)
    summary = {
        "problems": len(per_problem),
        "samples": n,
        "main_metric": main,
        "metrics": table,
        "by_level": _by(first, per_problem, "level", main, ks, confidence, seed),
        "by_subject": _by(first, per_problem, "subject", main, ks, confidence, seed),
        "rates": _rates(usable),
        "reasons": dict(Counter(r["reason"] for r in records)),
        "failed": failed,
        "notes": notes,
        "vote_weights": {name: source["transform"] for name, source in sources.items()},
        "confidence": confidence,
        "per_problem": {k: dict(v) for k, v in per_problem.items()},
    }
    agreement = [(r["correct"], r["file_correct"]) for r in usable if r.get("file_correct") is not None]
    if agreement:
        summary["file_verdicts"] = {
            "agree": sum(a == b for a, b in agreement),
            "of": len(agreement),
            "accuracy": float(np.mean([b for _, b in agreement])),
        }
    return summary


def main_metric(table: dict[str, Any]) -> str:
    """What two models are compared by: mean@k where there are samples, otherwise greedy pass@1."""
    for name in table:
        if name.startswith("mean@"):
            return name
    return "greedy"


def _score_sources(groups: Iterable[Sequence[Record]], aggregation: str, transform: str) -> dict[str, dict]:
    """Scores of every sample by each reward model: name -> {"scores": {(problem, sample): score}, "transform"}."""
    found: dict[str, dict[tuple[str, int], float]] = {"orm": {}, f"prm_{aggregation}": {}}
    for group in groups:
        for r in group:
            key = (r["problem_id"], r["sample"])
            if r.get("rm_score") is not None:
                found["orm"][key] = r["rm_score"]
            if r.get("step_scores"):
                score = metrics.aggregate_step_scores(r["step_scores"], aggregation)
                if score is not None:
                    found[f"prm_{aggregation}"][key] = score
    sources = {}
    for name, scores in found.items():
        if scores:
            inside = all(0 <= s <= 1 for s in scores.values())
            chosen = ("none" if inside else "sigmoid") if transform == "auto" else transform
            sources[name] = {"scores": scores, "transform": chosen}
    return sources


def _by(first, per_problem, field: str, main: str, ks, confidence, seed) -> dict[str, Any]:
    groups: dict[str, list[str]] = defaultdict(list)
    for problem_id in per_problem:
        if first[problem_id].get(field) is not None:
            groups[first[problem_id][field]].append(problem_id)
    columns = [main, *[f"maj@{k}" for k in ks if k > 1][-1:]]
    out: dict[str, Any] = {}
    for name in sorted(groups):
        out[name] = {"problems": len(groups[name])}
        for column in columns:
            values = [per_problem[p][column] for p in groups[name] if column in per_problem[p]]
            if values:
                bounds = metrics.interval(values, confidence, seed)
                out[name][column] = {"value": float(np.mean(values)), "low": bounds.low, "high": bounds.high}
    return out


def _rates(records: Sequence[Record]) -> dict[str, float | None]:
    """Shares of all samples, and completion lengths in tokens."""
    lengths = [r["num_tokens"] for r in records if r.get("num_tokens") is not None]

    def share(hit: Callable[[Record], bool]) -> float:
        return float(np.mean([hit(r) for r in records]))

    return {
        "truncated": share(lambda r: r["finish_reason"] == "length"),
        "prompt_too_long": share(lambda r: r["finish_reason"] == "prompt_too_long"),
        "no_answer": share(lambda r: r["reason"] == "no answer"),
        "unparseable": share(lambda r: r["reason"] in ("no answer", "unparseable")),
        "timeout": share(lambda r: r["reason"] in ("timeout", "refused")),
        "mean_tokens": float(np.mean(lengths)) if lengths else None,
        "median_tokens": float(np.median(lengths)) if lengths else None,
        "p95_tokens": float(np.percentile(lengths, 95)) if lengths else None,
    }


def environment() -> dict[str, str]:
    """Versions that a verdict or a sample can depend on."""
    names = [
        "trl-grpo-plus",
        "torch",
        "transformers",
        "trl",
        "peft",
        "vllm",
        "math-verify",
        "sympy",
        "numpy",
        "datasets",
    ]
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["python"] = sys.version.split()[0]
    return found


def write_results(path: Path, settings: dict[str, Any], summaries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Writes `results.json`: settings, versions, time, and each model's summary."""
    results = {
        "settings": settings,
        "versions": environment(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "models": summaries,
    }
    write_atomically(path, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return results


def settings_difference(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Names of the settings in which two runs differ, with both values."""
    return [
        f"{key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def params_dict(params: Any) -> dict[str, Any]:
    out = asdict(params)
    out["stop"] = list(out["stop"])
    return out
