"""`GRPOPlusTrainer`: TRL's `GRPOTrainer` with process advantages, and a KL and a loss that mean what they say."""

import json
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_plus import _compat
from trl_grpo_plus._kl_plan import kl_plan
from trl_grpo_plus._loss import LossTerms
from trl_grpo_plus._window import OptimizerWindow
from trl_grpo_plus.algorithms.advantages import mix_advantages, pad_step_values, process_advantages
from trl_grpo_plus.algorithms.kl import AdaptiveKLController
from trl_grpo_plus.algorithms.steps import last_step_is_complete, split_steps_batch, step_texts
from trl_grpo_plus.config import GRPOPlusConfig
from trl_grpo_plus.iterative.checkpoint import load_reference, save_reference
from trl_grpo_plus.process_rewards import (
    MeanStepReward,
    ProcessRewardFunc,
    call_process_reward,
    move_to_device,
    process_reward_names,
    resolve_process_reward_funcs,
)

_compat.check_trl()
logger = logging.get_logger(__name__)


@dataclass
class StepScores:
    """What the process rewards said of this rank's completions of one generation batch.

    `scores` is (B, J, F), a score per completion, step and function, NaN where there is none; `ends`, (B, J), the
    inclusive token index of each step's end, -1 where there is no step. Both on the CPU.
    """

    scores: torch.Tensor
    ends: torch.Tensor


class GRPOPlusTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` whose tokens can be supervised step by step (DeepSeekMath, arXiv 2402.03300, §4.1.3).

    Takes all arguments of `trl.GRPOTrainer`. With no `process_reward_funcs` and a plain `GRPOConfig` it is stock TRL,
    bit for bit.

    Args:
        model, reward_funcs, args, train_dataset, ...: as in TRL. `reward_funcs` may be left out when there are process
            rewards; TRL's `reward` curve is then the mean step score. A plain `GRPOConfig` is read with this package's
            defaults.
        process_reward_funcs: functions, [`ProcessRewardModel`]s, or paths of process reward models (one or a list).
            Each is called with the keywords `prompts, completions, completion_ids, steps` (for each completion the
            texts of its steps), the data set's columns and TRL's `trainer_state`, `log_extra`, `log_metric`, and
            returns for each completion a list with one float, or None for "not scored", per step. Async functions are
            awaited.

    Raises:
        TypeError: a process reward is not callable.
        ValueError: a field cannot work in this configuration, or the data set is empty or lacks `prompt`; from the
            training loop, when a process reward function returns something unusable.

    Example:

    ```python
    from reward_fns import gsm8k_reward, step_arithmetic_reward
    from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer

    trainer = GRPOPlusTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        args=GRPOPlusConfig(output_dir="out"),
        reward_funcs=gsm8k_reward,
        process_reward_funcs=step_arithmetic_reward,
        train_dataset=dataset,
    )
    trainer.train()
    ```
    """

    _tag_names: ClassVar = ["trl", "grpo", "trl-grpo-plus"]
    _name = "GRPO-Plus"
    _paper: ClassVar = {
        "title": "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        "id": "2402.03300",
        "citation": GRPOTrainer._paper["citation"],
    }

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: GRPOConfig | None = None,
        train_dataset=None,
        *positional,
        process_reward_funcs: ProcessRewardFunc | str | list[ProcessRewardFunc | str] | None = None,
        **kwargs,
    ):
        self.process_reward_funcs = resolve_process_reward_funcs(process_reward_funcs or [])
        self.process_reward_names = process_reward_names(self.process_reward_funcs)
        environment_factory = kwargs.get("environment_factory")
        self.has_outcome_rewards = reward_funcs not in (None, []) or environment_factory is not None
        self._plus_args = _plus_args(args)
        self._step_scores: StepScores | None = None
        self._window, self._loss_terms = None, None
        self._warned_of_single_steps = False
        if self.process_reward_funcs:
            self.process_reward_weights = _process_weights(self._plus_args, self.process_reward_names)
            _check_process_supervision(self._plus_args)
            if not self.has_outcome_rewards:
                reward_funcs = [MeanStepReward(self._weighted_step_rewards)]
        if environment_factory is None:
            _check_data("train_dataset", train_dataset)
            _check_data("eval_dataset", positional[0] if positional else kwargs.get("eval_dataset"))
        super().__init__(model, reward_funcs, args, train_dataset, *positional, **kwargs)
        move_to_device(self.process_reward_funcs, self.accelerator.device)
        self._window, self._loss_terms = self._make_loss_terms()

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if self.process_reward_funcs:
            self._step_scores = self._score_steps(inputs, prompts, completions, completion_ids_list)
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _generate_and_score_completions(self, inputs):
        if self._loss_terms is None:
            return self._generate_and_supervise(inputs)
        output = self._loss_terms.generate(self._generate_and_supervise, inputs)
        if self._window is not None:
            group_size = self.num_generations if self.model.training else self.num_generations_eval
            self._window.label_groups(output, group_size)
        return output

    def _generate_and_supervise(self, inputs):
        if not self.process_reward_funcs:
            return super()._generate_and_score_completions(inputs)
        if inputs and "prompt" not in inputs[0] and not getattr(self, "environment_factories", None):
            raise ValueError(_missing_prompt("The data", inputs[0]))
        self._step_scores = None
        output = super()._generate_and_score_completions(inputs)
        if self._step_scores is None:
            raise RuntimeError(
                "TRL did not call `_calculate_rewards`, so no step was scored; see trl_grpo_plus._compat."
            )
        output["advantages"] = self._process_supervised_advantages(output)
        return output

    def _make_loss_terms(self) -> tuple[OptimizerWindow | None, LossTerms | None]:
        args = self._plus_args
        plan, window, controller = kl_plan(args), None, None
        if args.loss_normalization is not None:
            length = args.loss_normalization_length or self.max_completion_length
            window = OptimizerWindow(args.loss_normalization, length, self.accelerator)
        if plan is None and window is None:
            return None, None
        if plan is not None and plan.placement == "full_vocab":
            _compat.check_full_vocab(self)
        if args.kl_target is not None:
            controller = AdaptiveKLController(self.beta, args.kl_target, args.kl_target_horizon)
        return window, LossTerms(self, plan, window, controller)

    def get_batch_samples(self, *args, **kwargs):
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        if self._window is not None:
            self._window.begin(batches)
        return batches, num_items

    def _prepare_inputs(self, generation_batch):
        if self._window is None or not self.model.training:
            return super()._prepare_inputs(generation_batch)
        return self._window.next(self, generation_batch, super()._prepare_inputs)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if self._loss_terms is None:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        return self._loss_terms.log_probs(super()._get_per_token_logps_and_entropies, model, *args, **kwargs)

    def _compute_loss(self, model, inputs):
        if self._loss_terms is None:
            return super()._compute_loss(model, inputs)
        return self._loss_terms.loss(super()._compute_loss, model, inputs)

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        folder = os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.sync_ref_model:
            save_reference(self, folder)
        if self._steers_kl and self.args.should_save:
            with open(os.path.join(folder, _KL_STATE), "w") as file:
                json.dump(self._loss_terms.state_dict(), file)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        # Stock TRL starts again from the base model as reference, whatever it had been synchronised to.
        if self.args.sync_ref_model:
            load_reference(self, checkpoint)
        if self._steers_kl:
            path = os.path.join(checkpoint, _KL_STATE)
            if not os.path.exists(path):
                raise FileNotFoundError(
                    f"{checkpoint} has no {_KL_STATE}: it was written without kl_target, so the KL coefficient cannot "
                    "go on where it was. Resume without kl_target, or start a new run from its weights."
                )
            with open(path) as file:
                self._loss_terms.load_state_dict(json.load(file))

    @property
    def _steers_kl(self) -> bool:
        return self._loss_terms is not None and self._loss_terms.controller is not None

    def _score_steps(self, inputs, prompts, completions, completion_ids_list) -> StepScores:
        """Splits this rank's completions into steps and scores them with every process reward function."""
        args = self._plus_args
        step_ends = split_steps_batch(completion_ids_list, self._tokenizer, args.step_delimiter)
        steps = [
            step_texts(ids, ends, self._tokenizer) for ids, ends in zip(completion_ids_list, step_ends, strict=True)
        ]
        self._warn_of_single_steps(step_ends)
        columns = {key: [row[key] for row in inputs] for key in inputs[0] if key not in _NOT_COLUMNS}
        if getattr(self, "environments", None) is not None:
            columns["environments"] = self.environments
        is_cut_off = [self._is_cut_off(ids) for ids in completion_ids_list]
        per_func = []
        for func, name in zip(self.process_reward_funcs, self.process_reward_names, strict=True):
            rows = call_process_reward(
                func,
                name,
                steps,
                prompts=prompts,
                completions=completions,
                completion_ids=completion_ids_list,
                trainer_state=self.state,
                log_extra=self._log_completion_extra,
                log_metric=self._log_metric,
                **columns,
            )
            if not args.score_truncated_steps:
                rows = [[*row[:-1], None] if cut else row for row, cut in zip(rows, is_cut_off, strict=True)]
            self._log_completion_extra(f"{name}/steps", rows)
            per_func.append(pad_step_values(rows, torch.nan, torch.float64))
        return StepScores(torch.stack(per_func, dim=-1), pad_step_values(step_ends, -1, torch.long))

    def _is_cut_off(self, ids: list[int]) -> bool:
        """Whether `max_completion_length` cut a completion off in the middle of its last step."""
        if not ids or ids[-1] in _compat.eos_token_ids(self):
            return False
        return not last_step_is_complete(ids, self._tokenizer, self._plus_args.step_delimiter)

    def _weighted_step_rewards(self) -> torch.Tensor:
        """(B, J): the weighted sum of this rank's step rewards over the functions, NaN where none scored the step."""
        return _weighted_sum(self._step_scores.scores, self.process_reward_weights)

    def _process_supervised_advantages(self, output: dict[str, Any]) -> torch.Tensor:
        """(B, T) advantages of this rank's completions; puts right what TRL has logged and logs the step metrics."""
        mode = "train" if self.model.training else "eval"
        completion_ids, outcome = output["completion_ids"], output["advantages"]
        num_local, num_tokens = completion_ids.shape
        local = slice(self.accelerator.process_index * num_local, (self.accelerator.process_index + 1) * num_local)
        gathered = self._gather_step_scores()
        process = self._group_advantages(gathered, local, num_tokens).to(completion_ids.device, torch.float32)
        outcome_weight = self._plus_args.outcome_weight if self.has_outcome_rewards else 0.0
        advantages = mix_advantages(outcome, process, outcome_weight, self._plus_args.process_weight)

        mask = output["completion_mask"] * output.get("tool_mask", 1)
        self._log_step_metrics(mode, gathered, process, mask)
        self._relog_advantages(_mean_over_tokens(advantages, mask))
        return advantages

    def _gather_step_scores(self) -> StepScores:
        """The step scores of all ranks, in the order of TRL's gathered rewards."""
        if self.accelerator.num_processes == 1:
            return self._step_scores
        device = self.accelerator.device
        scores, ends = self._step_scores.scores.float().to(device), self._step_scores.ends.to(device)
        scores = self.accelerator.pad_across_processes(scores, dim=1, pad_index=torch.nan)
        ends = self.accelerator.pad_across_processes(ends, dim=1, pad_index=-1)
        return StepScores(self.accelerator.gather(scores).cpu().double(), self.accelerator.gather(ends).cpu())

    def _group_advantages(self, gathered: StepScores, local: slice, num_tokens: int) -> torch.Tensor:
        """(B, T) process advantages of the local rows, normalised over groups that may lie on several ranks."""
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        first = local.start // group_size * group_size
        last = -(-local.stop // group_size) * group_size
        scores, ends = gathered.scores[first:last], gathered.ends[first:last]
        longest = max(num_tokens, int(ends.max().item()) + 1 if ends.numel() else 0)
        rows = slice(local.start - first, local.stop - first)

        def advantages_of(step_rewards):
            args = self._plus_args
            return process_advantages(
                step_rewards,
                ends,
                group_size,
                longest,
                credit=args.credit_assignment,
                std=args.process_std,
                eps=args.process_eps,
                gamma=args.credit_gamma,
                tau=args.credit_tau,
                baseline=args.process_baseline,
                zero_delimiters=args.delimiter_advantage == "zero",
            )[rows, :num_tokens]

        if self.multi_objective_aggregation == "normalize_then_sum":
            return sum(w * advantages_of(scores[..., f]) for f, w in enumerate(self.process_reward_weights.tolist()))
        return advantages_of(_weighted_sum(scores, self.process_reward_weights))

    def _log_step_metrics(self, mode, gathered: StepScores, process, mask):
        metrics = self._metrics[mode]
        is_step = gathered.ends >= 0
        for f, name in enumerate(self.process_reward_names):
            values = gathered.scores[..., f]
            values = values[~values.isnan()]
            metrics[f"process/{name}/step_mean"].append(values.mean().item() if len(values) else float("nan"))
            metrics[f"process/{name}/step_std"].append(values.std().item() if len(values) > 1 else float("nan"))
        metrics["process/steps_per_completion"].append(is_step.sum(1).double().mean().item())
        unscored = is_step & gathered.scores.isnan().all(-1)
        metrics["process/unscored_ratio"].append((unscored.sum() / is_step.sum().clamp(min=1)).item())
        totals = torch.stack([(process.abs() * mask).sum(), mask.sum().to(process.dtype)])
        total, count = self.accelerator.reduce(totals, reduction="sum").tolist()
        metrics["process/advantage_abs_mean"].append(total / max(count, 1.0))

    def _relog_advantages(self, local_means: torch.Tensor):
        """Puts each completion's mean over its tokens where TRL has already logged the outcome advantages."""
        means = self.accelerator.gather(local_means).tolist()
        logged = self._logs["advantages"]
        for _ in range(min(len(means), len(logged))):
            logged.pop()
        logged.extend(means)

    def _warn_of_single_steps(self, step_ends):
        if self._warned_of_single_steps or any(len(ends) > 1 for ends in step_ends):
            return
        self._warned_of_single_steps = True
        logger.warning(
            f"step_delimiter={self._plus_args.step_delimiter!r} was found in 0 of {len(step_ends)} completions (0 "
            "%): each is one step, and process supervision is then outcome supervision. Check the delimiter against "
            "a sampled completion."
        )


_KL_STATE = "kl_controller.json"
_NOT_COLUMNS = ("prompt", "completion", "completion_ids", "prompts", "completions", "steps")


def _weighted_sum(scores, weights):
    """(B, J, F), (F,) -> (B, J): sum over the functions that scored a step, NaN where none did."""
    total = (scores.nan_to_num() * weights).sum(-1)
    return total.masked_fill(scores.isnan().all(-1), torch.nan)


def _mean_over_tokens(values, mask):
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def _plus_args(args: GRPOConfig | None) -> GRPOPlusConfig:
    """Our fields of `args`; a plain `GRPOConfig` gets the defaults, without a second run of TRL's checks."""
    if isinstance(args, GRPOPlusConfig):
        return args
    defaults = object.__new__(GRPOPlusConfig)
    defaults.__dict__.update(vars(args) if args is not None else {})
    return defaults


def _process_weights(args: GRPOPlusConfig, names: list[str]) -> torch.Tensor:
    weights = args.process_reward_weights
    if weights is None:
        return torch.ones(len(names), dtype=torch.float64)
    if len(weights) != len(names):
        raise ValueError(
            f"process_reward_weights has {len(weights)} entries for {len(names)} process reward functions "
            f"({', '.join(names)})."
        )
    return torch.tensor(weights, dtype=torch.float64)


def _check_process_supervision(args: GRPOPlusConfig):
    if getattr(args, "use_liger_kernel", False) and _compat.liger_bypasses_loss(args):
        raise ValueError(
            "use_liger_kernel=True makes this TRL compute the loss in a fused kernel that reads one advantage per "
            "completion, so process_reward_funcs would be ignored. Set use_liger_kernel=False."
        )


def _check_data(name, dataset):
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            _check_data(f"{name}[{key!r}]", part)
        return
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"{name} is empty: it has no rows to sample completions for.")
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and "prompt" not in columns:
        raise ValueError(_missing_prompt(name, columns))


def _missing_prompt(name, columns):
    return (
        f"{name} has no column 'prompt', only {', '.join(map(repr, sorted(columns)))}. Rename or map the column that "
        "holds the question, for example `dataset.map(lambda row: {'prompt': row['question']})`."
    )
