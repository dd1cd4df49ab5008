"""The only home of what we know of TRL's private parts: the version gate and the contract check.

A subclass whose override is never called fails in silence, so each hook that the trainer stands on is looked up when
the trainer is imported, by signature and by the names and keys that the hook's body uses.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import trl
from packaging.version import Version
from torch import nn
from trl import GRPOTrainer
from trl.trainer.utils import use_adapter

from trl_grpo_plus.algorithms.kl import VocabHead

TESTED_VERSIONS = ("1.12.0", "1.13.0", "1.14.2", "1.16.0")
_OLDEST, _NEXT_MAJOR = Version("1.12"), Version("2")


@dataclass(frozen=True)
class Hook:
    """A method of `trl.GRPOTrainer` that we override or call."""

    name: str
    parameters: tuple[str, ...]
    # Names (attributes, methods) and constants (dictionary keys) that its body must use for our override to take
    # effect.
    uses: tuple[str, ...] = ()


HOOKS = (
    Hook("_calculate_rewards", ("inputs", "prompts", "completions", "completion_ids_list")),
    Hook(
        "_generate_and_score_completions",
        ("inputs",),
        ("_calculate_rewards", "advantages", "completion_ids", "completion_mask", "_logs", "_pending_extra_logs"),
    ),
    Hook(
        "_compute_loss",
        ("model", "inputs"),
        (
            "advantages",
            "unsqueeze",
            "_get_per_token_logps_and_entropies",
            "beta",
            "old_per_token_logps",
            "ref_per_token_logps",
            "num_items_in_batch",
            "current_gradient_accumulation_steps",
            "steps_per_generation",
            "max_completion_length",
        ),
    ),
    # In 1.14 its other parameters are *args: (input_ids, attention_mask, logits_to_keep), as in all versions.
    Hook("_get_per_token_logps_and_entropies", ("model",)),
    Hook("get_batch_samples", ("epoch_iterator", "num_batches")),
    Hook("training_step", ("model", "inputs"), ("_step",)),
    Hook("compute_loss", ("model", "inputs", "return_outputs", "num_items_in_batch"), ("_compute_loss",)),
    Hook("_prepare_inputs", ("generation_batch",), ("_generate_and_score_completions", "_buffered_inputs", "_step")),
    Hook("_log_completion_extra", ("column", "values"), ("_pending_extra_logs",)),
    Hook("_log_metric", ("name", "value"), ("_pending_metrics",)),
    Hook("_save_checkpoint", ("model", "trial")),
    Hook("_load_optimizer_and_scheduler", ("checkpoint",)),
)


def check_trl(trainer_class: type = GRPOTrainer, version: str = trl.__version__) -> None:
    """Checks the installed TRL against what this package needs.

    Raises:
        ImportError: the version is out of range, or a hook is missing, has other parameters or no longer uses what our
            override relies on; the message names the hook and the tested versions.
    """
    tested = f"Tested versions: {', '.join(TESTED_VERSIONS)}. Install one with `pip install 'trl>=1.12,!=1.15.*,<2'`."
    installed = Version(version)
    if installed < _OLDEST or installed >= _NEXT_MAJOR or installed.release[:2] == (1, 15):
        raise ImportError(f"trl-grpo-plus does not work with trl {version}. {tested}")
    for hook in HOOKS:
        problem = _problem_with(trainer_class, hook)
        if problem:
            raise ImportError(
                f"trl {version} changed `{trainer_class.__name__}.{hook.name}`, which trl-grpo-plus stands on: "
                f"{problem}. {tested}"
            )


def _problem_with(trainer_class: type, hook: Hook) -> str | None:
    method = getattr(trainer_class, hook.name, None)
    if method is None:
        return "the method is gone"
    parameters = tuple(inspect.signature(method).parameters)[1:]
    if parameters[: len(hook.parameters)] != hook.parameters:
        return f"its parameters are {parameters}, not {hook.parameters}"
    code = inspect.unwrap(method).__code__
    missing = [name for name in hook.uses if name not in _names_in(code)]
    return f"its body no longer uses {', '.join(missing)}" if missing else None


def _names_in(code) -> set:
    names = {*code.co_names, *code.co_varnames}
    for constant in code.co_consts:
        if isinstance(constant, str):
            names.add(constant)
        elif isinstance(constant, tuple):
            names.update(item for item in constant if isinstance(item, str))
        elif inspect.iscode(constant):
            names |= _names_in(constant)
    return names


def liger_bypasses_loss(args) -> bool:
    """Whether `use_liger_kernel` makes this TRL compute the loss in a fused kernel, past `_compute_loss`."""
    return bool(args.use_liger_kernel) and hasattr(GRPOTrainer, "compute_liger_loss")


def eos_token_ids(trainer: GRPOTrainer) -> set[int]:
    """Ids that end a completion, as TRL of the installed version decides whether a completion was truncated."""
    ids = getattr(trainer, "eos_token_ids", None)
    if ids is None:
        ids = [trainer._tokenizer.eos_token_id]
    return {*ids, trainer._tokenizer.pad_token_id}


def token_scale(trainer: GRPOTrainer, inputs: dict, mask: torch.Tensor) -> torch.Tensor:
    """
    (B,) weight that TRL's `_compute_loss` gives to the per-token loss of each sequence's tokens, by its `loss_type`.

    Raises:
        ValueError: for a `loss_type` whose normaliser is not known.
    """
    training = trainer.model.training
    accumulation = trainer.current_gradient_accumulation_steps if training else 1
    batch_size, counts = len(mask), mask.sum(-1)
    dtype = torch.float32 if mask.device.type == "mps" else torch.float64
    ones = torch.ones(batch_size, dtype=dtype, device=mask.device)
    if trainer.loss_type in ("grpo", "sapo"):
        return ones / (counts.clamp(min=1) * batch_size * accumulation)
    if trainer.loss_type == "bnpo":
        return ones / (counts.sum().clamp(min=1) * accumulation)
    if trainer.loss_type == "dr_grpo":
        return ones / (batch_size * trainer.max_completion_length * accumulation)
    if trainer.loss_type in ("cispo", "dapo", "vespo"):
        normalizer = inputs["num_items_in_batch"].clamp(min=1).to(dtype) / trainer.accelerator.num_processes
        if training:
            normalizer = normalizer * accumulation / trainer.args.steps_per_generation
        return ones / normalizer
    if trainer.loss_type == "luspo":
        return ones / (batch_size * accumulation)
    raise ValueError(
        f"loss_type={trainer.loss_type!r} is not known to trl-grpo-plus, so neither kl_placement nor "
        "loss_normalization can be used with it."
    )


def _unwrapped(accelerator, model: nn.Module) -> nn.Module:
    """The transformers model inside accelerate's wrappers and PEFT's."""
    model = accelerator.unwrap_model(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def hidden_states(accelerator, model: nn.Module, logits_to_keep: int) -> Iterator[list[torch.Tensor]]:
    """
    Collects, from each forward pass of `model` in the context, the hidden states (b, T, H) that its head turns into
    the logits of the T = `logits_to_keep` completion tokens.
    """
    collected: list[torch.Tensor] = []

    def keep(module, args, output):
        collected.append(output[0][:, :-1][:, -logits_to_keep:])

    handle = _unwrapped(accelerator, model).base_model.register_forward_hook(keep)
    try:
        yield collected
    finally:
        handle.remove()


_FORWARD_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


@torch.no_grad()
def reference_hidden_states(trainer: GRPOTrainer, inputs: dict) -> torch.Tensor:
    """(B, T, H) hidden states of the reference at a micro-batch's completion tokens, by a pass of its own."""
    input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    extra = {key: inputs[key] for key in _FORWARD_KEYS if inputs.get(key) is not None}
    num_tokens, reference = inputs["completion_ids"].size(1), nullcontext()
    if trainer.ref_model is None:
        peft_model = trainer.accelerator.unwrap_model(trainer.model)
        reference = use_adapter(peft_model, "ref" if "ref" in peft_model.peft_config else None)
    model = trainer.model if trainer.ref_model is None else trainer.ref_model
    with reference, hidden_states(trainer.accelerator, model, num_tokens) as chunks:
        trainer._get_per_token_logps_and_entropies(model, input_ids, attention_mask, num_tokens, **extra)
    return torch.cat(chunks)


