"""The two phases between policy steps: labelling the iteration's samples, and training the reward model on them.

Each is a function from directories to a directory that is written whole or not at all, with a digest of what it was
made from. So it does not matter in which process a phase runs, and a run killed in between takes up the phases that
were done.
"""

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import set_seed

from trl_grpo_plus.iterative.checkpoint import (
    CorruptCheckpointError,
    directory_digest,
    publish,
    read_manifest,
    remove,
    write_manifest,
)
from trl_grpo_plus.iterative.config import IterativeGRPOConfig
from trl_grpo_plus.iterative.replay import (
    ReplayBuffer,
    is_held_out,
    link_or_copy,
    make_samples,
    num_history,
    sample_key,
    sample_keys,
    write_parquet,
)
from trl_grpo_plus.iterative.reward_model import FitSettings, UpdatableRewardModel
from trl_grpo_plus.process_rewards import call_process_reward

WEIGHTS_NAME = "weights.pt"
OPTIMIZER_NAME = "optimizer.pt"
METRICS_NAME = "metrics.json"

# Called with `prompts, completions` and the data set's columns; returns for each completion a number or bool (right
# above one half), or None where it cannot be judged.
Grader = Callable[..., list[float | bool | None]]


@dataclass
class Ranks:
    """The processes that share the work of a phase; alone if there is one."""

    index: int = 0
    count: int = 1
    barrier: Callable[[], None] = lambda: None

    @property
    def is_main(self) -> bool:
        return self.index == 0

    @classmethod
    def of(cls, accelerator) -> "Ranks":
        return cls(accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone)

    def map(self, function: Callable[[list], list], rows: list) -> list:
        """Applies a function of a list to this rank's slice of the rows; returns the results of all rows on all
        ranks.
        """
        bounds = [len(rows) * rank // self.count for rank in range(self.count + 1)]
        own = rows[bounds[self.index] : bounds[self.index + 1]]
        results = function(own) if own else []
        return gather_object(results) if self.count > 1 else results


@contextlib.contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Seeds all generators inside and leaves them outside as they were, so a phase draws the same wherever it runs."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    set_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


class SampleStore:
    """The policy's samples of one iteration, one parquet part for each generation batch."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)

    def write(self, rows: list[dict[str, Any]], step: int, features=None) -> None:
        """Writes the part of a generation batch; one of the same step is replaced.

        Args:
            rows: `prompt`, `completion`, `completion_ids`, `truncated`, `scores`, `steps` and the data set's columns.
            step: the policy's optimizer steps so far.
            features: of the parquet file; None: found from the rows.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"step-{step:08d}.parquet"
        temporary = path.with_suffix(".tmp")
        write_parquet(Dataset.from_list(rows, features=features), temporary)
        temporary.replace(path)

    def parts(self) -> list[Path]:
        return sorted(self.directory.glob("step-*.parquet"))

    def __len__(self) -> int:
        return sum(pq.ParquetFile(path).metadata.num_rows for path in self.parts())

    def read(self) -> list[dict[str, Any]]:
        """All rows, in the order in which they were sampled."""
        return [row for path in self.parts() for row in pq.read_table(path).to_pylist()]

    def snapshot(self, directory: str | Path) -> None:
        """Hard-links the parts into another directory."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        for path in self.parts():
            link_or_copy(path, Path(directory) / path.name)


def label_phase(
    samples: str | Path,
    replay: str | Path,
    output: str | Path,
    args: IterativeGRPOConfig,
    iteration: int,
    granularity: str,
    grader: Grader | None,
    step_labeler: Callable | None = None,
    ranks: Ranks | None = None,
) -> dict[str, float | None]:
    """Makes the reward model's training set from an iteration's samples, and adds them to the buffer.

    Writes to `output`: `train.parquet` (new samples, then history; the column `iteration` tells them apart),
    `heldout.parquet`, `replay/` (the buffer with the new samples) and `metrics.json`.

    Args:
        samples: directory of a [`SampleStore`].
        replay: directory of the buffer as it was before.
        output: where to write; taken as it is if it was made from the same inputs before.
        args: the run's arguments.
        iteration: number of the iteration, from 1.
        granularity: `"outcome"` or `"process"`, what the reward model scores.
        grader: gives the verdicts; None if there is none (process reward models only).
        step_labeler: gives the step labels: called like a process reward.
        ranks: the processes that share the work.

    Returns:
        The metrics: `samples/*`, `replay/size`, `replay/fraction`, `reward_model/agreement`, `grader/accuracy`.

    Raises:
        ValueError: there are no samples, or none with a label.
    """
    ranks, output = ranks or Ranks(), Path(output)
    source = label_source(samples, replay)
    done = is_finished(output, source)
    ranks.barrier()
    if done:
        return json.loads((output / METRICS_NAME).read_text())
    rows = SampleStore(samples).read()
    if not rows:
        raise ValueError(f"Iteration {iteration} has no samples at {samples}.")
    seed = args.seed + 7919 * iteration
    with isolated_rng(seed):
        verdicts = ranks.map(lambda own: _verdicts(grader, own), rows) if grader else [None] * len(rows)
        for row, verdict in zip(rows, verdicts, strict=True):
            row["correct"] = verdict
        metrics = {
            "samples/drawn": len(rows),
            "grader/accuracy": _mean([row["correct"] for row in rows]),
            "reward_model/agreement": agreement(rows, args, granularity),
        }
        distinct = list({sample_key(row["prompt"], row["completion"]): row for row in reversed(rows)}.values())[::-1]
        kept = _thin_out(distinct, args, granularity, np.random.default_rng(seed))
        if granularity == "process":
            labels = ranks.map(lambda own: label_steps(step_labeler, own, args), kept)
            for row, steps in zip(kept, labels, strict=True):
                row["step_labels"] = steps
            kept = [row for row in kept if any(label is not None for label in row["step_labels"])]
    if not kept:
        raise ValueError(
            f"No sample of iteration {iteration} got a label, so the reward model cannot learn from it. Check the "
            f"grader (answer_column={args.answer_column!r}) or the step labels on a sampled completion."
        )
    if ranks.is_main:
        staged = _stage(output)
        parts: dict[bool, list] = {True: [], False: []}
        for row in kept:
            parts[is_held_out(row["prompt"], args.heldout_fraction, args.seed)].append(row)
        heldout, fresh = parts[True], parts[False]
        ReplayBuffer(replay).snapshot(staged / "replay")
        buffer = ReplayBuffer(staged / "replay", args.replay_max_size, args.replay_strategy, args.seed)
        num_old = 0
        if fresh:
            new = _as_samples(fresh, iteration)
            wanted = num_history(len(new), args.replay_fraction, len(buffer))
            history = buffer.draw(wanted, seed, exclude=sample_keys(new))
            num_old = len(history) if history is not None else 0
            tables = [new.data.table]
            if history is not None:
                tables.append(history.data.table.cast(new.features.arrow_schema))
            buffer.add(new, iteration)
            write_parquet(Dataset(pa.concat_tables(tables)), staged / "train.parquet")
        if heldout:
            write_parquet(_as_samples(heldout, iteration), staged / "heldout.parquet")
        metrics |= {
            "samples/kept": len(kept),
            "samples/heldout": len(heldout),
            "samples/new": len(fresh),
            "samples/history": num_old,
            "replay/size": len(buffer),
            "replay/fraction": num_old / max(1, len(fresh) + num_old),
        }
        (staged / METRICS_NAME).write_text(json.dumps(metrics))
        write_manifest(staged, source=source)
        publish(staged, output)
    ranks.barrier()
    return json.loads((output / METRICS_NAME).read_text())


def reward_model_phase(
    reward_model: UpdatableRewardModel,
    labelled: str | Path,
    previous: str | Path,
    initial: str | Path,
    output: str | Path,
    args: IterativeGRPOConfig,
    iteration: int,
    ranks: Ranks | None = None,
) -> dict[str, float | None]:
    """Trains the reward model on a labelled iteration; on return it has the weights of `output`.

    Writes to `output` its weights, its optimizer's state and `metrics.json`. The optimizer exists only in here.

    Args:
        reward_model: changed in place. Its weights on entry must be those of `previous`.
        labelled: what [`label_phase`] wrote.
        previous: what this phase wrote in the iteration before (or [`save_reward_model`] at the start).
        initial: the first weights, for `reward_model_start="initial"`.
        output: where to write; taken as it is if it was made from the same inputs before.
        args: the run's arguments.
        iteration: number of the iteration, from 1.
        ranks: the processes that share the work.

    Returns:
        The metrics `reward_model/accuracy_before`, `/accuracy_after` (None without held-out samples), `/loss`,
        `/skipped`.
    """
    ranks, labelled, previous, output = ranks or Ranks(), Path(labelled), Path(previous), Path(output)
    source = reward_model_source(labelled, previous, args)
    done = is_finished(output, source)
    ranks.barrier()
    if done:
        load_reward_model(reward_model, output)
        return json.loads((output / METRICS_NAME).read_text())
    train, heldout = (_read(labelled / f"{name}.parquet") for name in ("train", "heldout"))
    before = accuracy(reward_model, heldout, args)
    metrics: dict[str, float | None] = {"reward_model/accuracy_before": before, "reward_model/accuracy_after": before}
    optimizer_state = _load_optimizer(previous)
    if args.update_reward_model and train is not None:
        if args.reward_model_start == "initial":
            load_reward_model(reward_model, initial)
        carried = None if args.reset_reward_model_optimizer else optimizer_state
        staged_scratch = output.with_name(f".scratch-{output.name}")
        settings = FitSettings(args, iteration, args.seed + 104729 * iteration, staged_scratch)
        with isolated_rng(settings.seed):
            loss, new_state = reward_model.fit(train, settings, carried)
        ranks.barrier()
        if ranks.is_main and staged_scratch.exists():
            shutil.rmtree(staged_scratch)
        after = accuracy(reward_model, heldout, args)
        skipped = args.skip_worse_update and before is not None and after < before
        if skipped:
            load_reward_model(reward_model, previous)
        else:
            optimizer_state = new_state
        metrics |= {
            "reward_model/accuracy_after": after,
            "reward_model/loss": loss,
            "reward_model/skipped": float(skipped),
        }
    if ranks.is_main:
        staged = _stage(output)
        _write_reward_model(reward_model, optimizer_state, staged)
        (staged / METRICS_NAME).write_text(json.dumps(metrics))
        write_manifest(staged, source=source)
        publish(staged, output)
    ranks.barrier()
    return metrics


def save_reward_model(reward_model: UpdatableRewardModel, output: str | Path) -> None:
    """Writes the weights that the run starts from, in the form of [`reward_model_phase`]."""
    staged = _stage(Path(output))
    _write_reward_model(reward_model, None, staged)
    write_manifest(staged, source="start")
    publish(staged, output)


def load_reward_model(reward_model: UpdatableRewardModel, directory: str | Path) -> None:
    """Puts saved weights into the reward model, in place."""
    reward_model.load_state_dict(torch.load(Path(directory) / WEIGHTS_NAME, map_location="cpu", weights_only=True))


def label_source(samples: str | Path, replay: str | Path) -> str:
    """What [`label_phase`] makes its result from, as a digest of its inputs."""
    return f"{directory_digest(samples)} {directory_digest(replay)}"


def reward_model_source(labelled: str | Path, previous: str | Path, args: IterativeGRPOConfig) -> str:
    """What [`reward_model_phase`] makes its result from, as a digest of its inputs."""
    return f"{directory_digest(labelled)} {directory_digest(previous)} {args.update_reward_model}"


def is_finished(output: str | Path, source: str) -> bool:
    """Whether a phase's result is there, made from these inputs and with nothing damaged since."""
    try:
        return read_manifest(output).get("source") == source
    except CorruptCheckpointError:
        return False


def accuracy(reward_model: UpdatableRewardModel, samples: Dataset | None, args: IterativeGRPOConfig) -> float | None:
    """How often the reward model is right on labelled samples; None if there are none.

    Steps: share of labelled steps on the right side of 0.5. Outcomes: the same for completions, or, with the pairwise
    loss, whose scores have no threshold, share of the pairs of a right and a wrong answer to one prompt in right
    order.
    """
    if samples is None or not len(samples):
        return None
    scores = reward_model.score(samples)
    if reward_model.granularity == "process":
        pairs = [
            (score, label)
            for row_scores, labels in zip(scores, samples["step_labels"], strict=True)
            for score, label in zip(row_scores, labels, strict=True)
            if label is not None and score is not None
        ]
        return _mean([(score > 0.5) == (label >= 0.5) for score, label in pairs])
    flat = [row[0] for row in scores]
    if args.reward_model_loss == "pairwise":
        return pairwise_accuracy(samples["prompt"][:], flat, samples["correct"][:])
    return _mean([(score > 0.5) == (verdict >= 0.5) for score, verdict in zip(flat, samples["correct"], strict=True)])


def pairwise_accuracy(prompts: list, scores: list[float], verdicts: list[float]) -> float | None:
    """Share of (right, wrong) pairs of one prompt whose right one scores higher, ties half; None if there is no
    pair."""
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for prompt, score, verdict in zip(prompts, scores, verdicts, strict=True):
        groups.setdefault(json.dumps(prompt, sort_keys=True), ([], []))[verdict >= 0.5].append(score)
    wins = [
        0.5 * (np.sign(right - wrong) + 1)
        for wrongs, rights in groups.values()
        for right in rights
        for wrong in wrongs
    ]
    return float(np.mean(wins)) if wins else None


def agreement(rows: list[dict[str, Any]], args: IterativeGRPOConfig, granularity: str) -> float | None:
    """Share of completions on which the reward model, as it scored them in training, and the grader say the same.

    A completion counts as right for the reward model if its score, or the least of its step scores, is above 0.5. With
    the pairwise loss it is the share of pairs that both put in the same order.
    """
    judged = []
    for row in rows:
        scores = [score for score in row["scores"] or [] if score is not None]
        if row["correct"] is not None and scores:
            judged.append((row["prompt"], min(scores), row["correct"]))
    if granularity == "outcome" and args.reward_model_loss == "pairwise":
        return pairwise_accuracy(*map(list, zip(*judged, strict=True))) if judged else None
    return _mean([(score > 0.5) == (verdict >= 0.5) for _, score, verdict in judged])


def _verdicts(grader: Grader, rows: list[dict[str, Any]]) -> list[float | None]:
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in _SAMPLE_COLUMNS}
    verdicts = grader(
        prompts=[row["prompt"] for row in rows], completions=[row["completion"] for row in rows], **columns
    )
    if len(verdicts) != len(rows):
        raise ValueError(f"The grader returned {len(verdicts)} verdicts for {len(rows)} completions.")
    return [None if verdict is None else float(verdict) for verdict in verdicts]


