"""The files of the outer loop: where they lie in a run's output directory, and their copy in each checkpoint."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from trl_grpo_plus.iterative.checkpoint import remove
from trl_grpo_plus.iterative.phases import SampleStore
from trl_grpo_plus.iterative.replay import ReplayBuffer, link_or_copy

WORK_NAME = "iterative"
STATE_NAME = "state.json"
METRICS_NAME = "metrics.json"


class WorkDirectory:
    """`output_dir/iterative`: the samples of the iteration in progress, and what each finished phase made.

    Everything in it can be made again from a checkpoint, which holds hard links to the same files.
    """

    def __init__(self, output_dir: str | Path):
        self.root = Path(output_dir) / WORK_NAME

    @property
    def samples(self) -> Path:
        """The policy's samples of the iteration in progress."""
        return self.root / "samples"

    @property
    def initial_reward_model(self) -> Path:
        """The weights that the run started from."""
        return self.root / "initial_reward_model"

    @property
    def metrics(self) -> Path:
        """A JSON list with the metrics of each finished iteration."""
        return self.root / METRICS_NAME

    def iteration(self, number: int) -> Path:
        """What the phases of an iteration made; 0 is the start of the run."""
        return self.root / f"iteration-{number:04d}"

    def labelled(self, number: int) -> Path:
        """The result of an iteration's labelling."""
        return self.iteration(number) / "label"

    def replay(self, number: int) -> Path:
        """The buffer at the end of an iteration."""
        return self.labelled(number) / "replay"

    def reward_model(self, number: int) -> Path:
        """The reward model at the end of an iteration."""
        return self.iteration(number) / "reward_model"

    def save(self, checkpoint: Path, iteration: int, state: dict[str, Any]) -> None:
        """Adds the loop's parts to a checkpoint.

        Args:
            checkpoint: the directory that is being written.
            iteration: the one in progress.
            state: further JSON values, returned by [`read_state`].
        """
        parts = checkpoint / WORK_NAME
        parts.mkdir()
        SampleStore(self.samples).snapshot(parts / "samples")
        ReplayBuffer(self.replay(iteration - 1)).snapshot(parts / "replay")
        _link_tree(self.reward_model(iteration - 1), parts / "reward_model")
        _link_tree(self.initial_reward_model, parts / "initial_reward_model")
        if self.metrics.exists():
            shutil.copyfile(self.metrics, parts / METRICS_NAME)
        (parts / STATE_NAME).write_text(json.dumps({"iteration": iteration, **state}))

    def restore(self, checkpoint: Path) -> None:
        """Makes the directory what it was when the checkpoint was written.

        The results of the phases that follow the checkpoint's iteration stay: each says what it was made from, and is
        taken only if that is the same.
        """
        iteration = read_state(checkpoint)["iteration"]
        for directory in self.root.glob("iteration-*"):
            if directory != self.iteration(iteration):
                remove(directory)
        targets = {
            "samples": self.samples,
            "replay": self.replay(iteration - 1),
            "reward_model": self.reward_model(iteration - 1),
            "initial_reward_model": self.initial_reward_model,
        }
        if (checkpoint / WORK_NAME / METRICS_NAME).exists():
            shutil.copyfile(checkpoint / WORK_NAME / METRICS_NAME, self.metrics)
        for name, target in targets.items():
            remove(target)
            _link_tree(checkpoint / WORK_NAME / name, target)

    def forget_before(self, iteration: int) -> None:
        """Removes what an iteration that begins no longer needs."""
        remove(self.samples)
        for directory in self.root.glob("iteration-*"):
            if directory.name < self.iteration(iteration - 1).name:
                remove(directory)


def read_state(checkpoint: str | Path) -> dict[str, Any]:
    """The loop's own state in a checkpoint: `iteration`, and what was given to [`WorkDirectory.save`]."""
    return json.loads((Path(checkpoint) / WORK_NAME / STATE_NAME).read_text())


def record_metrics(work: WorkDirectory, iteration: int, steps_per_iteration: int) -> dict[str, Any]:
    """Adds the metrics of an iteration's two phases to `metrics.json`, in place of what stands there for it and later
    ones.

    Returns:
        The iteration's metrics, with `iteration` and `step`.
    """
    entry: dict[str, Any] = {"iteration": iteration, "step": iteration * steps_per_iteration}
    for directory in (work.labelled(iteration), work.reward_model(iteration)):
        entry |= json.loads((directory / METRICS_NAME).read_text())
    entries = json.loads(work.metrics.read_text()) if work.metrics.exists() else []
    entries = [*(old for old in entries if old["iteration"] < iteration), entry]
    temporary = work.metrics.with_suffix(".tmp")
    temporary.write_text(json.dumps(entries, indent=1))
    os.replace(temporary, work.metrics)
    return entry


def _link_tree(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.rglob("*")):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, copy)
