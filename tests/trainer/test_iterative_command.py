"""`trl-grpo-plus iterate`: errors, the order of phases, and a process for each phase."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from iterative_kill import differences, end_state
from iterative_toys import BagOfWords, save_tiny_policy, toy_config, toy_trainer

from trl_grpo_plus.iterative.command import main, next_phase, parse
from trl_grpo_plus.iterative.plots import plot_iterations
from trl_grpo_plus.iterative.start import read_initial_samples
from trl_grpo_plus.iterative.workdir import WorkDirectory, record_metrics

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"
TINY = {
    "model_name_or_path": "demo",
    "dataset": "demo",
    "max_train_samples": 24,
    "reward_model": "new-outcome",
    "initial_samples": 16,
    "reward_model_learning_rate": 1e-3,
    "reward_model_batch_size": 8,
    "heldout_fraction": 0.2,
    "outer_iterations": 2,
    "steps_per_iteration": 1,
    "learning_rate": 2e-4,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 24,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": [],
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


def write(path: Path, **overrides) -> str:
    path.write_text(yaml.safe_dump({**TINY, **overrides}))
    return str(path)


def test_usage_and_errors(tmp_path, capsys):
    assert main(["--help"]) == 0
    assert "--separate_processes" in capsys.readouterr().out
    assert main([]) == 2
    capsys.readouterr()
    for overrides, named in (
        ({"reward_model": ""}, "reward_model"),
        ({"dataset": ""}, "dataset"),
        ({"steps_per_iteration": 0}, "steps_per_iteration"),
        ({"grader": "no.such.module"}, "no.such.module"),
    ):
        config = write(tmp_path / "config.yaml", output_dir=str(tmp_path / "out"), **overrides)
        assert main([config]) == 2
        assert named in capsys.readouterr().err
    config = write(tmp_path / "config.yaml", output_dir=str(tmp_path / "out"))
    assert main([config, "--phase", "label"]) == 2
    assert "next is 'policy'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["iterative_demo.yaml", "iterative_deepseekmath.yaml"])
def test_example_configs_parse(name):
    arguments, config, _ = parse(["--config", str(EXAMPLES / name), "--use_cpu", "true", "--bf16", "false"])
    assert arguments.reward_model in ("new-outcome", "new-process")
    assert config.max_steps == config.outer_iterations * config.steps_per_iteration
    if "deepseekmath" in name:
        figures = (config.learning_rate, config.reward_model_learning_rate, config.beta, config.num_generations)
        assert figures == (1e-6, 2e-5, 0.04, 64)
        assert (config.max_completion_length, config.num_iterations, config.replay_fraction) == (1024, 1, 0.1)
        per_process = config.per_device_train_batch_size * config.gradient_accumulation_steps
        assert per_process * 8 == 1024


def test_phases_follow_from_the_files(policy, tmp_path):
    args = toy_config(tmp_path)
    assert next_phase(tmp_path, args) == ("policy", 1)
    config = {"heldout_fraction": 0.4}
    toy_trainer(policy, tmp_path, BagOfWords(), config, phase="policy").train()
    assert next_phase(tmp_path, args) == ("label", 1)
    trainer = toy_trainer(policy, tmp_path, BagOfWords(), config, phase="policy")
    with pytest.raises(ValueError, match="label"):
        trainer.train(resume_from_checkpoint=True)
    trainer.run_label_phase(1)
    assert next_phase(tmp_path, args) == ("reward-model", 1)
    trainer.run_reward_model_phase(1)
    assert next_phase(tmp_path, args) == ("policy", 2)
    trainer = toy_trainer(policy, tmp_path, BagOfWords(), config, phase="policy")
    trainer.train(resume_from_checkpoint=True)
    assert next_phase(tmp_path, args) == ("label", 2)
    toy_trainer(policy, tmp_path, BagOfWords(), config).train(resume_from_checkpoint=True)
    assert next_phase(tmp_path, args) == ("done", 2)
    # Phase by phase it is the same run.
    toy_trainer(policy, tmp_path / "whole", BagOfWords(), config).train()
    assert differences(end_state(tmp_path / "whole"), end_state(tmp_path))[:3] == []


def test_metrics_of_an_iteration_replace_later_ones(tmp_path):
    work = WorkDirectory(tmp_path)
    for iteration in (1, 2):
        for directory in (work.labelled(iteration), work.reward_model(iteration)):
            directory.mkdir(parents=True)
            (directory / "metrics.json").write_text(json.dumps({directory.name: iteration}))
        record_metrics(work, iteration, 10)
    assert [entry["iteration"] for entry in json.loads(work.metrics.read_text())] == [1, 2]
    assert record_metrics(work, 1, 10) == {"iteration": 1, "step": 10, "label": 1, "reward_model": 1}
    assert [entry["iteration"] for entry in json.loads(work.metrics.read_text())] == [1]


def test_plot_of_a_run(policy, tmp_path):
    with pytest.raises(ValueError, match="No iteration"):
        plot_iterations(tmp_path)
    toy_trainer(policy, tmp_path, config={"save_strategy": "no", "heldout_fraction": 0.4}).train()
    path = plot_iterations(tmp_path)
    assert path == tmp_path / "iterations.png"
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_one_process_and_one_for_each_phase_end_alike(tmp_path):
    config = write(tmp_path / "config.yaml")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, more in (("one", []), ("many", ["--separate_processes", "true"])):
        command = [sys.executable, "-m", "trl_grpo_plus.cli", "iterate", config, "--output_dir", str(tmp_path / name)]
        done = subprocess.run([*command, *more], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "iterations" in done.stdout
    assert differences(end_state(tmp_path / "one"), end_state(tmp_path / "many")) == []
    for name in ("one", "many"):
        assert (tmp_path / name / "reward_model" / "model.safetensors").exists()
        assert (tmp_path / name / "model.safetensors").exists()
    samples = read_initial_samples(tmp_path / "one" / "initial_reward_model")
    assert len(samples) == 16
    assert set(samples["correct"]) <= {0.0, 1.0}
