"""The KL gradient through the real trainer's `_compute_loss`, over all 125 sequences, in float64."""

import itertools

import pytest
import torch
from datasets import Dataset
from tiny import char_tokenizer, llama
from transformers import AutoModelForCausalLM

from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer
from trl_grpo_plus._window import SCALE
from trl_grpo_plus.algorithms.kl_table import COMBINATIONS, LENGTH, VOCAB

SEQUENCES = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
PROMPT = 2


@pytest.fixture(scope="module")
def five_tokens(tmp_path_factory):
    """A policy over five tokens, sharp enough that the three policies differ."""
    model = llama(VOCAB, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    directory = tmp_path_factory.mktemp("five")
    model.save_pretrained(directory)
    return str(directory)


def make_trainer(policy, output_dir, **overrides):
    values = {
        "output_dir": str(output_dir),
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": LENGTH,
        "save_strategy": "no",
        "disable_tqdm": True,
        "beta": 1.0,
        "epsilon": 1e6,
        "epsilon_high": 1e6,
        "loss_normalization": "token",
    }
    trainer = GRPOPlusTrainer(
        AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=GRPOPlusConfig(**{**values, **overrides}),
        train_dataset=Dataset.from_dict({"prompt": ["1"] * 8}),
        processing_class=char_tokenizer(),
    )
    trainer.ref_model.double()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def options(combination):
    names = ("placement", "estimator", "importance", "coefficient", "horizon", "top_k")
    values = {f"kl_{name}": getattr(combination, name) for name in names}
    return {**values, "kl_importance_truncation": combination.truncation}


def logps_of(model):
    ids = torch.cat([torch.full((len(SEQUENCES), 1), PROMPT), SEQUENCES], dim=1)
    logits = model(input_ids=ids).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, SEQUENCES.unsqueeze(-1)).squeeze(-1)


def moved(model, seed, size):
    """The log-probabilities of a policy `size` away from `model` in its weights."""
    generator = torch.Generator().manual_seed(seed)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(size * parameter.std() * noise if parameter.ndim > 1 else 0)
        logps = logps_of(model)
    model.load_state_dict(start)
    return logps


def make_inputs(trainer, rows, old):
    """What TRL's generation step gives for these completions, with the reference's pass by the trainer itself."""
    sequences, count = SEQUENCES[rows], len(SEQUENCES[rows])
    inputs = {
        "prompt_ids": torch.full((count, 1), PROMPT),
        "prompt_mask": torch.ones(count, 1, dtype=torch.long),
        "completion_ids": sequences,
        "completion_mask": torch.ones_like(sequences),
        "advantages": torch.zeros(count, dtype=torch.float64),
        "num_items_in_batch": torch.tensor(count * LENGTH),
    }

    def reference_pass(_):
        with torch.no_grad():
            ids = torch.cat([inputs["prompt_ids"], sequences], dim=1)
            ref, *_ = trainer._get_per_token_logps_and_entropies(
                trainer.ref_model, ids, torch.ones_like(ids), LENGTH, batch_size=50
            )
        return {"ref_per_token_logps": ref}

    inputs.update(trainer._loss_terms.generate(reference_pass, None))
    if old is not None:
        inputs["old_per_token_logps"] = old[rows]
    return inputs


def gradient(loss, model):
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def exact_gradient(trainer, ref):
    logp = logps_of(trainer.model).sum(-1)
    return gradient((logp.exp() * (logp - ref.sum(-1))).sum(), trainer.model)


def expected_gradient(trainer, old, off_policy):
    """Of the sum over a sequence's tokens, weighted by the sequence's probability under the policy that sampled."""
    inputs = make_inputs(trainer, slice(None), old if off_policy else None)
    inputs[SCALE] = old.sum(-1).exp()
    return gradient(trainer._compute_loss(trainer.model, inputs), trainer.model)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_gradient_against_the_exact_one(five_tokens, tmp_path, combination):
    trainer = make_trainer(five_tokens, tmp_path, **options(combination))
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            generator = torch.Generator().manual_seed(parameter.numel())
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.3 * parameter.std() * noise if parameter.ndim > 1 else 0)
        ref = logps_of(trainer.ref_model)
        on = logps_of(trainer.model)
    old = moved(trainer.model, seed=5, size=0.3)
    exact = exact_gradient(trainer, ref)
    for sampled_by, off_policy, claimed in ((on, False, combination.exact_on), (old, True, combination.exact_off)):
        got = expected_gradient(trainer, sampled_by, off_policy)
        error = float((got - exact).norm() / exact.norm())
        # What is left is TRL's: its newer versions make log-probabilities in float32 in a float64 model too.
        assert error < 1e-6 if claimed else error > 0.01, f"off_policy={off_policy}: {error}"


@pytest.mark.parametrize(
    "combination",
    [c for c in COMBINATIONS if c.exact_off and c.placement != "loss" and c.horizon == "to_go"],
    ids=str,
)
def test_one_sequence_at_a_time_adds_up_to_the_same(five_tokens, tmp_path, combination):
    """Without our own weights in the inputs: each call's loss is the mean over the 3 tokens of its one sequence."""
    trainer = make_trainer(five_tokens, tmp_path, **options(combination))
    old = moved(trainer.model, seed=5, size=0.3)
    whole = expected_gradient(trainer, old, off_policy=True)
    total = torch.zeros_like(whole)
    for row in range(0, len(SEQUENCES), 5):
        loss = trainer._compute_loss(trainer.model, make_inputs(trainer, slice(row, row + 1), old))
        total += LENGTH * old[row].sum().exp() * gradient(loss, trainer.model)
    subset = torch.zeros(len(SEQUENCES), dtype=torch.float64)
    subset[::5] = old[::5].sum(-1).exp()
    inputs = make_inputs(trainer, slice(None), old)
    inputs[SCALE] = subset
    expected = gradient(trainer._compute_loss(trainer.model, inputs), trainer.model)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)