def label_steps(labeler: Callable, rows: list[dict[str, Any]], args: IterativeGRPOConfig) -> list[list[float | None]]:
    """Labels the steps of samples; a last step that was cut off gets none, unless `args.score_truncated_steps`."""
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in _SAMPLE_COLUMNS}
    labels = call_process_reward(
        labeler,
        getattr(labeler, "__name__", type(labeler).__name__),
        [row["steps"] for row in rows],
        prompts=[row["prompt"] for row in rows],
        completions=[row["completion"] for row in rows],
        completion_ids=[row["completion_ids"] for row in rows],
        **columns,
    )
    for row, own in zip(rows, labels, strict=True):
        if row["truncated"] and own and not args.score_truncated_steps:
            own[-1] = None
    return labels


def _thin_out(rows: list[dict], args: IterativeGRPOConfig, granularity: str, rng: np.random.Generator) -> list[dict]:
    """The samples that are kept: judged ones (outcome), balanced and capped as `args` say, in their order."""
    if granularity == "outcome" or args.balance_samples:
        rows = [row for row in rows if row["correct"] is not None]
    chosen = np.arange(len(rows))
    if args.balance_samples:
        is_right = np.array([row["correct"] >= 0.5 for row in rows], dtype=bool)
        classes = [np.flatnonzero(is_right), np.flatnonzero(~is_right)]
        size = min(map(len, classes))
        if args.max_samples is not None:
            size = min(size, args.max_samples // 2)
        chosen = np.concatenate([rng.choice(members, size, replace=False) for members in classes])
    elif args.max_samples is not None and len(rows) > args.max_samples:
        chosen = rng.choice(len(rows), args.max_samples, replace=False)
    return [rows[i] for i in np.sort(chosen)]


def _as_samples(rows: list[dict[str, Any]], iteration: int) -> Dataset:
    names = ("prompt", "completion", "steps", "step_labels", "scores", "correct")
    return make_samples({name: [row.get(name) for row in rows] for name in names}, iteration)


def _write_reward_model(reward_model, optimizer_state, directory: Path) -> None:
    torch.save(reward_model.state_dict(), directory / WEIGHTS_NAME)
    if optimizer_state is not None:
        torch.save(optimizer_state, directory / OPTIMIZER_NAME)


def _load_optimizer(directory: Path) -> dict | None:
    path = directory / OPTIMIZER_NAME
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def _read(path: Path) -> Dataset | None:
    return Dataset(pq.read_table(path)) if path.exists() else None


def _stage(output: Path) -> Path:
    output = Path(output)
    staged = output.with_name(f".staging-{output.name}")
    remove(staged)
    staged.mkdir(parents=True)
    return staged


def _mean(values) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


_SAMPLE_COLUMNS = (
    "prompt",
    "completion",
    "completion_ids",
    "truncated",
    "scores",
    "steps",
    "correct",
    "step_labels",
)
