"""Algorithm 1 as a training run: what is reset, what is trained on what, and what is logged."""

import gc
import json
import math

import pytest
import torch
from iterative_toys import (
    BagOfWords,
    StepBag,
    has_an_even_word,
    label_by_length,
    save_tiny_policy,
    toy_config,
    toy_trainer,
)
from peft import LoraConfig
from transformers import TrainerCallback

from trl_grpo_plus import GRPOPlusConfig, IterativeGRPOConfig, IterativeGRPOTrainer
from trl_grpo_plus.demo import load_demo_tokenizer, make_problems
from trl_grpo_plus.iterative import ReplayBuffer
from trl_grpo_plus.iterative.checkpoint import reference_parameters
from trl_grpo_plus.iterative.phases import SampleStore, isolated_rng, pairwise_accuracy
from trl_grpo_plus.iterative.replay import is_held_out

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


def values(parameters):
    return [parameter.detach().clone() for parameter in parameters]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Watch(IterativeGRPOTrainer):
    """Notes policy and reference as each iteration starts, and how far they are apart on each generation batch."""

    seen = None

    def reset_reference(self):
        super().reset_reference()
        policy, reference = reference_parameters(self)
        if self.seen is None:
            self.seen = []
        self.seen.append((self.state.global_step, values(policy), values(reference)))

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            with torch.no_grad():
                ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
                mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
                keep = output["completion_ids"].size(1)
                now = self._get_per_token_logps_and_entropies(self.model, ids, mask, keep)[0]
            self.gaps.append(
                (self.state.global_step, (now - output["ref_per_token_logps"]).abs().max().item(), self.iteration)
            )
        return output


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "lora"])
def test_reference_is_the_policy_bit_for_bit_as_each_iteration_starts(policy, tmp_path, peft_config):
    trainer = Watch(
        policy,
        BagOfWords(),
        toy_config(tmp_path, outer_iterations=3, save_strategy="no", num_iterations=1, steps_per_iteration=3),
        toy_data(),
        grader=has_an_even_word,
        peft_config=peft_config,
    )
    trainer.seen, trainer.gaps = None, []
    trainer.train()
    assert [step for step, *_ in trainer.seen] == [0, 3, 6]
    for _, of_policy, of_reference in trainer.seen:
        assert equal(of_policy, of_reference)
    assert not equal(trainer.seen[0][1], trainer.seen[1][1])
    # The reference stays where it was put; the policy moves on.
    assert equal(values(reference_parameters(trainer)[1]), trainer.seen[-1][1])
    # Nothing that the loss reads is older than the reset: the first batch of an iteration has no KL, later ones do.
    assert [(step, iteration) for step, _, iteration in trainer.gaps] == [(s, s // 3 + 1) for s in range(9)]
    for step, gap, _ in trainer.gaps:
        assert (gap < 1e-6) == (step % 3 == 0), (step, gap)


def toy_data():
    return make_problems(6, seed=0)


def test_lora_reference_is_a_frozen_adapter_and_the_base_stays(policy, tmp_path):
    trainer = toy_trainer(policy, tmp_path, config={"save_strategy": "no"}, peft_config=LORA)
    model = trainer.model
    assert set(model.peft_config) == {"default", "ref"}
    base = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}
    trainer.train()
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in trained) == (".default." in name)
        if "lora_" not in name:
            assert torch.equal(parameter, base[name])
    assert model.active_adapter == "default"


def test_a_pretrained_adapter_keeps_the_reference_that_trl_gave_it(policy, tmp_path):
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(policy), LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    trainer = toy_trainer(model, tmp_path, config={"save_strategy": "no"}, processing_class=load_demo_tokenizer())
    of_policy, of_reference = reference_parameters(trainer)
    assert of_policy
    assert equal(of_policy, of_reference)
    trainer.train()


def test_every_sample_is_stored_once_with_its_verdict_and_score(policy, tmp_path):
    reward_model = BagOfWords()
    trainer = toy_trainer(policy, tmp_path, reward_model, {"outer_iterations": 1, "steps_per_iteration": 6})
    before = [p.clone() for p in reward_model.model.parameters()]
    trainer.train()
    rows = SampleStore(trainer.work.samples).read()
    assert len(rows) == 3 * 8  # three generation batches of eight, each used for two steps
    scorer = BagOfWords()
    scorer.load_state_dict(torch.load(trainer.work.initial_reward_model / "weights.pt"))
    assert equal(before, list(scorer.model.parameters()))
    for row in rows:
        assert row["scores"] == pytest.approx(scorer(None, [row["completion"]]), abs=1e-7)
        assert row["answer"].splitlines()[-1].startswith("####")  # the data set's columns are there for the grader
        assert len(row["completion_ids"]) <= 12
    buffer = list(ReplayBuffer(trainer.work.replay(1)))
    expected = {
        (row["prompt"], row["completion"]): has_an_even_word(None, [row["completion"]])[0]
        for row in rows
        if not is_held_out(row["prompt"], 0.25, trainer.args.seed)
    }
    assert {(row["prompt"], row["completion"]): row["correct"] for row in buffer} == expected
    assert len(buffer) == len(expected)
    verdicts = has_an_even_word(None, [row["completion"] for row in rows])
    agreed = [(row["scores"][0] > 0.5) == (verdict > 0.5) for row, verdict in zip(rows, verdicts, strict=True)]
    (metrics,) = json.loads(trainer.work.metrics.read_text())
    assert metrics["reward_model/agreement"] == pytest.approx(sum(agreed) / len(agreed))
    assert metrics["grader/accuracy"] == pytest.approx(sum(verdicts) / len(verdicts))


