"""The quickstart as a user meets it: it learns, shows what it did, and answers wrong options in one line."""

import json

import pytest
import torch
from transformers import AutoModelForTokenClassification

from trl_grpo_plus.cli import main as cli
from trl_grpo_plus.demo import training
from trl_grpo_plus.demo.command import main
from trl_grpo_plus.demo.policy import WEIGHTS_DIR


def test_a_short_run_learns_and_leaves_its_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "NUM_EVALUATIONS", 1)
    assert cli(["quickstart", "--steps", "30", "--seed", "0", "--output-dir", str(tmp_path)]) == 0

    results = json.loads((tmp_path / "results.json").read_text())
    before, after = results["evaluations"]
    assert before["step"] == 0 and after["step"] == 30
    assert before["sampled"]["num_problems"] == 500
    assert 0.45 < before["sampled"]["accuracy"] < 0.65 and before["greedy"]["accuracy"] > 0.95
    gain = after["sampled"]["accuracy"] - before["sampled"]["accuracy"]
    assert gain > 0.08
    assert results["gain"] == pytest.approx(100 * gain)
    assert after["sampled"]["low"] < after["sampled"]["accuracy"] < after["sampled"]["high"]
    assert len(results["rewards"]) == len(results["step_rewards"]) == 30
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    tokenizer, policy = (
        training.load_demo_tokenizer(tmp_path / "policy"),
        training.load_demo_policy(tmp_path / "policy"),
    )
    problems = training.make_problems(training.NUM_HELD_OUT_PROBLEMS, training.HELD_OUT_SEED, "test")
    again = training.evaluate(policy, tokenizer, problems)
    assert again.greedy.accuracy == pytest.approx(after["greedy"]["accuracy"], abs=0.005)

    _check_example(results["example"])
    captured = capsys.readouterr()
    assert "500 held-out problems" in captured.out and "Next: trl-grpo-plus " in captured.out
    assert "Warning" not in captured.out + captured.err
    assert len(captured.out.splitlines()) < 50


def _check_example(steps):
    """The advantages are constant in a step, 0 after the last scored one, and lower where a false step is to come."""
    to_go = []
    for step in steps:
        assert len(set(step["advantages"])) == 1 and len(step["tokens"]) == len(step["advantages"])
        to_go.append(step["advantages"][0])
    scores = [step["score"] for step in steps]
    assert scores[-1] is None and to_go[-1] == 0
    assert set(scores[:-1]) == {0, 1}
    own = [a - b for a, b in zip(to_go, [*to_go[1:], 0], strict=True)]
    normalized = {score: {round(r, 4) for r, s in zip(own, scores, strict=True) if s == score} for score in (0, 1)}
    assert len(normalized[0]) == len(normalized[1]) == 1
    assert normalized[0].pop() < 0 < normalized[1].pop()


@pytest.mark.parametrize("supervision", ["outcome", "both"])
def test_other_supervisions_run(supervision, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "NUM_EVALUATIONS", 1)
    monkeypatch.setattr(training, "NUM_HELD_OUT_PROBLEMS", 20)
    argv = ["--supervision", supervision, "--steps", "2", "--no-plot", "--output-dir", str(tmp_path)]
    assert main(argv) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    example = results["example"]
    assert not (tmp_path / "curves.png").exists()
    if supervision == "outcome":
        assert results["step_rewards"] == [] and {step["score"] for step in example} == {None}
        assert len({a for step in example for a in step["advantages"]}) == 1
    else:
        assert len({a for step in example for a in step["advantages"]}) > 1
        assert example[-1]["advantages"][0] != 0  # the outcome's, since the answer line has no step score


def count_tokens(steps, **kwargs):
    return [[float(len(text)) for text in texts] for texts in steps]


