"""The reward models of this package as the iterative loop trains them, and where their labels come from."""

import pytest
import torch
from datasets import Dataset
from iterative_kill import differences
from iterative_toys import save_tiny_policy, toy_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    TrainerCallback,
)

from trl_grpo_plus.algorithms.steps import split_steps, step_texts
from trl_grpo_plus.demo import load_demo_policy, load_demo_tokenizer, make_problems
from trl_grpo_plus.iterative.graders import RolloutLabeler, rule_grader
from trl_grpo_plus.iterative.phases import accuracy, isolated_rng
from trl_grpo_plus.iterative.replay import make_samples
from trl_grpo_plus.iterative.reward_model import FitSettings, as_updatable, make_pairs
from trl_grpo_plus.reward_models import OutcomeRewardModel, ProcessRewardModel, sample_completions


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


def samples(count=32) -> Dataset:
    """Right completions say `= 7`, wrong ones `= 3`."""
    texts = [f"{i % 5} + 2 = {7 if i % 2 == 0 else 3}" for i in range(count)]
    return make_samples(
        {
            "prompt": [f"Tom has {i // 4} apples.\n" for i in range(count)],
            "completion": texts,
            "steps": [[text] for text in texts],
            "step_labels": [[float(i % 2 == 0)] for i in range(count)],
            "correct": [float(i % 2 == 0) for i in range(count)],
        },
        1,
    )


def make(policy, kind):
    tokenizer = load_demo_tokenizer()
    with isolated_rng(0):
        if kind == "process":
            return as_updatable(
                ProcessRewardModel(AutoModelForTokenClassification.from_pretrained(policy, num_labels=2), tokenizer)
            )
        model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    return as_updatable(OutcomeRewardModel(model, tokenizer, output="logit" if kind == "pairwise" else "probability"))


def config(tmp_path, kind, **overrides):
    values = {"reward_model_learning_rate": 0.01, "reward_model_epochs": 8, "learning_rate_scope": "iteration"}
    loss = "pairwise" if kind == "pairwise" else "pointwise"
    return toy_config(tmp_path, reward_model_loss=loss, **{**values, **overrides})


def fit(reward_model, args, tmp_path, state=None, iteration=1):
    settings = FitSettings(args, iteration, 5, tmp_path / "scratch")
    with isolated_rng(5):
        return reward_model.fit(samples(), settings, state)


@pytest.mark.parametrize("kind", ["outcome", "pairwise", "process"])
def test_each_kind_learns_and_takes_up_its_optimizer(policy, tmp_path, kind):
    args = config(tmp_path, kind)
    reward_model = make(policy, kind)
    before = accuracy(reward_model, samples(), args)
    initial = {name: value.clone() for name, value in reward_model.state_dict().items()}
    loss, state = fit(reward_model, args, tmp_path)
    assert accuracy(reward_model, samples(), args) == 1.0 > before
    steps = {int(entry["step"]) for entry in state["state"].values()}
    # Eight epochs of 32 samples, or of 16 pairs, in batches of 8.
    assert steps == {8 * (2 if kind == "pairwise" else 4)}
    # Going on from the state is not the same as starting with a new optimizer.
    trained = {name: value.clone() for name, value in reward_model.state_dict().items()}
    fit(reward_model, args, tmp_path, state)
    carried = {name: value.clone() for name, value in reward_model.state_dict().items()}
    reward_model.load_state_dict(trained)
    fit(reward_model, args, tmp_path, None)
    assert differences(carried, reward_model.state_dict())
    # The same data, seed and start give the same weights, and no gradients are kept.
    reward_model.load_state_dict(initial)
    again, _ = fit(reward_model, args, tmp_path)
    assert again == loss
    assert differences(trained, reward_model.state_dict()) == []
    assert all(parameter.grad is None for parameter in reward_model.reward_model.model.parameters())


@pytest.mark.parametrize("scope", ["run", "iteration"])
def test_learning_rates_of_an_update(policy, tmp_path, scope, monkeypatch):
    from trl_grpo_plus.reward_models import ORMTrainer

    rates = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            rates.append(optimizer.param_groups[0]["lr"])

    original = ORMTrainer.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs, callbacks=[Look()])

    monkeypatch.setattr(ORMTrainer, "__init__", init)
    args = config(tmp_path, "outcome", reward_model_epochs=1, learning_rate_scope=scope, outer_iterations=2)
    reward_model = make(policy, "outcome")
    _, state = fit(reward_model, args, tmp_path)
    fit(reward_model, args, tmp_path, state, iteration=2)
    run = [0.01 * (1 - step / 8) for step in range(8)]
    iteration = [0.01 * (1 - step / 4) for step in range(4)] * 2
    assert rates == pytest.approx(run if scope == "run" else iteration)