def test_the_update_mixes_a_tenth_of_history_and_logs_it(policy, tmp_path):
    trained_on = []

    class Notes(BagOfWords):
        def fit(self, train, settings, optimizer_state):
            trained_on.append((settings.iteration, train["iteration"][:], list(train["completion"]), optimizer_state))
            return super().fit(train, settings, optimizer_state)

    trainer = toy_trainer(
        policy,
        tmp_path,
        Notes(),
        {"outer_iterations": 3, "replay_fraction": 0.3, "save_strategy": "no", "steps_per_iteration": 6},
    )
    trainer.train()
    entries = json.loads(trainer.work.metrics.read_text())
    for (iteration, origins, completions, _), entry in zip(trained_on, entries, strict=True):
        old = sum(origin < iteration for origin in origins)
        assert old == entry["samples/history"]
        assert len(origins) - old == entry["samples/new"]
        assert entry["replay/fraction"] == pytest.approx(old / len(origins))
        assert iteration == 1 or abs(old - 0.3 * len(origins)) <= 1
        assert len(set(completions)) == len(completions)
    assert trained_on[0][3] is None
    assert trained_on[1][3] is not None
    assert entries[0]["samples/history"] == 0
    logged = [log for log in trainer.state.log_history if "replay/size" in log]
    assert [log["replay/size"] for log in logged] == [entry["replay/size"] for entry in entries]
    assert {"reward_model/loss", "replay/fraction", "reward_model/agreement", "iteration"} <= logged[0].keys()
    assert [log["iteration"] for log in trainer.state.log_history if "reward" in log][::3] == [1, 2, 3]


def test_step_labels_reach_a_process_reward_model_and_cut_off_steps_have_none(policy, tmp_path):
    seen = []

    class Notes(StepBag):
        def fit(self, train, settings, optimizer_state):
            seen.extend(zip(train["steps"], train["step_labels"], strict=True))
            return super().fit(train, settings, optimizer_state)

    trainer = toy_trainer(policy, tmp_path, Notes(), {"save_strategy": "no", "max_completion_length": 40})
    trainer.train()
    assert "process/step_bag/step_mean" in trainer.state.log_history[0]
    store = {tuple(row["steps"]): row for row in SampleStore(trainer.work.samples).read()}
    num_cut = 0
    for steps, labels in seen:
        wanted = label_by_length(None, None, None, [steps])[0]
        row = store.get(tuple(steps))
        if row is not None and row["truncated"]:
            wanted[-1] = None
            num_cut += 1
        if row is not None:
            assert labels == wanted
    assert num_cut > 0
    assert any(len(steps) > 1 for steps, _ in seen)


def test_frozen_reward_model_is_measured_but_not_changed(policy, tmp_path):
    reward_model = BagOfWords()
    before = values(reward_model.model.parameters())
    trainer = toy_trainer(
        policy, tmp_path, reward_model, {"update_reward_model": False, "save_strategy": "no", "heldout_fraction": 0.6}
    )
    trainer.train()
    assert equal(before, list(reward_model.model.parameters()))
    entries = json.loads(trainer.work.metrics.read_text())
    assert any(entry["reward_model/accuracy_before"] is not None for entry in entries)
    for entry in entries:
        assert entry["reward_model/accuracy_after"] == entry["reward_model/accuracy_before"]
        assert "reward_model/loss" not in entry


class Spoiler(BagOfWords):
    """Ends each update with weights that call everything wrong."""

    def fit(self, train, settings, optimizer_state):
        loss, state = super().fit(train, settings, optimizer_state)
        with torch.no_grad():
            self.model.weight.zero_()
            self.model.bias.fill_(-10.0)
        return loss, state


