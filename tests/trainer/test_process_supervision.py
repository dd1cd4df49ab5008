"""GRPOPlusTrainer with process rewards: what reaches the tokens, in every configuration that TRL has."""

import re

import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig

from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer
from trl_grpo_plus.algorithms.advantages import process_advantages
from trl_grpo_plus.algorithms.steps import split_steps

VOWEL = "[aeiou]"


def distinct_characters(completions, **kwargs):
    """Outcome reward: TRL's signature."""
    return [float(len(set(completion))) for completion in completions]


def digit_steps(prompts, completions, completion_ids, steps, **kwargs):
    """Process reward: the number of digits of each step."""
    return [[float(sum(char.isdigit() for char in step)) for step in completion] for completion in steps]


def dataset(conversational=False):
    prompts = ["1+1=", "2+2=", "3+3=", "4+4="] * 4
    if conversational:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return Dataset.from_dict({"prompt": prompts, "answer": list("2468") * 4})


def make_trainer(
    policy, output_dir, *, process_reward_funcs=digit_steps, reward_funcs=distinct_characters, **overrides
):
    keys = ("train_dataset", "eval_dataset", "peft_config", "args", "callbacks")
    trainer_kwargs = {key: overrides.pop(key) for key in keys if key in overrides}
    values = {
        "output_dir": str(output_dir),
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 10,
        "step_delimiter": VOWEL,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    trainer_kwargs.setdefault("args", GRPOPlusConfig(**{**values, **overrides}))
    trainer_kwargs.setdefault("train_dataset", dataset())
    return GRPOPlusTrainer(
        policy,
        reward_funcs=reward_funcs,
        process_reward_funcs=process_reward_funcs,
        processing_class=AutoTokenizer.from_pretrained(policy),
        **trainer_kwargs,
    )


def rollout(trainer, prompts=("1+1=",) * 4, **columns):
    trainer.model.train()
    rows = [{"prompt": prompt, **{k: v[i] for k, v in columns.items()}} for i, prompt in enumerate(prompts)]
    return trainer._generate_and_score_completions(rows)


def completions_of(output):
    return [
        ids[: int(n)].tolist()
        for ids, n in zip(output["completion_ids"], output["completion_mask"].sum(1), strict=True)
    ]


def expected_process(trainer, output, score=digit_steps, keep_last=False, **options):
    """The advantages again, from the returned ids alone."""
    tokenizer, rewards, ends = trainer.processing_class, [], []
    for ids in completions_of(output):
        row_ends = split_steps(ids, tokenizer, VOWEL)
        steps = [tokenizer.decode(ids[a:b], skip_special_tokens=True) for a, b in spans(row_ends)]
        row = score(None, None, None, [steps])[0]
        cut = ids[-1] not in (tokenizer.eos_token_id, tokenizer.pad_token_id) and not re.search(
            VOWEL + r"\s*$", steps[-1]
        )
        rewards.append([*row[:-1], None] if cut and not keep_last else row)
        ends.append(row_ends)
    group_size = trainer.num_generations
    return process_advantages(rewards, ends, group_size, output["completion_ids"].shape[1], **options)


def spans(ends):
    return [(start + 1, end + 1) for start, end in zip([-1, *ends[:-1]], ends, strict=True)]


def trl_outcome(trainer, output):
    texts = trainer.processing_class.batch_decode(completions_of(output), skip_special_tokens=True)
    rewards = torch.tensor(distinct_characters(texts)).view(-1, trainer.num_generations)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def test_every_token_gets_outcome_plus_process(tiny_policy, tmp_path):
    trainer = make_trainer(tiny_policy, tmp_path, outcome_weight=0.5, process_weight=2.0, max_completion_length=32)
    output = rollout(trainer, ["1+1="] * 4 + ["2+2="] * 4)
    process = expected_process(trainer, output)
    expected = 0.5 * trl_outcome(trainer, output).unsqueeze(1) + 2.0 * process
    assert output["advantages"].shape == output["completion_ids"].shape
    assert len(process.unique()) > 8
    torch.testing.assert_close(output["advantages"], expected, atol=1e-5, rtol=1e-5)


def test_process_rewards_alone(tiny_policy, tmp_path):
    trainer = make_trainer(tiny_policy, tmp_path, reward_funcs=None)
    output = rollout(trainer)
    torch.testing.assert_close(output["advantages"], expected_process(trainer, output), atol=1e-5, rtol=1e-5)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["reward"] == pytest.approx(log["rewards/mean_step_reward/mean"])


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"credit_assignment": "min", "credit_tau": 0.5}, {"credit": "min", "tau": 0.5}),
        ({"credit_assignment": "mean", "process_std": "population"}, {"credit": "mean", "std": "population"}),
        ({"credit_gamma": 0.9, "process_eps": 0.1}, {"gamma": 0.9, "eps": 0.1}),
        ({"process_baseline": "leave_one_out"}, {"baseline": "leave_one_out"}),
        ({"delimiter_advantage": "zero"}, {"zero_delimiters": True}),
        ({"score_truncated_steps": True}, {"keep_last": True}),
    ],
)
def test_every_field_reaches_the_advantages(tiny_policy, tmp_path, fields, options):
    trainer = make_trainer(tiny_policy, tmp_path, reward_funcs=None, **fields)
    output = rollout(trainer)
    plain = expected_process(trainer, output)
    expected = expected_process(trainer, output, **options)
    assert not torch.allclose(plain, expected)
    torch.testing.assert_close(output["advantages"], expected, atol=1e-5, rtol=1e-5)


