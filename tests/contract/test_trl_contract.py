"""What we stand on in TRL: the check itself, and that its hooks do what the check cannot see."""

import copy

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer
from trl_grpo_plus._compat import HOOKS, check_trl


def length_reward(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


def dataset():
    return Dataset.from_dict({"prompt": ["1+1=", "2+2=", "3+3=", "4+4="] * 4})


def arguments(config_class, output_dir, **overrides):
    values = {
        "output_dir": str(output_dir),
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 7,
    }
    return config_class(**{**values, **overrides})


def trained(trainer_class, config_class, policy, output_dir, **overrides):
    trainer = trainer_class(
        policy,
        reward_funcs=length_reward,
        args=arguments(config_class, output_dir, **overrides),
        train_dataset=dataset(),
        processing_class=AutoTokenizer.from_pretrained(policy),
    )
    trainer.train()
    return trainer


def test_the_installed_trl_passes():
    check_trl()


@pytest.mark.parametrize("version", ["1.11.3", "1.15.0", "1.15.1", "2.0.0"])
def test_versions_out_of_range_are_refused(version):
    with pytest.raises(ImportError, match=rf"does not work with trl {version}.*Tested versions: 1\.12\.0"):
        check_trl(version=version)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_a_missing_hook_is_named(hook):
    class Renamed:
        pass

    for other in HOOKS[: HOOKS.index(hook)]:
        setattr(Renamed, other.name, getattr(GRPOTrainer, other.name))
    with pytest.raises(ImportError, match=rf"`Renamed\.{hook.name}`.*the method is gone"):
        check_trl(Renamed)


def test_a_changed_signature_is_named():
    class Changed(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions):
            return None

    with pytest.raises(ImportError, match=r"_calculate_rewards.*its parameters are"):
        check_trl(Changed)


def test_a_body_that_passes_our_override_by_is_named():
    class Changed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return {"advantages": None, "completion_ids": self._logs, "completion_mask": self._pending_extra_logs}

    with pytest.raises(ImportError, match=r"no longer uses _calculate_rewards"):
        check_trl(Changed)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"beta": 0.1}, {"num_iterations": 2}, {"loss_type": "grpo", "scale_rewards": "none"}],
    ids=["default", "beta", "num_iterations", "grpo"],
)
@pytest.mark.parametrize("config_class", [GRPOPlusConfig, GRPOConfig])
def test_with_every_feature_off_training_is_bit_identical_to_trl(tiny_policy, tmp_path, config_class, overrides):
    stock = trained(GRPOTrainer, GRPOConfig, tiny_policy, tmp_path / "stock", **overrides)
    plus = trained(GRPOPlusTrainer, config_class, tiny_policy, tmp_path / "plus", **overrides)
    start = AutoModelForCausalLM.from_pretrained(tiny_policy).state_dict()
    moved = 0
    for name, expected in stock.model.state_dict().items():
        assert torch.equal(plus.model.state_dict()[name], expected), name
        moved += not torch.equal(start[name], expected)
    assert moved > 5
    keep = lambda log: {k: v for k, v in log.items() if "time" not in k and "per_second" not in k}  # noqa: E731
    assert [keep(log) for log in plus.state.log_history] == [keep(log) for log in stock.state.log_history]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_token_advantages_that_are_constant_give_trls_loss_bit_for_bit(
    tiny_policy, tmp_path, loss_type, num_iterations
):
    trainer = GRPOTrainer(
        tiny_policy,
        reward_funcs=length_reward,
        args=arguments(GRPOConfig, tmp_path, loss_type=loss_type, num_iterations=num_iterations),
        train_dataset=dataset(),
        processing_class=AutoTokenizer.from_pretrained(tiny_policy),
    )
    trainer.current_gradient_accumulation_steps = 2
    rows = [{"prompt": prompt} for prompt in ["1+1="] * 4 + ["2+2="] * 4]
    trainer.model.train()
    inputs = trainer._generate_and_score_completions(rows)
    assert inputs["advantages"].abs().sum() > 0
    per_token = copy.copy(inputs)
    per_token["advantages"] = inputs["advantages"].unsqueeze(1).expand(inputs["completion_ids"].shape).clone()

    def loss_and_gradient(batch):
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        return loss.detach(), [parameter.grad.clone() for parameter in trainer.model.parameters()]

    expected_loss, expected_gradient = loss_and_gradient(inputs)
    loss, gradient = loss_and_gradient(per_token)
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradient, expected_gradient, strict=True))


def test_token_advantages_reach_the_tokens(tiny_policy, tmp_path):
    """The gradient is the one of sum over t of A_t * log pi_t, computed here from the model's logits."""
    trainer = GRPOTrainer(
        tiny_policy,
        reward_funcs=length_reward,
        args=arguments(GRPOConfig, tmp_path, loss_type="dapo", gradient_accumulation_steps=1),
        train_dataset=dataset(),
        processing_class=AutoTokenizer.from_pretrained(tiny_policy),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 4)
    torch.manual_seed(0)
    advantages = torch.randn(inputs["completion_ids"].shape)
    inputs["advantages"] = advantages
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, inputs).backward()
    actual = [parameter.grad.clone() for parameter in trainer.model.parameters()]

    trainer.model.zero_grad()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    num_tokens = inputs["completion_ids"].shape[1]
    logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, -num_tokens - 1 : -1]
    logps = logits.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
    mask = inputs["completion_mask"]
    (-(advantages * logps * mask).sum() / mask.sum()).backward()
    for parameter, gradient in zip(trainer.model.parameters(), actual, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-4)
