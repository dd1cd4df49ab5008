"""`IterativeGRPOConfig`: `GRPOPlusConfig` with the outer loop of DeepSeekMath's Algorithm 1."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl_grpo_plus.config import GRPOPlusConfig
from trl_grpo_plus.iterative.replay import STRATEGIES

SCOPES = ("run", "iteration")
STARTS = ("continue", "initial")
LOSSES = ("pointwise", "pairwise")
LABELS = ("rule", "rollouts")


@dataclass
class IterativeGRPOConfig(GRPOPlusConfig):
    """Arguments of [`IterativeGRPOTrainer`]: all of [`GRPOPlusConfig`]'s, and those below.

    Other defaults than in TRL: `beta` 0.04 (DeepSeekMath's), and `save_steps` is the length of an iteration.
        `max_steps`
    follows from `outer_iterations` and `steps_per_iteration`, so leave it out.

    The outer loop (arXiv 2402.03300, Algorithm 1):

    Args:
        outer_iterations: I, how often the reference is reset and the reward model retrained. (TRL's `num_iterations`
            is
            another number: the algorithm's mu, updates per sampled batch.)
        steps_per_iteration: M, optimizer steps of the policy in one iteration; a multiple of the optimizer steps that
            one generation batch serves.
        reset_reference: whether the reference becomes a copy of the policy as each iteration starts. None: yes if
            there is a reference (`beta` > 0).
        learning_rate_scope: `"run"`: the learning rates decay once over all iterations. `"iteration"`: the policy's
            and the reward model's schedules start again in each.
        reset_policy_optimizer: forget the policy optimizer's state as each iteration starts.

    The reward model:

    Args:
        update_reward_model: False freezes it (the usual one-round RLHF); its accuracy is measured all the same.
        reward_model_learning_rate: of AdamW; 2e-5 is DeepSeekMath's.
        reward_model_epochs: passes over the mix of new and old samples in each iteration.
        reward_model_batch_size: samples in one optimizer step, over all ranks; an epoch's last, short one is left out.
        reward_model_micro_batch_size: samples in one forward pass of a rank; None: as many as a rank's share.
        reward_model_loss: of an outcome reward model. `"pointwise"`: cross-entropy with the grader's verdict.
            `"pairwise"`: Bradley-Terry between right and wrong answers to the same prompt.
        reward_model_start: `"continue"`: from the last iteration's weights. `"initial"`: from the first ones.
        reset_reward_model_optimizer: forget its optimizer's state before each update.
        reward_model_args: further arguments of the reward model's trainer (`PRMConfig` or `ORMConfig`), such as
            `bf16`, `max_length` or `gradient_checkpointing`.
        heldout_fraction: share of the prompts that never train the reward model. The choice hangs on the prompt alone,
            so it is the same in all iterations. Their samples give `reward_model/accuracy_before` and `_after`.
        skip_worse_update: put the old weights back when the accuracy on held-out samples fell in the update.

    Its training set:

    Args:
        max_samples: most new samples kept in an iteration, before the held-out ones are set apart; None for all.
        balance_samples: thin out the larger class until as many right as wrong completions are left.
        answer_column: column of the gold answers, for the default grader.
        step_labels: where a process reward model's labels come from: `"rule"` (the trainer's `step_labeler`) or
            `"rollouts"` (share of right completions from each prefix, arXiv 2312.08935).
        rollouts_per_step: completions from each prefix.
        replay_fraction: share of the update's samples that are history; a tenth in the paper.
        replay_strategy: what stays in the full buffer: `"reservoir"` or `"recency"`, see [`ReplayBuffer`].
        replay_max_size: most samples in the buffer; None for no bound.

    Raises:
        ValueError: a field has a value that means nothing or cannot work with another; the message names the field.
    """

    beta: float = field(default=0.04, metadata={"help": "KL coefficient; DeepSeekMath's 0.04."})
    save_steps: float | None = field(
        default=None,
        metadata={"help": "Optimizer steps between checkpoints, a multiple of a generation batch's; default: M."},
    )
    outer_iterations: int = field(default=2, metadata={"help": "I: how often reference and reward model are renewed."})
    steps_per_iteration: int = field(default=100, metadata={"help": "M: optimizer steps of the policy per iteration."})
    reset_reference: bool | None = field(
        default=None, metadata={"help": "Reference <- policy as each iteration starts. Default: if beta > 0."}
    )
    learning_rate_scope: str = field(
        default="run",
        metadata={"help": "Learning rates decay over the run or anew per iteration.", "choices": [*SCOPES]},
    )
    reset_policy_optimizer: bool = field(
        default=False, metadata={"help": "Forget the policy optimizer's state as each iteration starts."}
    )
    update_reward_model: bool = field(default=True, metadata={"help": "False freezes the reward model."})
    reward_model_learning_rate: float = field(default=2e-5, metadata={"help": "Of AdamW; DeepSeekMath's 2e-5."})
    reward_model_epochs: float = field(default=1.0, metadata={"help": "Passes over the mix in each iteration."})
    reward_model_batch_size: int = field(default=32, metadata={"help": "Samples per optimizer step, over all ranks."})
    reward_model_micro_batch_size: int | None = field(
        default=None, metadata={"help": "Samples per forward pass of a rank; default: a rank's share of the batch."}
    )
    reward_model_loss: str = field(
        default="pointwise", metadata={"help": "Loss of an outcome reward model.", "choices": [*LOSSES]}
    )
    reward_model_start: str = field(
        default="continue", metadata={"help": "Weights that an update starts from.", "choices": [*STARTS]}
    )
    reset_reward_model_optimizer: bool = field(
        default=False, metadata={"help": "Forget the reward model optimizer's state before each update."}
    )
    reward_model_args: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further arguments of the reward model's trainer."}
    )
    heldout_fraction: float = field(
        default=0.1, metadata={"help": "Share of the prompts that never train the reward model."}
    )
    skip_worse_update: bool = field(
        default=False, metadata={"help": "Undo an update that lowers the accuracy on held-out samples."}
    )
    max_samples: int | None = field(default=None, metadata={"help": "Most new samples kept in an iteration."})
    balance_samples: bool = field(default=False, metadata={"help": "As many right as wrong new samples."})
    answer_column: str = field(default="answer", metadata={"help": "Column of the gold answers."})
    step_labels: str = field(
        default="rule", metadata={"help": "Where a PRM's step labels come from.", "choices": [*LABELS]}
    )
    rollouts_per_step: int = field(default=8, metadata={"help": "Completions from each prefix, for 'rollouts'."})
    replay_fraction: float = field(
        default=0.1, metadata={"help": "Share of history in the update; a tenth in the paper."}
    )
    replay_strategy: str = field(
        default="reservoir", metadata={"help": "What stays in the full buffer.", "choices": [*STRATEGIES]}
    )
    replay_max_size: int | None = field(default=100_000, metadata={"help": "Most samples in the replay buffer."})

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOPlusConfig._VALID_DICT_FIELDS, "reward_model_args"]

    def __post_init__(self):
        for name in ("outer_iterations", "steps_per_iteration"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        total = self.outer_iterations * self.steps_per_iteration
        if self.max_steps not in (-1, total):
            raise ValueError(
                f"max_steps={self.max_steps} is not outer_iterations * steps_per_iteration = {total}. Leave it out."
            )
        self.max_steps = total
        if self.save_steps is None:
            self.save_steps = self.steps_per_iteration
        super().__post_init__()
        self._check_loop()
        self._check_reward_model()

    @property
    def steps_per_generation_batch(self) -> int:
        """Optimizer steps that one generation batch serves."""
        return self.steps_per_generation * self.num_iterations // self.gradient_accumulation_steps

    @property
    def resets_reference(self) -> bool:
        """Whether the reference is reset as each iteration starts."""
        return self.beta != 0 if self.reset_reference is None else self.reset_reference

    def _check_loop(self):
        micro_batches = self.steps_per_generation * self.num_iterations
        if micro_batches % self.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation * num_iterations = {micro_batches} micro-batches come from a generation batch, "
                f"no multiple of gradient_accumulation_steps={self.gradient_accumulation_steps}; an iteration could "
                "not end between two generation batches."
            )
        window = self.steps_per_generation_batch
        if self.steps_per_iteration % window:
            raise ValueError(
                f"steps_per_iteration={self.steps_per_iteration} is no multiple of the {window} optimizer steps that "
                "one generation batch serves: the reference would change under buffered log-probabilities."
            )
        if self.save_strategy == "steps" and (self.save_steps < 1 or self.save_steps % window):
            raise ValueError(
                f"save_steps={self.save_steps} is no multiple of the {window} optimizer steps that one generation "
                "batch serves: a resumed run would sample anew what the interrupted one had trained on in part."
            )
        if self.save_only_model:
            raise ValueError("save_only_model=True leaves out what a resumed run needs. Set save_only_model=False.")
        if self.auto_find_batch_size:
            raise ValueError("auto_find_batch_size=True restarts the training loop in the middle of an iteration.")
        if self.sync_ref_model:
            raise ValueError(
                "sync_ref_model=True and the reset of iterative GRPO move the same reference; leave it out."
            )
        if self.reset_reference and self.beta == 0:
            raise ValueError("reset_reference=True, but with beta=0 there is no reference. Set beta, or leave it out.")
        if self.load_best_model_at_end:
            raise ValueError("load_best_model_at_end=True is not the end of Algorithm 1. Set it to False.")

    def _check_reward_model(self):
        choices = {
            "learning_rate_scope": SCOPES,
            "reward_model_start": STARTS,
            "reward_model_loss": LOSSES,
            "step_labels": LABELS,
            "replay_strategy": STRATEGIES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, allowed))}; got {getattr(self, name)!r}."
                )
        for name in ("reward_model_learning_rate", "reward_model_epochs"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        for name in ("reward_model_batch_size", "reward_model_micro_batch_size", "rollouts_per_step", "max_samples"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.replay_max_size is not None and self.replay_max_size < 1:
            raise ValueError(f"replay_max_size must be at least 1 or None, got {self.replay_max_size}.")
        for name in ("replay_fraction", "heldout_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}.")
        if self.skip_worse_update and self.heldout_fraction == 0:
            raise ValueError("skip_worse_update=True needs held-out samples; set heldout_fraction above 0.")

    @classmethod
    def deepseekmath(cls, output_dir: str, **overrides: Any) -> "IterativeGRPOConfig":
        """DeepSeekMath's figures (§4.2): policy 1e-6, reward model 2e-5, beta 0.04, G 64, length 1024, batch 1024, mu
        1.

        The batch of 1024 completions is cut for one process into 64 micro-batches of 16; with more processes divide
        `gradient_accumulation_steps`. The paper does not give I, M or the reward model's batch size.
        """
        figures = {
            "learning_rate": 1e-6,
            "reward_model_learning_rate": 2e-5,
            "beta": 0.04,
            "num_generations": 64,
            "max_completion_length": 1024,
            "per_device_train_batch_size": 16,
            "gradient_accumulation_steps": 64,
            "num_iterations": 1,
            "replay_fraction": 0.1,
        }
        return cls(output_dir=output_dir, **{**figures, **overrides})