def step_length(prompts, completions, completion_ids, steps, **kwargs):
    return [[float(len(step)) for step in completion] for completion in steps]


def only_odd_steps(prompts, completions, completion_ids, steps, **kwargs):
    return [[1.0 + len(step) if j % 2 else None for j, step in enumerate(completion)] for completion in steps]


def test_several_functions_with_weights_and_none(tiny_policy, tmp_path):
    funcs = [digit_steps, only_odd_steps]
    trainer = make_trainer(
        tiny_policy, tmp_path, reward_funcs=None, process_reward_funcs=funcs, process_reward_weights=[0.5, 3.0]
    )
    output = rollout(trainer)

    def together(prompts, completions, completion_ids, steps):
        pairs = zip(digit_steps(0, 0, 0, steps)[0], only_odd_steps(0, 0, 0, steps)[0], strict=True)
        return [[0.5 * a + 3.0 * (b or 0.0) for a, b in pairs]]

    expected = expected_process(trainer, output, score=together)
    torch.testing.assert_close(output["advantages"], expected, atol=1e-5, rtol=1e-5)


def test_normalize_then_sum_normalises_each_function_on_its_own(tiny_policy, tmp_path):
    trainer = make_trainer(
        tiny_policy,
        tmp_path,
        reward_funcs=None,
        process_reward_funcs=[digit_steps, step_length],
        process_reward_weights=[1.0, 0.25],
        multi_objective_aggregation="normalize_then_sum",
    )
    output = rollout(trainer)
    expected = expected_process(trainer, output) + 0.25 * expected_process(trainer, output, score=step_length)
    torch.testing.assert_close(output["advantages"], expected, atol=1e-5, rtol=1e-5)


def test_functions_see_the_columns_and_the_steps(tiny_policy, tmp_path):
    seen = {}

    def spy(prompts, completions, completion_ids, steps, answer, trainer_state, log_extra, log_metric, **kwargs):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, steps=steps, answer=answer)
        log_extra("first_step", [completion[0] for completion in steps])
        log_metric("my_metric", 4.0)
        return [[0.0] * len(completion) for completion in steps]

    trainer = make_trainer(tiny_policy, tmp_path, process_reward_funcs=spy)
    output = rollout(trainer, answer=list("abcd"))
    assert seen["answer"] == list("abcd") and seen["prompts"] == ["1+1="] * 4
    assert seen["ids"] == completions_of(output)
    assert ["".join(steps) for steps in seen["steps"]] == seen["completions"]
    assert trainer._metrics["train"]["my_metric"] == [4.0]
    assert list(trainer._logs["extra"]["first_step"]) == [steps[0] for steps in seen["steps"]]