def vocab_head(model: nn.Module, temperature: float, dtype: torch.dtype | None = None) -> VocabHead:
    """The projection by which transformers and TRL make scaled logits of hidden states of `dtype`."""
    config = model.config.get_text_config()
    # The names under which architectures keep a factor on the logits; Granite's is a divisor.
    factors = ("logit_scale", "output_multiplier", "lm_head_multiplier")
    scale = next((getattr(config, name) for name in factors if _has(config, name)), None)
    if scale is None and _has(config, "logits_scaling"):
        scale = config.logits_scaling if config.model_type == "hyperclovax" else 1 / config.logits_scaling
    head = model.get_output_embeddings()
    weight, bias = head.weight, head.bias
    if dtype is not None:
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    softcap = getattr(config, "final_logit_softcapping", None)
    return VocabHead(weight, bias, temperature, 1.0 if scale is None else scale, softcap)


def _has(config, name: str) -> bool:
    return getattr(config, name, None) is not None


def policy_head(trainer: GRPOTrainer, model: nn.Module, dtype: torch.dtype) -> VocabHead:
    """The head of the policy, in the dtype of its hidden states unless `cast_lm_head_to_fp32`."""
    keep = trainer.args.cast_lm_head_to_fp32
    return vocab_head(_unwrapped(trainer.accelerator, model), trainer.temperature, None if keep else dtype)


def reference_head(trainer: GRPOTrainer, dtype: torch.dtype) -> VocabHead:
    """The head of the reference. With PEFT it is the policy's, which `check_full_vocab` has found to be frozen."""
    model = trainer.model if trainer.ref_model is None else trainer.ref_model
    return policy_head(trainer, model, dtype)


def check_full_vocab(trainer: GRPOTrainer) -> None:
    """
    Raises:
        ValueError: the model's head is not a plain linear layer that can be read here, or is trained under PEFT, so
            that policy and reference would share it.
    """
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(
            "kl_placement='full_vocab' reads the weights of the output head, which DeepSpeed and FSDP keep in shards. "
            "Use kl_placement='reward'."
        )
    models = {"model": trainer.model, "reference": trainer.ref_model}
    for name, model in ((n, _unwrapped(trainer.accelerator, m)) for n, m in models.items() if m is not None):
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ValueError(
                f"kl_placement='full_vocab' needs a plain linear output head, but that of the {name} is a "
                f"{type(head).__name__}. Take the head out of PEFT's target_modules and modules_to_save and do not "
                "quantise it, or use kl_placement='reward'."
            )
    if trainer.ref_model is None and model.get_output_embeddings().weight.requires_grad:
        raise ValueError(
            "kl_placement='full_vocab' with a PEFT policy takes the reference's head to be the policy's, so that head "
            "must be frozen. Use kl_placement='reward'."
        )
