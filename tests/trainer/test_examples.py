"""The examples run to their end, at a size at which nothing is learned."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, directory: Path, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
def test_demo_prm_labels_trains_measures_and_uses_a_reward_model(tmp_path):
    output = run("demo_prm.py", tmp_path, "--problems", "60", "--prm-steps", "9", "--steps", "1")
    results = json.loads((tmp_path / "demo-prm" / "results.json").read_text())
    assert results["soft_labels"]["auc"] > 0.9 and 0 < results["prm"]["auc"] < 1
    for name, process_reward, beta in (("the PRM", "prm", 0.04), ("the exact checker", "exact", 0.0)):
        assert results[name]["before"]["num_problems"] == 500 and name in output
        own = json.loads((tmp_path / "demo-prm" / f"quickstart-{process_reward}" / "results.json").read_text())
        assert own["settings"]["process_reward"].endswith(process_reward) and own["settings"]["beta"] == beta
        assert own["gain"] == results[name]["gain"]


@pytest.mark.slow
def test_iterative_retrains_its_reward_model(tmp_path):
    run("iterative.py", tmp_path, "--demo", "--cpu", "--steps-per-iteration", "1")
    state = json.loads((tmp_path / "runs" / "iterative" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert [log["iteration"] for log in state["log_history"] if "iteration" in log] == [1, 2]