def test_async_functions_are_awaited(tiny_policy, tmp_path):
    async def later(prompts, completions, completion_ids, steps, **kwargs):
        return digit_steps(prompts, completions, completion_ids, steps)

    trainer = make_trainer(tiny_policy, tmp_path, reward_funcs=None, process_reward_funcs=later)
    output = rollout(trainer)
    torch.testing.assert_close(output["advantages"], expected_process(trainer, output), atol=1e-5, rtol=1e-5)


class CallableObject:
    """A `ProcessRewardModel`-like object: the same call, a name, no function."""

    __name__ = "my_prm"

    def __call__(self, prompts, completions, completion_ids, steps, **kwargs):
        return torch.zeros(len(steps), 1).tolist() if all(len(s) == 1 for s in steps) else digit_steps(0, 0, 0, steps)


def test_logged_metrics_and_table(tiny_policy, tmp_path):
    trainer = make_trainer(
        tiny_policy, tmp_path, process_reward_funcs=[CallableObject(), digit_steps], log_completions=True, max_steps=1
    )
    trainer.train()
    log = trainer.state.log_history[0]
    scores = trainer._step_scores.scores
    values = scores[..., 0][~scores[..., 0].isnan()]
    is_step = trainer._step_scores.ends >= 0
    assert log["process/my_prm/step_mean"] == pytest.approx(values.mean().item())
    assert log["process/my_prm/step_std"] == pytest.approx(values.std().item())
    assert log["process/digit_steps/step_mean"] == pytest.approx(values.mean().item())
    assert log["process/steps_per_completion"] == pytest.approx(is_step.sum(1).float().mean().item())
    unscored = (is_step & scores.isnan().all(-1)).sum() / is_step.sum()
    assert log["process/unscored_ratio"] == pytest.approx(unscored.item())
    assert log["process/advantage_abs_mean"] > 0

    table = pd.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
    inputs = trainer._buffered_inputs[0]
    mask = inputs["completion_mask"]
    means = (inputs["advantages"] * mask).sum(1) / mask.sum(1)
    assert sorted(table["advantage"]) == pytest.approx(sorted(means.tolist()), abs=1e-5)
    assert [len(row) for row in table["my_prm/steps"]] == is_step.sum(1).tolist()


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_iterations": 2, "max_steps": 4},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4},
        {"mask_truncated_completions": True},
        {"beta": 0.1},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"off_policy_mask_threshold": 0.5},
        {"top_entropy_quantile": 0.5},
        {"scale_rewards": "batch"},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_it_trains_in_the_configurations_of_trl(tiny_policy, tmp_path, overrides):
    trainer = make_trainer(tiny_policy, tmp_path, **overrides)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    assert trainer.state.global_step == overrides.get("max_steps", 2)
    changed = [name for name, value in trainer.model.state_dict().items() if not torch.equal(before[name], value)]
    assert len(changed) > 5 or "mask_truncated_completions" in overrides
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


