"""A group that lies on two ranks is normalised as one."""

from pathlib import Path

import pytest
import torch
from launch import launch
from run_process_rewards import character_codes, outcome
from transformers import AutoTokenizer

from trl_grpo_plus.algorithms.advantages import process_advantages
from trl_grpo_plus.algorithms.steps import split_steps_batch, step_texts

pytestmark = pytest.mark.distributed


def test_group_over_two_ranks(tiny_policy, tmp_path):
    launch(Path(__file__).with_name("run_process_rewards.py"), tiny_policy, str(tmp_path))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    ids = ranks[0]["ids"] + ranks[1]["ids"]
    assert ranks[0]["ids"] != ranks[1]["ids"]

    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    ends = split_steps_batch(ids, tokenizer, "[aeiou]")
    steps = [step_texts(row, row_ends, tokenizer) for row, row_ends in zip(ids, ends, strict=True)]
    scores = character_codes(None, None, None, steps)
    for i, (row, texts) in enumerate(zip(ids, steps, strict=True)):
        if row[-1] not in (tokenizer.eos_token_id, tokenizer.pad_token_id) and texts[-1].rstrip()[-1:] not in tuple(
            "aeiou"
        ):
            scores[i] = [*scores[i][:-1], None]
    rewards = torch.tensor(outcome(tokenizer.batch_decode(ids, skip_special_tokens=True)))
    expected = process_advantages(scores, ends, 6, 12, baseline="leave_one_out")
    expected += ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).unsqueeze(1)

    for rank, rows in ((0, slice(0, 3)), (1, slice(3, 6))):
        actual = ranks[rank]["advantages"]
        torch.testing.assert_close(actual, expected[rows, : actual.shape[1]], atol=1e-5, rtol=1e-5)
    means = [expected[i, : len(row)].mean().item() for i, row in enumerate(ids)]
    assert ranks[0]["logged"] == pytest.approx(means, abs=1e-5) == ranks[1]["logged"]
    mean_steps = sum(map(len, ends)) / 6
    assert ranks[0]["steps_per_completion"] == ranks[1]["steps_per_completion"] == [pytest.approx(mean_steps)]

    weights = [torch.load(tmp_path / f"weights{rank}.pt") for rank in (0, 1)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
