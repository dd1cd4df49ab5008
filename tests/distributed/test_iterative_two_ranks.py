"""Two gloo ranks make the same buffer and the same reward model as one."""

import json
from pathlib import Path

import pytest
import torch
from launch import launch
from trainer.iterative_toys import save_tiny_policy

from trl_grpo_plus.iterative import ReplayBuffer
from trl_grpo_plus.iterative.checkpoint import list_checkpoints, read_manifest

SCRIPT = Path(__file__).with_name("run_iterative.py")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["outcome", "process"])
def test_two_ranks_make_the_same_buffer_and_reward_model_as_one(tmp_path, kind):
    policy = save_tiny_policy(tmp_path / "policy")
    for ranks, per_device in ((1, 16), (2, 8)):
        launch(SCRIPT, policy, str(tmp_path / str(ranks)), kind, str(per_device), num_processes=ranks)

    one, two = (tmp_path / name for name in "12")
    buffers = []
    for output in (one, two):
        rows = list(ReplayBuffer(output / "iterative" / "iteration-0002" / "label" / "replay"))
        assert len(rows) > 30
        # Scores are the reward model's and may differ in the last digits.
        buffers.append([{key: value for key, value in row.items() if key != "scores"} for row in rows])
    assert buffers[0] == buffers[1]

    weights = [torch.load(one / "rank0.pt"), torch.load(two / "rank0.pt"), torch.load(two / "rank1.pt")]
    initial = torch.load(one / "iterative" / "initial_reward_model" / "weights.pt")
    moved = 0.0
    for name in weights[0]:
        assert torch.equal(weights[1][name], weights[2][name])
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-4, atol=2e-5)
        moved = max(moved, (weights[0][name] - initial[name]).abs().max().item())
    assert moved > 0.01

    metrics = [json.loads((output / "iterative" / "metrics.json").read_text()) for output in (one, two)]
    for left, right in zip(*metrics, strict=True):
        assert left["samples/history"] == right["samples/history"]
        assert left["reward_model/loss"] == pytest.approx(right["reward_model/loss"], rel=1e-4)
        assert left["reward_model/accuracy_after"] == right["reward_model/accuracy_after"]
    for checkpoint in list_checkpoints(two):
        names = read_manifest(checkpoint)["files"]
        assert {"rng_state_0.pth", "rng_state_1.pth"} <= names.keys()
