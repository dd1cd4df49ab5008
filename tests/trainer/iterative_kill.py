"""Kills iterative runs with SIGKILL at random moments, resumes them, and compares their ends with a whole run.

    python tests/trainer/iterative_kill.py --kills 20 --seed 0
    python tests/trainer/iterative_kill.py --points

With `--points` the kills fall right before and right after the calls that change what is on disk, and in updates.
Prints one JSON object. Each run is a forked child of this process, so that a kill costs no imports.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import torch
from iterative_toys import BagOfWords, StepBag, save_tiny_policy, toy_trainer
from safetensors.torch import load_file

from trl_grpo_plus.iterative import ReplayBuffer
from trl_grpo_plus.iterative import phases as phases_module
from trl_grpo_plus.iterative import trainer as trainer_module
from trl_grpo_plus.iterative.checkpoint import list_checkpoints
from trl_grpo_plus.iterative.phases import SampleStore
from trl_grpo_plus.iterative.trainer import IterativeGRPOTrainer
from trl_grpo_plus.iterative.workdir import WorkDirectory

_fork = multiprocessing.get_context("fork")
_MODELS = {"outcome": BagOfWords, "process": StepBag}
# Where a run can be killed on purpose: the function, and which of its calls.
POINTS = {
    "sample": (SampleStore, "write", 3),
    "label result": (phases_module, "publish", 2),
    "fit": (BagOfWords, "fit", 2),
    "reward model result": (phases_module, "publish", 3),
    "buffer": (ReplayBuffer, "_write_index", 2),
    "metrics": (trainer_module, "record_metrics", 1),
    "forget": (WorkDirectory, "forget_before", 2),
    "checkpoint parts": (WorkDirectory, "save", 2),
    "manifest": (trainer_module, "write_manifest", 2),
    "checkpoint": (trainer_module, "publish", 2),
    "prune": (trainer_module, "prune_checkpoints", 3),
}


def build(policy: str, output_dir: str, kind: str):
    config = {"save_total_limit": 2, "heldout_fraction": 0.4, "score_truncated_steps": True}
    return toy_trainer(policy, output_dir, _MODELS[kind](), config)


def child(policy: str, output_dir: str, kind: str, kill_after: float | None, point: tuple[str, str] | None) -> None:
    """Trains, resuming if there is a checkpoint; kills itself `kill_after` seconds into `train()`, or at a point."""
    torch.set_num_threads(1)
    directory = Path(output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    note = os.open(directory.with_suffix(".phase"), os.O_RDWR | os.O_CREAT)
    _trace(note, IterativeGRPOTrainer, "_generate_and_score_completions", "sampling")
    _trace(note, IterativeGRPOTrainer, "training_step", "policy step")
    _trace(note, IterativeGRPOTrainer, "_save_checkpoint", "checkpoint writing")
    _trace(note, trainer_module, "label_phase", "labelling")
    _trace(note, trainer_module, "reward_model_phase", "reward-model training")
    _trace(note, IterativeGRPOTrainer, "_load_parts", "resuming")
    trainer = build(policy, output_dir, kind)
    if point is not None:
        _kill_at(*POINTS[point[0]], point[1])
    if kill_after is not None:
        timer = threading.Timer(kill_after, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    start = time.perf_counter()
    if any((path / "manifest.json").exists() for path in list_checkpoints(output_dir)):
        trainer.train(resume_from_checkpoint=True)
    else:
        trainer.train()
    directory.with_suffix(".seconds").write_text(str(time.perf_counter() - start))


def _kill_at(owner, name: str, number: int, side: str) -> None:
    """Kills the process before or after the `number`-th call of a function."""
    function, calls = getattr(owner, name), [0]

    def killing(*args, **kwargs):
        calls[0] += 1
        if calls[0] == number and side == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if calls[0] == number and side == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, killing)


def _trace(note: int, owner, name: str, phase: str) -> None:
    """Lets a function note its phase in a file while it runs, so that it is known where a kill fell."""
    function = getattr(owner, name)

    def traced(*args, **kwargs):
        before = os.pread(note, 64, 0)
        os.pwrite(note, phase.encode().ljust(64), 0)
        try:
            return function(*args, **kwargs)
        finally:
            os.pwrite(note, before.ljust(64), 0)

    setattr(owner, name, traced)


def run(
    policy: str,
    output_dir: Path,
    kind: str,
    kill_after: float | None = None,
    point: tuple[str, str] | None = None,
) -> tuple[int, str]:
    """Runs a child; returns its exit code (-9 if killed) and the phase in which it ended."""
    process = _fork.Process(target=child, args=(policy, str(output_dir), kind, kill_after, point))
    process.start()
    process.join()
    return process.exitcode, output_dir.with_suffix(".phase").read_text().strip()


def end_state(output_dir: Path) -> dict:
    """All that a finished run leaves behind, without times and paths."""
    last = list_checkpoints(output_dir)[-1]
    work = output_dir / "iterative"
    iteration = max(work.glob("iteration-*"))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return {
        "checkpoints": [path.name for path in list_checkpoints(output_dir)],
        "policy": load_file(last / "model.safetensors"),
        "policy optimizer": torch.load(last / "optimizer.pt"),
        "policy schedule": torch.load(last / "scheduler.pt"),
        "reference": torch.load(last / "reference.pt"),
        "rng": torch.load(last / "rng_state.pth", weights_only=False),
        "reward model": torch.load(iteration / "reward_model" / "weights.pt"),
        "reward model optimizer": torch.load(iteration / "reward_model" / "optimizer.pt"),
        "buffer": list(ReplayBuffer(iteration / "label" / "replay")),
        "iterations": json.loads((work / "metrics.json").read_text()),
        "log": [
            {key: value for key, value in entry.items() if "time" not in key and "runtime" not in key}
            for entry in history
        ],
    }


def differences(left, right, path: str = "") -> list[str]:
    """Where two nested values differ, bit for bit."""
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [f"{path}: keys {sorted(map(str, left.keys() ^ right.keys()))}"]
        return [found for key in left for found in differences(left[key], right[key], f"{path}/{key}")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: length {len(left)} and {len(right)}"]
        pairs = enumerate(zip(left, right, strict=True))
        return [found for i, pair in pairs for found in differences(*pair, f"{path}/{i}")]
    if isinstance(left, torch.Tensor):
        return [] if torch.equal(left, right) else [f"{path}: largest difference {(left - right).abs().max()}"]
    if hasattr(left, "tobytes"):
        return [] if left.tobytes() == right.tobytes() else [path]
    return [] if left == right else [f"{path}: {left!r} and {right!r}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=_MODELS, default="outcome")
    parser.add_argument("--points", action="store_true", help="kill at chosen calls instead of at random moments")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        policy = save_tiny_policy(root / "policy")
        code, _ = run(policy, root / "whole", args.kind)
        assert code == 0, "the uninterrupted run failed"
        expected = end_state(root / "whole")
        seconds = float((root / "whole.seconds").read_text())
        found, phases, kills, runs = [], [], 0, 0
        if args.points:
            for point in [(name, side) for name in POINTS for side in ("before", "after")]:
                output = root / f"{point[0]} {point[1]}".replace(" ", "-")
                code, _ = run(policy, output, args.kind, point=point)
                assert code == -signal.SIGKILL, f"{point} was not reached: exit code {code}"
                code, _ = run(policy, output, args.kind)
                assert code == 0, f"resuming after {point} failed with exit code {code}"
                found += [f"{point}{difference}" for difference in differences(expected, end_state(output))]
                kills, phases = kills + 1, [*phases, f"{point[1]} {point[0]}"]
            args.kills = 0
        while kills < args.kills:
            runs += 1
            output = root / f"killed-{runs}"
            # A run is killed once or twice, so that resumed runs are killed too.
            for _ in range(rng.choice((1, 2))):
                code, phase = run(policy, output, args.kind, rng.uniform(0, seconds))
                if code == 0:
                    break
                kills += 1
                phases.append(phase or "between")
            while code != 0:
                assert code == -signal.SIGKILL, f"run {runs} failed with exit code {code}"
                code, _ = run(policy, output, args.kind)
            found += [f"run {runs}{difference}" for difference in differences(expected, end_state(output))]
    counts = {phase: phases.count(phase) for phase in sorted(set(phases))}
    print(json.dumps({"kills": kills, "runs": runs, "seconds": seconds, "phases": counts, "differences": found}))


if __name__ == "__main__":
    main()