@pytest.mark.parametrize("skip", [True, False])
def test_an_update_that_lowers_the_accuracy_is_undone_if_asked(policy, tmp_path, skip):
    reward_model = Spoiler()
    with torch.no_grad():
        reward_model.model.weight.zero_()
        reward_model.model.bias.fill_(10.0)

    trainer = toy_trainer(
        policy,
        tmp_path,
        reward_model,
        {"skip_worse_update": skip, "save_strategy": "no", "outer_iterations": 1, "heldout_fraction": 0.6},
        grader=lambda prompts, completions, **columns: [1.0] * len(completions),
    )
    trainer.train()
    (entry,) = json.loads(trainer.work.metrics.read_text())
    assert (entry["reward_model/accuracy_before"], entry["reward_model/accuracy_after"]) == (1.0, 0.0)
    assert entry["reward_model/skipped"] == float(skip)
    assert reward_model.model.bias.item() == (10.0 if skip else -10.0)


def test_start_from_the_initial_weights_and_with_a_new_optimizer(policy, tmp_path):
    starts, states = [], []

    class Notes(BagOfWords):
        def fit(self, train, settings, optimizer_state):
            starts.append(values(self.model.parameters()))
            states.append(optimizer_state)
            return super().fit(train, settings, optimizer_state)

    config = {"reward_model_start": "initial", "reset_reward_model_optimizer": True, "save_strategy": "no"}
    toy_trainer(policy, tmp_path / "a", Notes(), config).train()
    assert equal(*starts)
    assert states == [None, None]
    starts.clear()
    toy_trainer(policy, tmp_path / "b", Notes(), {"save_strategy": "no"}).train()
    assert not equal(*starts)


def test_the_reward_models_optimizer_does_not_live_during_policy_steps(policy, tmp_path):
    reward_model = BagOfWords()
    own = {id(parameter) for parameter in reward_model.model.parameters()}
    found, during = [], []

    def optimizers():
        gc.collect()
        return [
            each
            for each in gc.get_objects()
            if issubclass(type(each), torch.optim.Optimizer)
            and any(id(p) in own for g in each.param_groups for p in g["params"])
        ]

    class Look(TrainerCallback):
        def on_substep_end(self, *args, **kwargs):
            found.append(len(optimizers()))

        on_pre_optimizer_step = on_substep_end

    original = reward_model.fit

    def fit(train, settings, state):
        result = original(train, settings, state)
        during.append(True)
        return result

    reward_model.fit = fit
    trainer = toy_trainer(policy, tmp_path, reward_model, {"save_strategy": "no"}, callbacks=[Look()])
    trainer.train()
    assert during == [True, True]
    assert len(found) == 8
    assert found == [0] * 8


@pytest.mark.parametrize("scope", ["run", "iteration"])
def test_learning_rate_decays_over_the_run_or_anew_in_each_iteration(policy, tmp_path, scope):
    trainer = toy_trainer(policy, tmp_path, config={"learning_rate_scope": scope, "save_strategy": "no"})
    trainer.train()
    rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
    run = [1e-2 * (1 - step / 8) for step in range(8)]
    iteration = [1e-2 * (1 - step / 4) for step in range(4)] * 2
    assert rates == pytest.approx(run if scope == "run" else iteration, rel=1e-6)


def test_policy_optimizer_is_reset_if_asked(policy, tmp_path):
    steps = []

    class Look(TrainerCallback):
        def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            inner = getattr(optimizer, "optimizer", optimizer)
            steps.append(int(next(iter(inner.state.values()))["step"]))

    config = {"save_strategy": "no", "reset_policy_optimizer": True}
    toy_trainer(policy, tmp_path, config=config, callbacks=[Look()]).train()
    assert steps == [1, 2, 3, 4, 1, 2, 3, 4]


def test_balance_and_cap_of_the_new_samples(policy, tmp_path):
    trained_on = []

    class Notes(BagOfWords):
        def fit(self, train, settings, optimizer_state):
            trained_on.append(list(train["correct"]))
            return super().fit(train, settings, optimizer_state)

    config = {"outer_iterations": 1, "save_strategy": "no", "heldout_fraction": 0.0, "balance_samples": True}
    toy_trainer(policy, tmp_path / "a", Notes(), {**config, "steps_per_iteration": 6}).train()
    (verdicts,) = trained_on
    assert sum(verdicts) * 2 == len(verdicts) > 0
    trained_on.clear()
    toy_trainer(policy, tmp_path / "b", Notes(), {**config, "balance_samples": False, "max_samples": 5}).train()
    assert len(trained_on[0]) == 5


