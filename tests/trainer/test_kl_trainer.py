"""KL placements in the trainer: what they compose with, what they cost, what they log, and what is in a checkpoint."""

import json
import math

import pytest
import torch
from datasets import Dataset
from normalization_case import PROMPTS, reward, rollout, rows
from peft import LoraConfig
from tiny import char_tokenizer
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer, _compat

PLACEMENTS = {
    "loss": {"kl_placement": "loss", "kl_estimator": "k2", "kl_importance": "stopped"},
    "reward-old": {"kl_placement": "reward", "kl_coefficient": "old"},
    "reward-current": {"kl_placement": "reward", "kl_importance": "per_decision"},
    "full_vocab": {"kl_placement": "full_vocab", "kl_importance": "per_decision"},
    "top_k": {"kl_placement": "full_vocab", "kl_importance": "per_decision", "kl_top_k": 8},
}
each_placement = pytest.mark.parametrize("options", PLACEMENTS.values(), ids=PLACEMENTS)


def make_trainer(policy, output_dir, trainer_class=GRPOPlusTrainer, config_class=GRPOPlusConfig, **overrides):
    names = ("peft_config", "process_reward_funcs", "rollout_func", "processing_class")
    extra = {name: overrides.pop(name) for name in names if name in overrides}
    extra.setdefault("processing_class", AutoTokenizer.from_pretrained(policy) if isinstance(policy, str) else None)
    values = {
        "output_dir": str(output_dir),
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "beta": 0.1,
        "seed": 3,
    }
    trainer = trainer_class(
        policy,
        reward_funcs=reward,
        args=config_class(**{**values, **overrides}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        **extra,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def move_reference(trainer, factor=3.0):
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter.mul_(factor)


def gradient(trainer, inputs):
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]).clone()


def metric(trainer, name, mode="train"):
    return trainer._metrics[mode][name][-1]


# --- Against stock TRL --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"])
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_k3_differentiable_in_the_loss_is_trls_own_term(tiny_policy, tmp_path, loss_type, num_iterations):
    """Without a normaliser of ours, the KL term has the weights of TRL's loss_type."""
    common = {"loss_type": loss_type, "num_iterations": num_iterations, "rollout_func": rollout, "beta": 0.7}
    stock = make_trainer(tiny_policy, tmp_path, GRPOTrainer, GRPOConfig, use_bias_correction_kl=True, **common)
    ours = {"kl_placement": "loss", "kl_estimator": "k3", "kl_importance": "differentiable"}
    plus = make_trainer(tiny_policy, tmp_path, **ours, **common)
    for trainer in (stock, plus):
        move_reference(trainer)
    inputs = stock._generate_and_score_completions(rows(1))
    if num_iterations == 2:
        noise = 0.05 * torch.randn(inputs["old_per_token_logps"].shape, generator=torch.Generator().manual_seed(0))
        inputs["old_per_token_logps"] = inputs["old_per_token_logps"] + noise
    expected = gradient(stock, inputs)
    torch.testing.assert_close(gradient(plus, inputs), expected, rtol=1e-4, atol=2e-6)
    assert metric(plus, "kl") > 0.01
    if num_iterations == 1:
        assert metric(plus, "kl") == pytest.approx(metric(stock, "kl"), rel=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"])
def test_we_know_the_token_weights_of_trl(tiny_policy, tmp_path, loss_type, training):
    """The slope of TRL's loss in the advantages, at ratio 1, is minus the token's weight."""
    trainer = make_trainer(
        tiny_policy,
        tmp_path,
        GRPOTrainer,
        GRPOConfig,
        loss_type=loss_type,
        beta=0.0,
        rollout_func=rollout,
        gradient_accumulation_steps=3,
        steps_per_generation=4,
        epsilon_high=5.0,
    )
    trainer.current_gradient_accumulation_steps = 3
    inputs = trainer._generate_and_score_completions(rows(1))
    trainer.model.train(training)
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    inputs["advantages"] = torch.ones(mask.shape, requires_grad=True)
    logps, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
        mask.shape[1],
    )
    inputs["old_per_token_logps"] = logps.detach()
    loss = trainer._compute_loss(trainer.model, inputs)
    (slope,) = torch.autograd.grad(loss, inputs["advantages"])
    if loss_type in ("cispo", "vespo"):
        slope = slope / torch.where(mask.bool(), logps.detach(), 1)
    if loss_type == "sapo":
        slope = slope / (2 / trainer.args.sapo_temperature_pos)
    expected = _compat.token_scale(trainer, inputs, mask).float().unsqueeze(1) * mask
    torch.testing.assert_close(-slope, expected, rtol=1e-4, atol=1e-8)


