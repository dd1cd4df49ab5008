"""One model's evaluation from prompts to summary, resumable at every sample."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from trl_grpo_plus.evaluation.backends import Backend, SampleRequest
from trl_grpo_plus.evaluation.datasets import DatasetError, ProblemSet
from trl_grpo_plus.evaluation.prompts import PromptTemplate
from trl_grpo_plus.evaluation.results import (
    GREEDY,
    Record,
    SampleStore,
    grade_records,
    params_dict,
    settings_difference,
    summarize,
    write_atomically,
)
from trl_grpo_plus.evaluation.sampling import SamplingParams

Progress = Callable[[str, int, int], None]


class SettingsMismatch(ValueError):
    """The output directory holds samples that were drawn with other settings."""


@dataclass(frozen=True)
class Plan:
    """What to draw: `num_samples` with `params` for each problem, and a greedy one beside them when `greedy`.

    With temperature 0 the one sample is the greedy one.
    """

    params: SamplingParams
    num_samples: int = 1
    greedy: bool = True

    def __post_init__(self):
        if self.num_samples < 1:
            raise ValueError(f"the number of samples must be at least 1, got {self.num_samples}")
        if self.num_samples > 1 and self.params.temperature == 0:
            raise ValueError(
                f"temperature 0 draws the same completion {self.num_samples} times; "
                "give a temperature above 0 for more than one sample"
            )

    def passes(self) -> list[tuple[list[int], SamplingParams]]:
        """(sample numbers, parameters) of each pass over the problems."""
        samples = (list(range(self.num_samples)), self.params)
        if self.greedy and self.params.temperature > 0:
            return [([GREEDY], replace(self.params, temperature=0.0, top_p=1.0, top_k=0)), samples]
        return [samples]


def sample_problems(
    backend: Backend,
    model_name: str,
    problems: ProblemSet,
    template: PromptTemplate,
    plan: Plan,
    output: Path,
    *,
    progress: Progress | None = None,
) -> SampleStore:
    """Draws what is missing in `output/samples.jsonl`.

    Raises:
        SettingsMismatch: the directory's samples were drawn with another model, prompt or parameters; more samples or
            more problems than before are no mismatch.
        BackendError: the backend cannot go on; samples so far are kept.
    """
    params = plan.params if plan.params.stop else replace(plan.params, stop=template.stop)
    plan = replace(plan, params=params)
    fixed = {
        "model": model_name,
        "prompt": template.name,
        **{k: v for k, v in backend.settings().items() if k in ("backend", "path", "dtype")},
        **params_dict(params),
    }
    prompts = {p.id: template.render(p.question) for p in problems.problems}
    rendered = {key: backend.render(prompt) for key, prompt in prompts.items()}
    _check_settings(output, fixed, rendered)
    store = SampleStore(output / "samples.jsonl")
    write_atomically(output / "settings.json", json.dumps(fixed, indent=1, ensure_ascii=False) + "\n")
    _write_prompts(output / "prompts.jsonl", rendered)

    by_id = {p.id: p for p in problems.problems}
    total = len(problems) * sum(len(numbers) for numbers, _ in plan.passes())
    done = sum(store.has(p, s) for p in by_id for numbers, _ in plan.passes() for s in numbers)
    if progress:
        progress("sampling", done, total)
    try:
        for numbers, pass_params in plan.passes():
            missing = [
                SampleRequest(p.id, s, prompts[p.id])
                for p in problems.problems
                for s in numbers
                if not store.has(p.id, s)
            ]
            if not missing:
                continue
            for g in backend.sample(missing, pass_params):
                problem = by_id[g.problem_id]
                store.append(
                    {
                        "model": model_name,
                        "problem_id": g.problem_id,
                        "sample": g.sample,
                        "greedy": pass_params.temperature == 0,
                        "question": problem.question,
                        "gold": problem.gold,
                        "level": problem.level,
                        "subject": problem.subject,
                        "completion": g.text,
                        "num_tokens": g.num_tokens,
                        "finish_reason": g.finish_reason,
                        "error": g.error,
                    }
                )
                done += g.finish_reason != "error"
                if progress:
                    progress("sampling", done, total)
    finally:
        store.close()
    return store


def _check_settings(output: Path, fixed: dict[str, Any], rendered: dict[str, str]) -> None:
    if not (output / "samples.jsonl").exists():
        return
    settings = output / "settings.json"
    if not settings.exists():
        raise SettingsMismatch(f"{output} has samples but no settings.json; use another --output or --overwrite")
    difference = settings_difference(json.loads(settings.read_text(encoding="utf-8")), fixed)
    if difference:
        raise SettingsMismatch(
            f"{output} holds samples drawn otherwise ({'; '.join(difference)}); use another --output or --overwrite"
        )
    for key, prompt in _read_prompts(output / "prompts.jsonl").items():
        if key in rendered and rendered[key] != prompt:
            raise SettingsMismatch(
                f"{output} holds samples of another prompt for problem {key!r}; use another --output or --overwrite"
            )


def _read_prompts(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["problem_id"]: row["prompt"] for row in rows}


def _write_prompts(path: Path, rendered: dict[str, str]) -> None:
    prompts = {**_read_prompts(path), **rendered}
    lines = (json.dumps({"problem_id": k, "prompt": v}, ensure_ascii=False) + "\n" for k, v in prompts.items())
    write_atomically(path, "".join(lines))


class StepScorer(Protocol):
    """A process reward: a score in [0, 1] or None for each step."""

    def __call__(self, *, prompts, completions, completion_ids, steps) -> Sequence[Sequence[float | None]]: ...


def load_step_scorer(path: str) -> StepScorer:
    """A process reward model by path or id, or a function by dotted path such as reward_fns.step_arithmetic_reward."""
    function = by_dotted_path(path)
    if function is not None:
        return function
    from trl_grpo_plus.reward_models import ProcessRewardModel

    return _load(ProcessRewardModel, path)


def load_outcome_scorer(path: str):
    """An outcome reward model by path or id, or a function by dotted path: one score a completion."""
    function = by_dotted_path(path)
    if function is not None:
        return function
    from trl_grpo_plus.reward_models import OutcomeRewardModel

    return _load(OutcomeRewardModel, path)


def _load(kind: Any, path: str):
    import torch

    try:
        return kind.from_pretrained(path, device="cuda" if torch.cuda.is_available() else None)
    except (OSError, ValueError) as error:
        raise DatasetError(f"cannot load reward model {path!r}: {error}; the samples are kept") from error


def by_dotted_path(path: str):
    """The function of a dotted path, or None where `path` is a directory or a hub id.

    Raises:
        DatasetError: it looks like a dotted path and cannot be imported.
    """
    import importlib

    if Path(path).exists() or "/" in path or "." not in path:
        return None
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DatasetError(f"cannot import {path}: {error}") from error


def split_text(text: str) -> list[str]:
    """Steps of a completion: a run of newlines ends one and belongs to it, as in training. Joined: the text."""
    steps: list[str] = []
    for part in re.findall(r"[^\n]*\n+|[^\n]+", text):
        # White space alone is no step; it goes to its neighbour.
        if steps and (not part.strip() or not steps[-1].strip()):
            steps[-1] += part
        else:
            steps.append(part)
    return steps


def add_steps(
    records: Sequence[Record], scorer: StepScorer | None, name: str, progress: Progress | None = None
) -> None:
    """Adds `steps`, `step_scores` and `step_scorer` to the records that do not have them from this scorer."""
    todo = [r for r in records if r.get("step_scorer") != name and r["completion"]]
    for start in range(0, len(todo), 32):
        part = todo[start : start + 32]
        steps = [split_text(r["completion"]) for r in part]
        scores = scorer(
            prompts=[r["question"] for r in part],
            completions=[r["completion"] for r in part],
            completion_ids=None,
            steps=steps,
        )
        for record, own, values in zip(part, steps, scores, strict=True):
            if len(values) != len(own):
                raise DatasetError(
                    f"{name} gave {len(values)} scores for the {len(own)} steps of problem {record['problem_id']!r} "
                    f"sample {record['sample']}"
                )
            record.update(steps=own, step_scores=[None if v is None else float(v) for v in values], step_scorer=name)
        if progress:
            progress("scoring steps", start + len(part), len(todo))


def add_outcome_scores(records: Sequence[Record], scorer, name: str, progress: Progress | None = None) -> None:
    """Adds `rm_score` and `rm_scorer` to the records that do not have them from this scorer."""
    todo = [r for r in records if r.get("rm_scorer") != name and r["completion"]]
    for start in range(0, len(todo), 32):
        part = todo[start : start + 32]
        scores = scorer(prompts=[r["question"] for r in part], completions=[r["completion"] for r in part])
        for record, value in zip(part, scores, strict=True):
            record.update(rm_score=None if value is None else float(value), rm_scorer=name)
        if progress:
            progress("scoring outcomes", start + len(part), len(todo))


def finish(
    records: Sequence[Record],
    policy: Any,
    *,
    prm: str | None = None,
    orm: str | None = None,
    regrade: bool = True,
    progress: Progress | None = None,
    **summary_options: Any,
) -> dict[str, Any]:
    """Grades and scores records in place and returns their summary."""
    if regrade:
        done = 0

        def graded(count: int) -> None:
            nonlocal done
            done += count
            if progress:
                progress("grading", done, len(records))

        grade_records(records, policy, graded)
    if prm:
        add_steps(records, load_step_scorer(prm), prm, progress)
    if orm:
        add_outcome_scores(records, load_outcome_scorer(orm), orm, progress)
    return summarize(records, **summary_options)


def evaluate(
    backend: Backend,
    problems: ProblemSet,
    template: PromptTemplate,
    plan: Plan,
    output: Path,
    policy: Any,
    *,
    model_name: str,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[list[Record], dict[str, Any]]:
    """Samples what is missing, grades everything, and rewrites `output/samples.jsonl` with the verdicts.

    Args:
        backend, problems, template, plan: what to sample.
        output: directory; see `sample_problems`.
        policy: a `reward_fns.GradePolicy`.
        model_name: how the model is called in tables.
        options: of `finish` and `summarize`.

    Returns:
        records in the order of the problems, and their summary.
    """
    store = sample_problems(backend, model_name, problems, template, plan, output, progress=progress)
    wanted = {p.id: (i, p) for i, p in enumerate(problems.problems)}
    records = sorted(
        (r for r in store.records.values() if r["problem_id"] in wanted and r["sample"] < plan.num_samples),
        key=lambda r: (wanted[r["problem_id"]][0], r["sample"]),
    )
    for record in records:
        problem = wanted[record["problem_id"]][1]
        record.update(question=problem.question, gold=problem.gold, level=problem.level, subject=problem.subject)
    summary = finish(records, policy, progress=progress, **options)
    summary["sampling"] = {**backend.settings(), **getattr(backend, "stats", {})}
    kept = [r for key, r in store.records.items() if key not in {(x["problem_id"], x["sample"]) for x in records}]
    store.rewrite([*records, *kept])
    return records, summary
