"""`trl-grpo-plus train`: YAML, overrides, local data, and one clear line for what is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trl_grpo_plus.cli import main
from trl_grpo_plus.train_command import parse, resolve_function

REWARDS = """
def short(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]


def per_step(prompts, completions, completion_ids, steps, question, **kwargs):
    assert len(question) == len(steps)
    return [[float(len(step)) for step in completion] for completion in steps]
"""


@pytest.fixture
def workplace(tiny_policy, tmp_path, monkeypatch):
    """A folder with data, reward functions and a configuration; the command runs there."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    rows = [{"question": f"{i}+1=", "answer": f"#### {i + 1}"} for i in range(16)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {
        "model_name_or_path": tiny_policy,
        "dataset": "train.jsonl",
        "prompt": "plain",
        "reward_funcs": ["my_rewards.short"],
        "process_reward_funcs": ["my_rewards.per_step"],
        "step_delimiter": "[aeiou]",
        "output_dir": "out",
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def test_train_runs_saves_and_tells_the_next_step(workplace, capsys):
    assert main(["train", "config.yaml", "--max_steps", "3", "--process_weight", "0.25"]) == 0
    printed = capsys.readouterr().out
    assert "trl-grpo-plus report out" in printed and "process/per_step/step_mean" in printed
    state = json.loads((workplace / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 3
    assert (workplace / "out" / "model.safetensors").exists()


def test_every_field_can_be_overridden(workplace):
    arguments, config, model_config = parse(
        [
            "--config",
            "config.yaml",
            "--credit_assignment",
            "min",
            "--learning_rate",
            "0.5",
            "--use_peft",
            "--dataset",
            "x",
        ]
    )
    assert (config.credit_assignment, config.learning_rate, config.max_steps) == ("min", 0.5, 2)
    assert model_config.use_peft and arguments.dataset == "x"


@pytest.mark.slow
def test_two_ranks_resume_and_peft(workplace):
    from launch import launch  # tests/distributed

    script = workplace / "run.py"
    script.write_text("import sys\nfrom trl_grpo_plus.cli import main\nsys.exit(main(sys.argv[1:]))\n")
    lora = ["--use_peft", "--lora_target_modules", "q_proj", "v_proj"]
    launch(script, "train", "config.yaml", *lora, "--save_steps", "1")
    assert (workplace / "out" / "adapter_model.safetensors").exists()
    launch(script, "train", "config.yaml", *lora, "--max_steps", "3", "--resume_from_checkpoint", "true")
    assert json.loads((workplace / "out" / "trainer_state.json").read_text())["global_step"] == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--dataset", "gone.jsonl"], "gone.jsonl does not exist"),
        (["--dataset", "empty.jsonl"], "empty.jsonl is empty"),
        (["--dataset", "broken.jsonl"], "broken.jsonl:2 is not JSON"),
        (["--question_column", "problem"], "no column 'problem' among question, answer"),
        (["--reward_funcs", "my_rewards.none_such"], "reward_funcs: cannot import 'my_rewards.none_such'"),
        (["--process_reward_funcs", "no_module.f"], "process_reward_funcs: cannot import 'no_module.f'"),
        (["--prompt", "no-such"], "prompt 'no-such' is neither a file nor one of"),
        (["--credit_assignment", "max"], "invalid choice"),
        (["--max_train_samples", "0"], "must be at least 1"),
        (["--eval_strategy", "steps"], "set eval_dataset"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(workplace, capsys, overrides, message):
    (workplace / "empty.jsonl").write_text("")
    (workplace / "broken.jsonl").write_text('{"question": "1", "answer": "1"}\n{"question"')
    assert main(["train", "config.yaml", *overrides]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("trl-grpo-plus train: ") and message in error


def test_no_reward_and_unknown_field(workplace, capsys):
    config = yaml.safe_load(Path("config.yaml").read_text())
    Path("none.yaml").write_text(yaml.safe_dump({**config, "reward_funcs": None, "process_reward_funcs": None}))
    assert main(["train", "none.yaml"]) == 2
    assert "no reward: set reward_funcs" in capsys.readouterr().err
    Path("typo.yaml").write_text(yaml.safe_dump({**config, "proces_weight": 1}))
    assert main(["train", "typo.yaml"]) == 2
    assert "proces_weight" in capsys.readouterr().err


def test_functions_are_found_by_name_and_paths_stay_paths(tiny_policy):
    import reward_fns

    assert resolve_function("reward_fns.step_arithmetic_reward", "x") is reward_fns.step_arithmetic_reward
    assert resolve_function("step_arithmetic_reward", "x") is reward_fns.step_arithmetic_reward
    assert resolve_function(tiny_policy, "x") == tiny_policy
    assert resolve_function("org/model", "x") == "org/model"


@pytest.mark.parametrize("command", ["train", "iterate", "train-prm"])
def test_every_field_is_listed(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help-all"])
    assert stop.value.code == 0 and "--learning_rate" in capsys.readouterr().out


def test_the_command_line_alone(capsys):
    done = subprocess.run([sys.executable, "-m", "trl_grpo_plus.cli"], capture_output=True, text=True)
    assert done.returncode == 2 and "train" in done.stdout
    assert main(["no-such-command"]) == 2
    assert "no command 'no-such-command'" in capsys.readouterr().err
    assert main(["train"]) == 2 and main(["train", "--help"]) == 0
