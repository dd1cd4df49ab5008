"""EvalCallback on two gloo ranks: each samples its share of the problems, and the numbers are those of one rank."""

import json
from pathlib import Path

import pytest
from launch import launch

SCRIPT = Path(__file__).with_name("run_eval_callback.py")


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_log_what_one_logs(tmp_path):
    for ranks, per_device in ((1, 8), (2, 4)):
        (tmp_path / str(ranks)).mkdir()
        launch(SCRIPT, str(tmp_path / str(ranks)), str(per_device), num_processes=ranks)
    one, two = (json.loads((tmp_path / name / "history.json").read_text()) for name in "12")
    assert one == two
    assert [h["step"] for h in one] == [0, 2]
    assert one[0]["maj@2"] > 0
    samples = [(tmp_path / name / "evaluation" / "samples_000002.jsonl").read_text() for name in "12"]
    assert samples[0] == samples[1]
    assert len(samples[0].splitlines()) == 11 * 3
