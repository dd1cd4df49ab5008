"""The window's gradient on two ranks is the one of a single batch of the same 16 completions."""

from pathlib import Path

import pytest
import torch
from launch import launch
from normalization_case import LENGTHS, expected_gradient
from run_normalization import KL, PAIRS
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.distributed

# Per rank; in the second cut each group lies on both ranks and the window has two generation batches.
CUTS = [(2, 4, 4), (1, 8, 4)]


def test_two_ranks_give_the_gradient_of_the_whole_window(tiny_policy, tmp_path):
    cuts = [",".join(map(str, cut)) for cut in CUTS]
    launch(Path(__file__).with_name("run_normalization.py"), tiny_policy, str(tmp_path), *cuts)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    model = AutoModelForCausalLM.from_pretrained(tiny_policy)
    for cut in CUTS:
        rows = ranks[0][cut, "rows"] + ranks[1][cut, "rows"]
        assert sorted(int(row["completion_mask"].sum()) for row in rows) == sorted(
            n for group in LENGTHS for n in group
        )
        for mode, surrogate in PAIRS:
            expected = expected_gradient(model, rows, mode, surrogate, KL["beta"])
            for rank in ranks:
                scale = max(float(expected.abs().max()), 1.0)
                torch.testing.assert_close(rank[cut, mode, surrogate], expected, rtol=0, atol=1e-6 * scale)