def test_pairs_are_of_one_prompt_and_use_every_sample_of_the_larger_class():
    data = Dataset.from_dict(
        {
            "prompt": ["a"] * 5 + ["b"] * 2 + ["c"],
            "completion": ["r1", "w1", "w2", "w3", "w4", "r2", "r3", "w5"],
            "correct": [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0],
        }
    )
    pairs = make_pairs(data, seed=0)
    assert pairs["prompt"][:] == ["a"] * 4
    assert pairs["chosen"][:] == ["r1"] * 4
    assert sorted(pairs["rejected"]) == ["w1", "w2", "w3", "w4"]
    assert make_pairs(data.select([5, 6, 7]), seed=0) is None


def test_pairwise_update_without_pairs_changes_nothing(policy, tmp_path):
    reward_model = make(policy, "pairwise")
    before = {name: value.clone() for name, value in reward_model.state_dict().items()}
    settings = FitSettings(config(tmp_path, "pairwise"), 1, 5, tmp_path / "scratch")
    state = {"carried": torch.tensor(1.0)}
    only_right = samples().filter(lambda row: row["correct"] == 1.0)
    assert reward_model.fit(only_right, settings, state) == (None, state)
    assert differences(before, reward_model.state_dict()) == []


def test_roll_outs_label_each_step_with_the_share_of_right_answers(tmp_path):
    tokenizer, model = load_demo_tokenizer(), load_demo_policy().eval()
    args = toy_config(tmp_path, rollouts_per_step=16, max_completion_length=40)
    labeler = RolloutLabeler(lambda: model, tokenizer, args, rule_grader("answer"))
    rows = sample_completions(
        make_problems(2, seed=3), model, tokenizer, num_samples=4, max_new_tokens=40, progress=False
    )
    steps = [step_texts(ids, split_steps(ids, tokenizer, "newline"), tokenizer) for ids in rows["completion_ids"]]
    labels = labeler(
        prompts=rows["prompt"][:],
        completions=rows["completion"][:],
        completion_ids=rows["completion_ids"][:],
        steps=steps,
        answer=rows["answer"][:],
    )
    verdicts = rule_grader("answer")(prompts=None, completions=rows["completion"][:], answer=rows["answer"][:])
    assert {0.0, 1.0} <= set(verdicts)
    right_so_far, lost = [], []
    for row, texts, scores, verdict in zip(rows, steps, labels, verdicts, strict=True):
        assert len(scores) == len(texts)
        assert scores[-1] == verdict
        gold = row["solution_steps"]
        for j, score in enumerate(scores[:-1]):
            assert score * 16 == int(score * 16)
            is_right = [text.strip() for text in texts[: j + 1]] == gold[: j + 1]
            (right_so_far if is_right else lost).append(score)
    # A solution that slipped goes on from its wrong value, and is saved only by a second slip that makes up for it.
    assert sum(right_so_far) / len(right_so_far) > 0.4
    assert max(lost, default=0.0) < 0.4


def test_an_empty_completion_has_no_labels(tmp_path):
    labeler = RolloutLabeler(lambda: None, None, toy_config(tmp_path), rule_grader("answer"))
    assert labeler(prompts=["p"], completions=[""], completion_ids=[[]], steps=[[]], answer=["#### 1"]) == [[]]
    with pytest.raises(ValueError, match="answer_column"):
        labeler(prompts=["p"], completions=[""], completion_ids=[[]], steps=[[]])


def test_paths_tell_their_kind(policy, tmp_path):
    for kind in ("outcome", "process"):
        make(policy, kind).save_pretrained(tmp_path / kind)
        assert as_updatable(str(tmp_path / kind)).granularity == kind
    scorer = ProcessRewardModel(AutoModelForCausalLM.from_pretrained(policy), load_demo_tokenizer(), "rlhflow")
    with pytest.raises(ValueError, match="rlhflow"):
        as_updatable(scorer)
    with pytest.raises(TypeError, match="cannot be trained"):
        as_updatable(lambda **_: [])
