"""Two ranks with the KL in every placement, with process rewards, are one rank with the same 16 completions."""

from pathlib import Path

import pytest
import torch
from launch import launch
from run_kl import PLACEMENTS, run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_two_ranks_are_one(tiny_policy, tmp_path):
    launch(Path(__file__).with_name("run_kl.py"), tiny_policy, str(tmp_path))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    whole = run(tiny_policy, str(tmp_path / "one"), (4, 4, 4))
    for name in PLACEMENTS:
        expected = whole[name]
        assert expected["coefficient"] == pytest.approx(0.3 * (1 + 0.2 * 16 / 100))
        for rank in ranks:
            torch.testing.assert_close(rank[name]["gradient"], expected["gradient"], rtol=0, atol=1e-6)
            assert rank[name]["coefficient"] == ranks[0][name]["coefficient"] == expected["coefficient"]
            # Micro-batches differ, and the log is their mean.
            assert rank[name]["kl"] == ranks[0][name]["kl"]
        assert expected["gradient"].norm() > 0.01
