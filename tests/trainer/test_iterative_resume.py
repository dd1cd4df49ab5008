"""A run that was interrupted, killed, or finds a damaged checkpoint ends where an uninterrupted one ends."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from iterative_kill import differences, end_state
from iterative_toys import BagOfWords, StepBag, save_tiny_policy, toy_trainer
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback

from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer
from trl_grpo_plus.demo import make_problems
from trl_grpo_plus.iterative import CorruptCheckpointError
from trl_grpo_plus.iterative.checkpoint import (
    last_whole_checkpoint,
    list_checkpoints,
    load_reference,
    prune_checkpoints,
    publish,
    read_manifest,
    reference_parameters,
    remove,
    save_reference,
    write_manifest,
)

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


class InterruptError(Exception):
    pass


class Interrupt(TrainerCallback):
    """Ends a run with an exception as a step begins."""

    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise InterruptError


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def whole(policy, tmp_path_factory):
    """The uninterrupted run."""
    output = tmp_path_factory.mktemp("whole") / "run"
    toy_trainer(policy, output, config={"heldout_fraction": 0.4}).train()
    return output


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of the uninterrupted run, to damage."""
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def resume(policy, output, **kwargs):
    trainer = toy_trainer(policy, output, config={"heldout_fraction": 0.4}, **kwargs)
    trainer.train(resume_from_checkpoint=True)
    return trainer


@pytest.mark.parametrize("step", [3, 4, 6], ids=["inside an iteration", "between iterations", "in the second epoch"])
def test_interrupted_run_ends_where_the_uninterrupted_one_ends(policy, whole, tmp_path, step):
    output = tmp_path / "run"
    with pytest.raises(InterruptError):
        toy_trainer(policy, output, config={"heldout_fraction": 0.4}, callbacks=[Interrupt(step)]).train()
    assert list_checkpoints(output)[-1].name == f"checkpoint-{step // 2 * 2}"
    resume(policy, output)
    assert differences(end_state(whole), end_state(output)) == []


@pytest.mark.parametrize(
    "reward_model, kwargs", [(BagOfWords, {"peft_config": LORA}), (StepBag, {})], ids=["lora", "process"]
)
def test_lora_and_process_runs_resume_alike(policy, tmp_path, reward_model, kwargs):
    def adapters(output):
        last = list_checkpoints(output)[-1]
        return {p.relative_to(last).as_posix(): load_file(p) for p in sorted(last.rglob("*.safetensors"))}

    toy_trainer(policy, tmp_path / "whole", reward_model(), **kwargs).train()
    with pytest.raises(InterruptError):
        toy_trainer(policy, tmp_path / "cut", reward_model(), callbacks=[Interrupt(7)], **kwargs).train()
    trainer = toy_trainer(policy, tmp_path / "cut", reward_model(), **kwargs)
    trainer.train(resume_from_checkpoint=True)
    expected, found = adapters(tmp_path / "whole"), adapters(tmp_path / "cut")
    assert differences(expected, found) == []
    if kwargs:
        assert set(expected) == {"adapter_model.safetensors", "ref/adapter_model.safetensors"}
        trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        assert not trained & {id(p) for p in reference_parameters(trainer)[1]}
    for name in (
        "iterative/iteration-0002/reward_model/weights.pt",
        "iterative/iteration-0002/reward_model/optimizer.pt",
    ):
        assert differences(torch.load(tmp_path / "whole" / name), torch.load(tmp_path / "cut" / name)) == []


def test_window_normaliser_and_kl_controller_resume_alike(policy, tmp_path):
    config = {
        "loss_normalization": "token",
        "kl_placement": "loss",
        "kl_estimator": "k3",
        "kl_importance": "differentiable",
        "kl_target": 0.01,
        "kl_target_horizon": 50,
        "learning_rate_scope": "iteration",
    }
    toy_trainer(policy, tmp_path / "whole", config=config).train()
    with pytest.raises(InterruptError):
        toy_trainer(policy, tmp_path / "cut", config=config, callbacks=[Interrupt(7)]).train()
    toy_trainer(policy, tmp_path / "cut", config=config).train(resume_from_checkpoint=True)
    assert differences(end_state(tmp_path / "whole"), end_state(tmp_path / "cut")) == []
    betas = [log["kl/coef"] for log in end_state(tmp_path / "whole")["log"] if "kl/coef" in log]
    assert len(set(betas)) > 1


def test_resumed_run_takes_finished_phases_and_makes_unfinished_ones_again(policy, whole, copy):
    """All policy steps are done; the last update of the reward model is missing, or only half there."""
    expected = end_state(whole)
    shutil.rmtree(copy / "iterative" / "iteration-0002" / "reward_model")
    labels = copy / "iterative" / "iteration-0002" / "label" / "manifest.json"
    written = labels.stat().st_mtime_ns
    resume(policy, copy)
    assert labels.stat().st_mtime_ns == written
    assert differences(expected, end_state(copy)) == []
    # Labels that were made from something else are not taken.
    manifest = json.loads(labels.read_text())
    labels.write_text(json.dumps({**manifest, "source": "other"}))
    written = labels.stat().st_mtime_ns
    resume(policy, copy)
    assert labels.stat().st_mtime_ns != written
    assert json.loads(labels.read_text())["source"] == manifest["source"]
    assert differences(expected, end_state(copy)) == []


def damage_by_cutting(checkpoint: Path):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def damage_by_a_bit(checkpoint: Path):
    path = checkpoint / "iterative" / "reward_model" / "weights.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # it is a hard link
    path.write_bytes(content)