def test_replay_dataset_is_the_first_history(policy, tmp_path):
    from datasets import Dataset

    known = Dataset.from_dict(
        {"prompt": [f"old {i}" for i in range(40)], "completion": ["x"] * 40, "correct": [1.0] * 40}
    )
    trainer = toy_trainer(
        policy,
        tmp_path,
        config={"outer_iterations": 1, "save_strategy": "no", "replay_fraction": 0.5},
        replay_dataset=known,
    )
    trainer.train()
    (entry,) = json.loads(trainer.work.metrics.read_text())
    assert entry["samples/history"] == entry["samples/new"]
    prompts = {row["prompt"] for row in ReplayBuffer(trainer.work.replay(1)) if row["iteration"] == 0}
    assert prompts == {p for p in known["prompt"] if not is_held_out(p, 0.25, trainer.args.seed)}
    assert len(prompts) < 40


def test_conversations_are_sampled_graded_and_kept(policy, tmp_path):
    tokenizer = load_demo_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    data = toy_data().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = toy_trainer(policy, tmp_path, train_dataset=data, processing_class=tokenizer, grader=None)
    trainer.train()
    rows = list(ReplayBuffer(trainer.work.replay(2)))
    assert len(rows) > 10
    for row in rows:
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert [message["role"] for message in row["completion"]] == ["assistant"]
        assert row["correct"] == 0.0  # the untrained policy's answers against the gold ones, by reward_fns.grade
    again = toy_trainer(policy, tmp_path, train_dataset=data, processing_class=tokenizer, grader=None)
    again.train(resume_from_checkpoint=True)
    assert list(ReplayBuffer(again.work.replay(2))) == rows


def test_phases_leave_the_random_generators_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with isolated_rng(1):
        first = torch.rand(2)
    assert torch.equal(torch.rand(3), expected)
    with isolated_rng(1):
        assert torch.equal(torch.rand(2), first)


def test_pairwise_accuracy_counts_pairs_within_a_prompt_and_ties_half():
    # a: right .9, wrong .1 and .9 -> 1 and 1/2; b: right .2, wrong .3 -> 0; c: no pair.
    accuracy = pairwise_accuracy(["a", "a", "a", "b", "b", "c"], [0.9, 0.1, 0.9, 0.2, 0.3, 0.5], [1, 0, 0, 1, 0, 1])
    assert accuracy == pytest.approx(0.5)
    assert pairwise_accuracy(["a"], [0.3], [1]) is None


def test_deepseekmath_preset(tmp_path):
    config = IterativeGRPOConfig.deepseekmath(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    assert (config.learning_rate, config.reward_model_learning_rate, config.beta) == (1e-6, 2e-5, 0.04)
    assert (config.num_generations, config.max_completion_length, config.generation_batch_size) == (64, 1024, 1024)
    assert (config.num_iterations, config.replay_fraction, config.steps_per_generation_batch) == (1, 0.1, 1)


@pytest.mark.parametrize(
    "field, overrides",
    [
        ("outer_iterations", {"outer_iterations": 0}),
        ("max_steps", {"max_steps": 7}),
        ("steps_per_iteration", {"steps_per_iteration": 3}),
        ("save_steps", {"save_steps": 3}),
        (
            "gradient_accumulation_steps",
            {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 1},
        ),
        ("sync_ref_model", {"sync_ref_model": True}),
        ("reset_reference", {"reset_reference": True, "beta": 0.0}),
        ("save_only_model", {"save_only_model": True}),
        ("replay_fraction", {"replay_fraction": 1.0}),
        ("replay_strategy", {"replay_strategy": "newest"}),
        ("skip_worse_update", {"skip_worse_update": True, "heldout_fraction": 0.0}),
        ("reward_model_loss", {"reward_model_loss": "listwise"}),
        ("reward_model_batch_size", {"reward_model_batch_size": 0}),
    ],
)
def test_what_cannot_work_is_refused_by_field(tmp_path, field, overrides):
    with pytest.raises(ValueError, match=field):
        toy_config(tmp_path, **overrides)


def test_construction_names_what_is_missing(policy, tmp_path):
    with pytest.raises(TypeError, match="IterativeGRPOConfig"):
        IterativeGRPOTrainer(
            policy, BagOfWords(), GRPOPlusConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
        )
    with pytest.raises(TypeError, match="reward_model"):
        toy_trainer(policy, tmp_path, reward_model=lambda **_: [])
    with pytest.raises(ValueError, match="step_labeler"):
        toy_trainer(policy, tmp_path, StepBag(), step_labeler=None)
    with pytest.raises(ValueError, match="answer_column"):
        toy_trainer(policy, tmp_path, grader=None, config={"answer_column": "gold"})


def test_without_a_reference_only_the_reward_model_is_renewed(policy, tmp_path):
    trainer = toy_trainer(policy, tmp_path, config={"beta": 0.0, "save_strategy": "no"})
    trainer.train()
    entries = json.loads(trainer.work.metrics.read_text())
    assert len(entries) == 2
    assert all(math.isfinite(entry["reward_model/loss"]) for entry in entries)
    with pytest.raises(RuntimeError, match="no reference"):
        trainer.reset_reference()