def test_own_process_reward_by_dotted_path(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "NUM_EVALUATIONS", 1)
    monkeypatch.setattr(training, "NUM_HELD_OUT_PROBLEMS", 20)
    name = f"{__name__}.count_tokens"
    assert main(["--process-reward", name, "--steps", "1", "--no-plot", "--output-dir", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["settings"]["process_reward"] == name
    assert all(step["score"] == len("".join(step["tokens"]).replace("<eos>", "")) for step in results["example"])


def test_process_reward_model_by_directory(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "NUM_EVALUATIONS", 1)
    monkeypatch.setattr(training, "NUM_HELD_OUT_PROBLEMS", 20)
    model = AutoModelForTokenClassification.from_pretrained(WEIGHTS_DIR, num_labels=2, dtype=torch.float32)
    model.save_pretrained(tmp_path / "prm")
    training.load_demo_tokenizer().save_pretrained(tmp_path / "prm")
    argv = ["--process-reward", str(tmp_path / "prm"), "--steps", "1", "--no-plot", "--output-dir", str(tmp_path)]
    assert main(argv) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["settings"]["beta"] == 0.04
    assert "kl" in json.loads((tmp_path / "trainer_state.json").read_text())["log_history"][0]
    scores = [step["score"] for step in results["example"]]
    assert all(0 < score < 1 for score in scores) and len(set(scores)) == len(scores)


def test_credit_and_beta_reach_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "NUM_EVALUATIONS", 1)
    monkeypatch.setattr(training, "NUM_HELD_OUT_PROBLEMS", 20)
    advantages = {}
    for credit, beta in (("sum", "0"), ("min", "0.1"), ("mean", "0")):
        directory = tmp_path / credit
        argv = ["--credit", credit, "--beta", beta, "--steps", "1", "--no-plot", "--output-dir", str(directory)]
        assert main(argv) == 0
        example = json.loads((directory / "results.json").read_text())["example"]
        advantages[credit] = [step["advantages"][0] for step in example if step["score"] is not None]
        logs = json.loads((directory / "trainer_state.json").read_text())["log_history"]
        assert ("kl" in logs[0]) == (beta != "0")
    total, mean = advantages["sum"], advantages["mean"]
    # The mean form is the sum divided by the number of scored steps to go.
    assert mean == pytest.approx([value / (len(total) - j) for j, value in enumerate(total)], abs=1e-5)
    assert advantages["min"] != pytest.approx(total, abs=1e-2)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--supervision", "steps"], "--supervision: invalid choice: 'steps'"),
        (["--steps", "0"], "--steps: must be a whole number of at least 1, got '0'"),
        (["--steps", "many"], "--steps: must be a whole number of at least 1, got 'many'"),
        (["--beta", "-0.1"], "--beta: must be a number of at least 0, got '-0.1'"),
        (["--beta", "nan"], "--beta: must be a number of at least 0, got 'nan'"),
        (["--seed", "-1"], "--seed: must be a whole number of at least 0, got '-1'"),
        (["--process-reward", "no.such.function"], "neither 'arithmetic' nor 'exact', nor a directory"),
        (["--process-reward", "math.pi"], "is a float, not a function"),
        (["--process-reward", "exact", "--supervision", "outcome"], "no effect with --supervision outcome"),
        (["--output-dir", __file__], "is a file"),
        (["--epochs", "3"], "unrecognized arguments: --epochs 3"),
    ],
)
def test_wrong_options_are_one_clear_line(argv, message, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert len(captured.err.splitlines()) == 1 and captured.err.startswith("trl-grpo-plus quickstart: ")


def test_a_directory_without_a_reward_model_is_named(tmp_path, capsys):
    assert main(["--process-reward", str(tmp_path)]) == 2
    assert "holds no process reward model" in capsys.readouterr().err


def test_missing_matplotlib_is_told_before_training(capsys, monkeypatch):
    from trl_grpo_plus.demo import command

    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert main([]) == 2
    assert "pip install 'trl-grpo-plus[plots]'" in capsys.readouterr().err


def test_evaluation_leaves_the_random_state_alone():
    tokenizer, policy = training.load_demo_tokenizer(), training.load_demo_policy()
    problems = training.make_problems(20, 0, "test")
    state = torch.get_rng_state()
    first = training.evaluate(policy.train(), tokenizer, problems, step=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert first == training.evaluate(policy, tokenizer, problems, step=3) and policy.training


@pytest.mark.slow
def test_the_default_run_gains_20_points(tmp_path):
    assert main(["--seed", "1", "--output-dir", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["gain"] > 20
    assert results["evaluations"][-1]["greedy"]["accuracy"] > 0.9