def forward_passes(policy, output_dir, trainer_class, config_class, **overrides):
    """Which model each pass of two training steps went through."""
    trainer = make_trainer(policy, output_dir, trainer_class, config_class, rollout_func=rollout, **overrides)
    calls, compute = [], trainer._get_per_token_logps_and_entropies

    def counting(model, *args, **kwargs):
        calls.append("reference" if model is trainer.ref_model else "policy")
        return compute(model, *args, **kwargs)

    trainer._get_per_token_logps_and_entropies = counting
    trainer.train()
    return calls


@pytest.fixture(scope="module")
def passes_of_trl(tiny_policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    return {n: forward_passes(tiny_policy, folder, GRPOTrainer, GRPOConfig, num_iterations=n) for n in (1, 2)}


@each_placement
def test_no_more_forward_passes_than_trl(tiny_policy, tmp_path, options, passes_of_trl):
    assert passes_of_trl[1] == ["reference", "policy"] * 2
    for n, expected in passes_of_trl.items():
        got = forward_passes(tiny_policy, tmp_path, GRPOPlusTrainer, GRPOPlusConfig, num_iterations=n, **options)
        assert got == expected


# --- beta and the group's standard deviation ----------------------------------------------------------------------


@each_placement
@pytest.mark.parametrize("normalization", [None, "token"])
def test_beta_scales_the_kl_part_linearly_whatever_the_rewards_std(tiny_policy, tmp_path, options, normalization):
    parts = {}
    for scale in (0.0, 1.0, 1000.0):
        trainer = make_trainer(
            tiny_policy, tmp_path, rollout_func=rollout, loss_normalization=normalization, epsilon=100.0, **options
        )
        trainer.reward_funcs = [lambda scale=scale, **kwargs: [scale * r for r in reward(**kwargs)]]
        move_reference(trainer)
        inputs = trainer._generate_and_score_completions(rows(1))
        gradients = []
        for beta in (0.0, 0.1, 0.3):
            trainer.beta = beta
            gradients.append(gradient(trainer, inputs))
        parts[scale] = gradients[1] - gradients[0]
        assert parts[scale].norm() > 1e-3
        torch.testing.assert_close(gradients[2] - gradients[0], 3 * parts[scale], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(parts[1.0], parts[0.0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(parts[1000.0], parts[0.0], rtol=1e-3, atol=1e-5)


# --- Composition --------------------------------------------------------------------------------------------------


def digit_steps(steps, **kwargs):
    return [[float(sum(char.isdigit() for char in step)) for step in completion] for completion in steps]


@each_placement
def test_with_process_advantages(tiny_policy, tmp_path, options):
    """The KL part is the same as without them, and the process part stays."""
    common = {"rollout_func": rollout, "epsilon": 100.0}
    process = {"process_reward_funcs": digit_steps, "step_delimiter": "[aeiou]"}
    grads = {}
    for name, extra in {"outcome": {}, "process": process}.items():
        trainer = make_trainer(tiny_policy, tmp_path, **common, **extra, **options)
        move_reference(trainer)
        inputs = trainer._generate_and_score_completions(rows(1))
        assert inputs["advantages"].ndim == (2 if extra else 1)
        grads[name] = [gradient(trainer, inputs)]
        trainer.beta = 0.0
        grads[name].append(gradient(trainer, inputs))
    outcome, plain_outcome = grads["outcome"]
    processed, plain_processed = grads["process"]
    assert (plain_outcome - plain_processed).norm() > 1e-3
    torch.testing.assert_close(processed - plain_processed, outcome - plain_outcome, rtol=1e-3, atol=1e-6)


@each_placement
def test_with_a_peft_reference(tiny_policy, tmp_path, options):
    trainer = make_trainer(
        tiny_policy, tmp_path, peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), **options
    )
    assert trainer.ref_model is None
    trainer.train()
    history = [log for log in trainer.state.log_history if "kl" in log]
    # The adapter starts at the reference, and leaves it with the first step.
    assert history[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert history[1]["kl"] > 1e-8
    if "full_vocab" in options.values() and "kl_top_k" not in options:
        assert history[1]["kl/full_vocab"] > 1e-8


def test_a_peft_head_cannot_be_shared_with_the_reference(tiny_policy, tmp_path):
    for options in ({"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}):
        with pytest.raises(ValueError, match=r"plain linear output head|adapter to `lm_head`"):
            make_trainer(tiny_policy, tmp_path, peft_config=LoraConfig(r=2, **options), kl_placement="full_vocab")


def test_full_vocab_with_peft_is_the_kl_to_the_base_model(tiny_policy, tmp_path):
    trainer = make_trainer(
        tiny_policy, tmp_path, peft_config=LoraConfig(r=2, target_modules=["q_proj"]), kl_placement="full_vocab"
    )
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=30, generator=torch.Generator().manual_seed(0))
    inputs = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 4)
    trainer._compute_loss(trainer.model, inputs)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    keep = slice(inputs["prompt_ids"].shape[1] - 1, -1)
    with torch.no_grad():
        policy = trainer.model(input_ids=ids).logits[:, keep].log_softmax(-1)
        with trainer.model.disable_adapter():
            base = trainer.model(input_ids=ids).logits[:, keep].log_softmax(-1)
    kl = (policy.exp() * (policy - base)).sum(-1)[inputs["completion_mask"].bool()]
    assert kl.mean() > 1e-4
    assert metric(trainer, "kl/full_vocab") == pytest.approx(float(kl.mean()), rel=1e-3)


@pytest.mark.parametrize("peft_config", [None, LoraConfig(r=2, target_modules=["q_proj"])], ids=["full", "peft"])
@pytest.mark.parametrize("name", ["full_vocab", "top_k"])
def test_inputs_that_were_made_elsewhere(tiny_policy, tmp_path, name, peft_config):
    """TRL's own keys are enough for the loss; the reference is then passed through once more."""
    trainer = make_trainer(tiny_policy, tmp_path, peft_config=peft_config, rollout_func=rollout, **PLACEMENTS[name])
    with torch.no_grad():
        for key, parameter in trainer.model.named_parameters():
            parameter.mul_(1.5)
            if "lora_B" in key:
                parameter.normal_(std=5)
    inputs = trainer._generate_and_score_completions(rows(1))
    plain = {key: value for key, value in inputs.items() if not key.startswith("plus_")}
    assert len(plain) < len(inputs)
    torch.testing.assert_close(gradient(trainer, plain), gradient(trainer, inputs), rtol=1e-5, atol=1e-7)


@each_placement
def test_junk_where_nothing_is_trained_changes_nothing(tiny_policy, tmp_path, options):
    trainer = make_trainer(
        tiny_policy, tmp_path, rollout_func=rollout, num_iterations=2, loss_normalization="sequence", **options
    )
    move_reference(trainer)
    inputs = trainer._generate_and_score_completions(rows(3))
    expected = gradient(trainer, inputs)
    unused = (inputs["completion_mask"] * inputs["tool_mask"]) == 0
    assert unused.any()
    for key, junk in (("ref_per_token_logps", float("nan")), ("plus_ref_hidden", float("nan"))):
        if key in inputs:
            inputs[key] = inputs[key].clone()
            inputs[key][unused] = junk
    assert torch.equal(gradient(trainer, inputs), expected)
    inputs["old_per_token_logps"] = torch.where(unused, -50.0, inputs["old_per_token_logps"])
    torch.testing.assert_close(gradient(trainer, inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["reward-current", "full_vocab", "loss"])
def test_weights_are_against_the_distribution_that_sampled(tiny_policy, tmp_path, name):
    """vLLM's own log-probabilities where it gives them; a token that it could not score falls back to TRL's."""
    trainer = make_trainer(tiny_policy, tmp_path, rollout_func=rollout, num_iterations=2, **PLACEMENTS[name])
    move_reference(trainer)
    inputs = trainer._generate_and_score_completions(rows(1))
    inputs["advantages"] = torch.zeros(4)
    old = inputs["old_per_token_logps"]
    sampling = old + 0.2 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    sampling[0, 1] = old[0, 1]
    expected = gradient(trainer, {**inputs, "old_per_token_logps": sampling})
    assert (gradient(trainer, inputs) - expected).norm() > 1e-3 * expected.norm()
    with_nan = sampling.clone()
    with_nan[0, 1] = float("nan")
    got = gradient(trainer, {**inputs, "sampling_per_token_logps": with_nan})
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, False
    assert torch.equal(gradient(trainer, {**inputs, "sampling_per_token_logps": with_nan}), gradient(trainer, inputs))


@each_placement
def test_trains_off_policy_and_evaluates(tiny_policy, tmp_path, options):
    trainer = make_trainer(
        tiny_policy,
        tmp_path,
        rollout_func=rollout,
        num_iterations=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_steps=4,
        loss_normalization="group_token",
        mask_truncated_completions=True,
        per_device_eval_batch_size=4,
        **options,
    )
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train()
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    for log in (log for log in trainer.state.log_history if "loss" in log):
        assert all(math.isfinite(log[name]) for name in ("loss", "kl", "kl/k1", "kl/reward_to_go_mean"))
        assert log["kl/coef"] == 0.1
    metrics = trainer.evaluate(Dataset.from_dict({"prompt": PROMPTS[:4]}))
    assert math.isfinite(metrics["eval_loss"]) and "eval_kl" in trainer.state.log_history[-1]


@pytest.mark.parametrize("name", ["reward-current", "full_vocab", "top_k"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_trains_in_mixed_precision(tiny_policy, tmp_path, name, dtype):
    """Autocast over a float32 model, and a model that is bfloat16 itself."""
    trainer = make_trainer(
        tiny_policy, tmp_path, bf16=True, model_init_kwargs={"dtype": dtype}, max_steps=3, **PLACEMENTS[name]
    )
    assert next(trainer.model.parameters()).dtype == getattr(torch, dtype)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "kl" in log]
    assert len(logs) == 3 and all(math.isfinite(log["loss"]) and log["kl"] >= 0 for log in logs)
    assert all(p.isfinite().all() for p in trainer.model.parameters())


# --- Metrics ------------------------------------------------------------------------------------------------------


def test_the_logged_kl_is_one_quantity_in_every_placement(tiny_policy, tmp_path):
    logged = {}
    for name, options in PLACEMENTS.items():
        trainer = make_trainer(tiny_policy, tmp_path, rollout_func=rollout, **options)
        move_reference(trainer)
        inputs = trainer._generate_and_score_completions(rows(2))
        gradient(trainer, inputs)
        logged[name] = [metric(trainer, key) for key in ("kl", "kl/k1")]
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    with torch.no_grad():
        trainer.beta = 0.0
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, mask.shape[1])
    k = (logps - inputs["ref_per_token_logps"])[mask].double()
    for values in logged.values():
        assert values == pytest.approx([float(((-k).exp() + k - 1).mean()), float(k.mean())], rel=1e-4)


def test_reward_to_go_is_the_mean_of_what_tokens_are_charged(tiny_policy, tmp_path):
    trainer = make_trainer(tiny_policy, tmp_path, kl_placement="reward", loss_normalization="token")
    move_reference(trainer)
    inputs = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 4)
    gradient(trainer, inputs)
    mask = inputs["completion_mask"].bool()
    trainer._loss_terms._capture = False
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    with torch.no_grad():
        logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), mask.shape[1])
    charged = []
    for row, kept in zip(logps - inputs["ref_per_token_logps"], mask, strict=True):
        k1 = row[kept].tolist()
        charged += [sum(k1[t:]) for t in range(len(k1))]
    assert metric(trainer, "kl/reward_to_go_mean") == pytest.approx(sum(charged) / len(charged), rel=1e-3, abs=1e-5)


# --- Adaptive coefficient -----------------------------------------------------------------------------------------


def test_adaptive_coefficient_moves_once_a_window_and_survives_a_checkpoint(tiny_policy, tmp_path):
    options = {
        "kl_placement": "reward",
        "kl_target": 1e-6,
        "kl_target_horizon": 100,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 5e-2,
    }
    trainer = make_trainer(tiny_policy, tmp_path, **options)
    trainer.train()
    coefficients = [log["kl/coef"] for log in trainer.state.log_history if "kl/coef" in log]
    # 8 sequences a window. The policy starts at the reference, so the first error is -20 %, then it is +20 %.
    assert coefficients == pytest.approx([0.1 * f for f in (1, 0.984, 0.984 * 1.016, 0.984 * 1.016**2)])
    state = json.loads((tmp_path / "checkpoint-2" / "kl_controller.json").read_text())
    assert state["coefficient"] == pytest.approx(coefficients[2], rel=1e-12)

    resumed = make_trainer(tiny_policy, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [log["kl/coef"] for log in resumed.state.log_history if "kl/coef" in log] == coefficients

    (tmp_path / "checkpoint-2" / "kl_controller.json").unlink()
    with pytest.raises(FileNotFoundError, match="written without kl_target"):
        make_trainer(tiny_policy, tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


# --- Heads of other architectures, and what is refused -------------------------------------------------------------

SMALL = {
    "vocab_size": len(char_tokenizer()),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "model_class, config",
    [
        (Gemma2ForCausalLM, lambda: Gemma2Config(**SMALL, final_logit_softcapping=0.5)),
        (GraniteForCausalLM, lambda: GraniteConfig(**SMALL, logits_scaling=0.25)),
    ],
    ids=["softcap", "scaling"],
)
def test_heads_that_scale_or_cap_their_logits(tmp_path, model_class, config, temperature):
    torch.manual_seed(0)
    directory = tmp_path / "model"
    model_class(config()).save_pretrained(directory)
    char_tokenizer().save_pretrained(directory)
    trainer = make_trainer(str(directory), tmp_path, kl_placement="full_vocab", temperature=temperature)
    move_reference(trainer)
    inputs = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 4)
    gradient(trainer, inputs)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    keep = slice(inputs["prompt_ids"].shape[1] - 1, -1)
    with torch.no_grad():
        policy, ref = (
            (model(input_ids=ids).logits[:, keep] / temperature).log_softmax(-1)
            for model in (trainer.model, trainer.ref_model)
        )
    kl = (policy.exp() * (policy - ref)).sum(-1)[inputs["completion_mask"].bool()].mean()
    assert metric(trainer, "kl/full_vocab") == pytest.approx(float(kl), rel=1e-3)


def test_a_head_that_is_no_plain_projection_is_found_out(tiny_policy, tmp_path, monkeypatch):
    trainer = make_trainer(tiny_policy, tmp_path, kl_placement="full_vocab")
    inputs = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 4)
    trainer.model.config.logit_scale = 3.0
    with pytest.raises(ValueError, match="its head is not a plain projection"):
        trainer._compute_loss(trainer.model, inputs)


def test_a_fused_loss_kernel_is_refused(tiny_policy, tmp_path, monkeypatch):
    import trl_grpo_plus.config as config_module

    monkeypatch.setattr(config_module, "liger_bypasses_loss", lambda args: True)
    for options in ({"kl_placement": "reward"}, {"loss_normalization": "token"}):
        with pytest.raises(ValueError, match="use_liger_kernel"):
            make_trainer(tiny_policy, tmp_path, **options)


def test_a_trl_that_passes_our_hooks_by_is_an_error(tiny_policy, tmp_path, monkeypatch):
    trainer = make_trainer(tiny_policy, tmp_path, kl_placement="reward", rollout_func=rollout)
    inputs = trainer._generate_and_score_completions(rows(1))
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: inputs["advantages"].sum())
    with pytest.raises(RuntimeError, match="before its forward pass"):
        trainer._compute_loss(trainer.model, inputs)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: torch.zeros(()))
    with pytest.raises(RuntimeError, match="no longer"):
        trainer._compute_loss(trainer.model, inputs)
