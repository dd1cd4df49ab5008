"""The only home of what we know of TRL's private parts: the version gate and the contract check.

A subclass whose override is never called fails in silence, so each hook that the trainer stands on is looked up when
the trainer is imported, by signature and by the names and keys that the hook's body uses.
"""

import inspect
from dataclasses import dataclass

import trl
from packaging.version import Version
from trl import GRPOTrainer

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
    Hook("_compute_loss", ("model", "inputs"), ("advantages", "unsqueeze", "_get_per_token_logps_and_entropies")),
    Hook("compute_loss", ("model", "inputs", "return_outputs", "num_items_in_batch"), ("_compute_loss",)),
    Hook("_prepare_inputs", ("generation_batch",), ("_generate_and_score_completions", "_buffered_inputs")),
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