def test_peft(tiny_policy, tmp_path):
    trainer = make_trainer(tiny_policy, tmp_path, peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    changed = [name for name, value in trainer.model.state_dict().items() if not torch.equal(before[name], value)]
    assert changed and all("lora" in name for name in changed)


def test_conversational_prompts(tiny_policy, tmp_path):
    trainer = make_trainer(tiny_policy, tmp_path, reward_funcs=None, train_dataset=dataset(conversational=True))
    output = rollout(trainer, [[{"role": "user", "content": "1+1="}]] * 4)
    torch.testing.assert_close(output["advantages"], expected_process(trainer, output), atol=1e-5, rtol=1e-5)


def test_iterable_dataset(tiny_policy, tmp_path):
    stream = IterableDataset.from_generator(lambda: ({"prompt": f"{i}+1="} for i in range(32)))
    trainer = make_trainer(tiny_policy, tmp_path, train_dataset=stream)
    trainer.train()
    assert trainer.state.log_history[0]["process/steps_per_completion"] >= 1


def test_evaluation_logs_the_same_metrics(tiny_policy, tmp_path):
    trainer = make_trainer(
        tiny_policy, tmp_path, eval_dataset=dataset(), per_device_eval_batch_size=8, num_generations_eval=2
    )
    metrics = trainer.evaluate()
    assert metrics["eval_process/steps_per_completion"] >= 1
    assert "eval_process/digit_steps/step_mean" in metrics


def test_resumed_run_ends_where_the_whole_run_ends(tiny_policy, tmp_path):
    def run(output_dir, max_steps, **kwargs):
        trainer = make_trainer(
            tiny_policy,
            output_dir,
            max_steps=max_steps,
            save_strategy="steps",
            save_steps=2,
            lr_scheduler_type="constant",
        )
        trainer.train(**kwargs)
        return trainer.model.state_dict()

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    resumed = run(tmp_path / "parts", 4, resume_from_checkpoint=True)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_a_synchronised_reference_is_resumed(tiny_policy, tmp_path):
    def run(output_dir, max_steps, **kwargs):
        trainer = make_trainer(
            tiny_policy,
            output_dir,
            max_steps=max_steps,
            beta=0.5,
            sync_ref_model=True,
            ref_model_sync_steps=1,
            save_strategy="steps",
            save_steps=2,
            lr_scheduler_type="constant",
        )
        trainer.train(**kwargs)
        return trainer.model.state_dict(), trainer.ref_model.state_dict()

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    resumed = run(tmp_path / "parts", 4, resume_from_checkpoint=True)
    for part, expected in zip(resumed, whole, strict=True):
        assert all(torch.equal(part[name], value) for name, value in expected.items())


def test_a_plain_grpo_config_is_accepted(tiny_policy, tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path),
        bf16=False,
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=10,
    )
    trainer = make_trainer(tiny_policy, tmp_path, args=args)
    output = rollout(trainer)
    assert output["advantages"].shape == output["completion_ids"].shape


def test_config_is_saved_with_a_callable_delimiter(tmp_path):
    config = GRPOPlusConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to=[], step_delimiter=spans)
    assert config.to_dict()["step_delimiter"].endswith(".spans")
    assert '"step_delimiter"' in config.to_json_string()


def scores_with(change):
    def bad_reward(prompts, completions, completion_ids, steps, **kwargs):
        return change([[0.5] * len(completion) for completion in steps])

    return bad_reward


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda s: s[:-1], ValueError, r"'bad_reward' returned scores for 3 completions, but there are 4"),
        (
            lambda s: [*s[:2], [*s[2], 0.1], s[3]],
            ValueError,
            r"returned \d+ scores for completion 2, which has \d+ steps",
        ),
        (
            lambda s: [["good"] * len(s[0]), *s[1:]],
            TypeError,
            r"'good' for step 0 of completion 0; a score is a number",
        ),
        (lambda s: [s[0], [float("nan")] * len(s[1]), *s[2:]], ValueError, r"returned nan for step 0 of completion 1"),
        (lambda s: [*s[:3], [float("-inf")] * len(s[3])], ValueError, r"returned -inf for step 0 of completion 3"),
        (lambda s: None, TypeError, r"'bad_reward' returned NoneType; return a list per completion"),
        (lambda s: [0.5] * len(s), TypeError, r"returned 0.5 for completion 0; return a list with one float or None"),
    ],
)
def test_bad_scores_are_named(tiny_policy, tmp_path, change, error, message):
    trainer = make_trainer(tiny_policy, tmp_path, process_reward_funcs=scores_with(change))
    with pytest.raises(error, match=message):
        rollout(trainer)