def damage_by_losing_a_part(checkpoint: Path):
    next((checkpoint / "iterative" / "samples").glob("*.parquet")).unlink()


def damage_by_losing_the_manifest(checkpoint: Path):
    (checkpoint / "manifest.json").unlink()


def damage_the_manifest(checkpoint: Path):
    (checkpoint / "manifest.json").write_text('{"files": ')


@pytest.mark.parametrize(
    "damage, named",
    [
        (damage_by_cutting, "model.safetensors"),
        (damage_by_a_bit, "weights.pt"),
        (damage_by_losing_a_part, "samples"),
        (damage_by_losing_the_manifest, "manifest.json"),
        (damage_the_manifest, "manifest.json"),
    ],
)
def test_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(copy, damage, named, caplog):
    last = list_checkpoints(copy)[-1]
    damage(last)
    with pytest.raises(CorruptCheckpointError, match=named):
        read_manifest(last)
    caplog.clear()
    import logging

    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        assert last_whole_checkpoint(copy) == copy / "checkpoint-6"
    finally:
        logger.removeHandler(caplog.handler)
    assert "Refused checkpoint checkpoint-8" in caplog.text


def test_run_with_a_damaged_last_checkpoint_ends_alike(policy, whole, copy):
    damage_by_cutting(copy / "checkpoint-8")
    trainer = toy_trainer(policy, copy, config={"heldout_fraction": 0.4})
    with pytest.raises(CorruptCheckpointError, match="checkpoint-8"):
        trainer.train(resume_from_checkpoint=str(copy / "checkpoint-8"))
    resume(policy, copy)
    assert differences(end_state(whole), end_state(copy)) == []


def test_no_checkpoint_and_a_strangers_run_are_refused(policy, copy, tmp_path):
    with pytest.raises(ValueError, match="no whole checkpoint"):
        resume(policy, tmp_path / "empty")
    with pytest.raises(ValueError, match="checkpoint-8"):
        toy_trainer(policy, copy).train()
    with pytest.raises(ValueError, match="steps_per_iteration"):
        toy_trainer(policy, copy, config={"steps_per_iteration": 8, "outer_iterations": 2}).train(
            resume_from_checkpoint=True
        )


def test_old_checkpoints_are_pruned_with_all_their_parts(policy, tmp_path):
    output = tmp_path / "run"
    toy_trainer(policy, output, config={"save_total_limit": 2}).train()
    assert [path.name for path in list_checkpoints(output)] == ["checkpoint-6", "checkpoint-8"]
    assert not list(output.glob(".*"))
    for checkpoint in list_checkpoints(output):
        names = {name.split("/")[1] for name in read_manifest(checkpoint)["files"] if name.startswith("iterative/")}
        assert {"samples", "replay", "reward_model", "initial_reward_model", "state.json"} <= names
    # What no kept checkpoint needs is gone from the working directory too.
    kept = {path.name for path in (output / "iterative").glob("iteration-*")}
    assert kept == {"iteration-0001", "iteration-0002"}


def test_prune_keeps_the_newest_and_the_protected(tmp_path):
    for step in (2, 4, 10, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert prune_checkpoints(tmp_path, None) == []
    assert prune_checkpoints(tmp_path, 2, keep=tmp_path / "checkpoint-2") == ["checkpoint-4", "checkpoint-10"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-100"]


def test_directory_is_published_whole_or_not_at_all(tmp_path, monkeypatch):
    staged, final = tmp_path / ".staging" / "checkpoint-4", tmp_path / "checkpoint-4"
    staged.mkdir(parents=True)
    (staged / "a").write_text("new")
    write_manifest(staged, step=4)
    final.mkdir()
    (final / "a").write_text("old")
    renames = []
    original = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: (renames.append(Path(b).name), original(a, b)))
    publish(staged, final)
    assert renames == [".removed-checkpoint-4", "checkpoint-4"]
    assert read_manifest(final)["step"] == 4
    assert (final / "a").read_text() == "new"
    remove(final)
    assert list(tmp_path.iterdir()) == [tmp_path / ".staging"]


def test_reference_of_a_synced_run_survives_a_save(policy, tmp_path):
    """What GRPOPlusTrainer needs with `sync_ref_model=True`, where stock TRL goes on with the base model."""
    args = GRPOPlusConfig(
        str(tmp_path),
        beta=0.1,
        per_device_train_batch_size=4,
        num_generations=4,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )

    def make():
        return GRPOPlusTrainer(
            policy, lambda completions, **_: [0.0] * len(completions), args, make_problems(4, seed=0)
        )

    trainer = make()
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter.add_(0.5)
    save_reference(trainer, tmp_path)
    other = make()
    assert not torch.equal(next(other.ref_model.parameters()), next(trainer.ref_model.parameters()))
    module = other.ref_model
    load_reference(other, tmp_path)
    assert other.ref_model is module
    assert differences(trainer.ref_model.state_dict(), other.ref_model.state_dict()) == []
    (tmp_path / "reference.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match="base model"):
        load_reference(other, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--kills", "5", "--seed", "3"], ["--kills", "5", "--seed", "3", "--kind", "process"], ["--points"]],
    ids=["outcome", "process", "points"],
)
def test_killed_runs_end_where_the_uninterrupted_one_ends(options):
    script = Path(__file__).with_name("iterative_kill.py")
    command = [sys.executable, str(script), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["kills"] >= 5
    assert summary["differences"] == []