def test_a_delimiter_that_never_matches_warns_once_with_the_rate(tiny_policy, tmp_path, caplog):
    trainer = make_trainer(tiny_policy, tmp_path, reward_funcs=None, step_delimiter="@@@", score_truncated_steps=True)
    output = rollout(trainer)
    rollout(trainer)
    assert caplog.text.count("was found in 0 of 4 completions (0 %)") == 1
    for row, mask in zip(output["advantages"], output["completion_mask"], strict=True):
        assert len(row[mask.bool()].unique()) == 1


def test_a_delimiter_past_the_completion_is_an_error(tiny_policy, tmp_path):
    trainer = make_trainer(tiny_policy, tmp_path, step_delimiter=lambda text: [len(text) + 5])
    with pytest.raises(ValueError, match=r"offset|outside"):
        rollout(trainer)


def test_missing_prompt_and_empty_data_are_named(tiny_policy, tmp_path):
    with pytest.raises(ValueError, match=r"train_dataset has no column 'prompt', only 'answer', 'question'"):
        make_trainer(tiny_policy, tmp_path, train_dataset=Dataset.from_dict({"question": ["1"], "answer": ["1"]}))
    with pytest.raises(ValueError, match=r"train_dataset is empty"):
        make_trainer(tiny_policy, tmp_path, train_dataset=Dataset.from_dict({"prompt": []}))
    with pytest.raises(ValueError, match=r"eval_dataset\['b'\] is empty"):
        make_trainer(tiny_policy, tmp_path, eval_dataset={"a": dataset(), "b": Dataset.from_dict({"prompt": []})})
    stream = IterableDataset.from_generator(lambda: iter([{"question": "1"}] * 8))
    trainer = make_trainer(tiny_policy, tmp_path, train_dataset=stream)
    with pytest.raises(ValueError, match=r"no column 'prompt', only 'question'"):
        trainer.train()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"credit_assignment": "max"}, r"credit_assignment must be one of 'sum', 'min', 'mean'; got 'max'"),
        ({"process_std": "robust"}, r"process_std must be one of"),
        ({"process_baseline": "none"}, r"process_baseline must be one of"),
        ({"delimiter_advantage": "half"}, r"delimiter_advantage must be one of"),
        ({"credit_gamma": 1.5}, r"credit_gamma must lie in \(0, 1\]"),
        ({"credit_tau": 0.0}, r"credit_tau must be positive"),
        ({"process_eps": -1.0}, r"process_eps must not be negative"),
        ({"step_delimiter": "("}, r"step_delimiter: .*regular expression"),
        ({"step_delimiter": "x*"}, r"step_delimiter: .*matches the empty string"),
    ],
)
def test_bad_fields_are_refused_at_construction(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        GRPOPlusConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to=[], **fields)


def test_bad_functions_are_refused_at_construction(tiny_policy, tmp_path):
    with pytest.raises(TypeError, match=r"process_reward_funcs: 3 is not callable"):
        make_trainer(tiny_policy, tmp_path, process_reward_funcs=[3])
    with pytest.raises(TypeError, match=r"process_reward_funcs: Linear is a bare module"):
        make_trainer(tiny_policy, tmp_path, process_reward_funcs=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"process_reward_weights has 2 entries for 1 .* \(digit_steps\)"):
        make_trainer(tiny_policy, tmp_path, process_reward_weights=[1.0, 2.0])


def test_liger_is_refused_where_trl_would_bypass_the_loss(tiny_policy, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_grpo_plus._compat.GRPOTrainer.compute_liger_loss", lambda self: None, raising=False)
    with pytest.raises(ValueError, match=r"use_liger_kernel=True .* Set use_liger_kernel=False"):
        make_trainer(tiny_policy, tmp_path, use_liger_kernel=True)
