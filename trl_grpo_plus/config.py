"""`GRPOPlusConfig`: TRL's `GRPOConfig` and the fields of this package, whose defaults leave TRL as it is."""

from collections.abc import Callable
from dataclasses import dataclass, field

from trl import GRPOConfig

from trl_grpo_plus._compat import liger_bypasses_loss
from trl_grpo_plus._kl_plan import KL_COEFFICIENTS, KL_HORIZONS, KL_IMPORTANCE, KL_PLACEMENTS, kl_plan, warn_off_policy
from trl_grpo_plus.algorithms.advantages import BASELINES, CREDIT_FORMS, STD_FORMS
from trl_grpo_plus.algorithms.kl import ESTIMATORS
from trl_grpo_plus.algorithms.normalization import LOSS_NORMALIZATIONS
from trl_grpo_plus.algorithms.steps import check_delimiter


@dataclass
class GRPOPlusConfig(GRPOConfig):
    """Arguments of [`GRPOPlusTrainer`]: all of `trl.GRPOConfig`'s, and those below.

    Process supervision (used when the trainer is given `process_reward_funcs`; arXiv 2402.03300 §4.1.3):

    Args:
        step_delimiter: what ends a step of a completion: `"newline"` (a run of newlines), `"paragraph"` (a run with a
            blank line), any other string is a regular expression, or a callable from text to the offsets where steps
            end.
        process_reward_weights: one weight per process reward function; None for all 1.
        process_weight: weight of the normalised process term in A = outcome_weight * A_outcome + process_weight *
            A_process.
        outcome_weight: weight of the normalised outcome term (TRL's advantage).
        credit_assignment: `"sum"` (the paper), `"min"` (arXiv 2504.15275) or `"mean"`, see
            [`~trl_grpo_plus.algorithms.advantages.process_advantages`].
        credit_gamma: discount per step of the rewards to go, in (0, 1].
        credit_tau: temperature of the soft minimum of `credit_assignment="min"`, in units of the step reward.
        process_std: `"sample"` (ddof 1, as TRL normalises outcomes) or `"population"`.
        process_eps: added to the standard deviation of the step rewards.
        process_baseline: `"group"` or `"leave_one_out"` (at each token the mean advantage of the group's other outputs
            is subtracted).
        delimiter_advantage: `"keep"`, or `"zero"` for no process advantage on the tokens that end a step.
        score_truncated_steps: whether the last step of a completion that was cut off by `max_completion_length` is
            scored.

    KL to the reference, with the coefficient `beta` (docs/kl.md has each combination's bias):

    Args:
        kl_placement: `"loss"`, `"reward"` or `"full_vocab"`; None leaves TRL's own loss-side k3 as it is.
        kl_estimator: of the loss: `"k1"`, `"k2"` or `"k3"` (default). In the reward it is k1; over the full vocabulary
            nothing is estimated.
        kl_importance: correction for completions of an older policy. `"none"`; in the loss `"differentiable"` or
            `"stopped"`; in the reward `"token"` or `"per_decision"`; over the full vocabulary `"per_decision"`.
        kl_importance_truncation: cap, at least 1, of the weights of `"token"` and `"per_decision"`.
        kl_coefficient: in the reward: `"current"` (default), log(pi/pi_ref) outside the clip, or `"old"`,
            log(pi_old/pi_ref) inside the advantage.
        kl_horizon: what a token is charged with: its own KL (`"token"`, default in the loss), that of all later tokens
            too (`"to_go"`, default in the reward and over the full vocabulary), or the whole `"sequence"`'s.
        kl_top_k: over the full vocabulary: only the reference's k most likely tokens and one bucket for the rest.
        kl_token_chunk, kl_vocab_chunk: positions, and vocabulary entries (None = all), that the full-vocabulary KL
            holds at once.
        kl_target: if set, `beta` is only where the coefficient starts, and it is steered so that `kl` comes to this
            value (nats per token).
        kl_target_horizon: sequences over which an error of 20 % moves the coefficient by 20 %.

    Loss normalisation (docs/loss_normalization.md):

    Args:
        loss_normalization: `"sequence"`, `"token"`, `"group_token"` or `"constant"`, exact over all micro-batches and
            ranks of an optimizer step, for every surrogate that `loss_type` names; None for TRL's own.
        loss_normalization_length: L of `"constant"`; `max_completion_length` if None.

    Raises:
        ValueError: a field has a value that means nothing; the message names the field.
    """

    step_delimiter: str = field(
        default="newline",
        metadata={"help": "What ends a step: 'newline', 'paragraph', or a regular expression."},
    )
    process_reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One weight per process reward function; all 1 if not set."}
    )
    process_weight: float = field(default=1.0, metadata={"help": "Weight of the normalised process advantage."})
    outcome_weight: float = field(default=1.0, metadata={"help": "Weight of the normalised outcome advantage."})
    credit_assignment: str = field(
        default="sum",
        metadata={"help": "How a token is charged with later step rewards.", "choices": list(CREDIT_FORMS)},
    )
    credit_gamma: float = field(default=1.0, metadata={"help": "Discount per step of the rewards to go, in (0, 1]."})
    credit_tau: float = field(
        default=0.1, metadata={"help": "Temperature of the soft minimum of credit_assignment='min'."}
    )
    process_std: str = field(
        default="sample",
        metadata={"help": "Standard deviation of the step rewards of a group.", "choices": list(STD_FORMS)},
    )
    process_eps: float = field(default=1e-4, metadata={"help": "Added to the standard deviation of the step rewards."})
    process_baseline: str = field(
        default="group",
        metadata={
            "help": "'leave_one_out' subtracts the mean advantage of the group's other outputs at each token.",
            "choices": list(BASELINES),
        },
    )
    delimiter_advantage: str = field(
        default="keep",
        metadata={
            "help": "'zero' gives the tokens that end a step no process advantage, so that splitting is not taught.",
            "choices": ["keep", "zero"],
        },
    )
    score_truncated_steps: bool = field(
        default=False,
        metadata={"help": "Score the last step of a completion that max_completion_length cut off."},
    )

    kl_placement: str | None = field(
        default=None,
        metadata={"help": "Where the KL goes; TRL's own loss-side k3 if not set.", "choices": list(KL_PLACEMENTS)},
    )
    kl_estimator: str | None = field(
        default=None, metadata={"help": "KL estimator of kl_placement='loss'.", "choices": list(ESTIMATORS)}
    )
    kl_importance: str = field(
        default="none",
        metadata={"help": "Correction for completions of an older policy.", "choices": list(KL_IMPORTANCE)},
    )
    kl_importance_truncation: float | None = field(
        default=None, metadata={"help": "Cap of the weights of kl_importance='token' or 'per_decision', at least 1."}
    )
    kl_coefficient: str | None = field(
        default=None,
        metadata={
            "help": "Log-ratio of kl_placement='reward': of the current policy, or of the one that sampled.",
            "choices": list(KL_COEFFICIENTS),
        },
    )
    kl_horizon: str | None = field(
        default=None,
        metadata={"help": "Whose KL a token is charged with.", "choices": list(KL_HORIZONS)},
    )
    kl_top_k: int | None = field(
        default=None, metadata={"help": "kl_placement='full_vocab' over the reference's top k and a tail bucket."}
    )
    kl_token_chunk: int = field(
        default=128, metadata={"help": "Positions that kl_placement='full_vocab' holds the logits of at once."}
    )
    kl_vocab_chunk: int | None = field(
        default=None,
        metadata={"help": "Vocabulary entries that kl_placement='full_vocab' holds at once; all if unset."},
    )
    kl_target: float | None = field(
        default=None, metadata={"help": "Steer the KL coefficient to this `kl`, in nats per token."}
    )
    kl_target_horizon: int = field(
        default=10_000,
        metadata={"help": "Sequences over which an error of 20 %% moves the KL coefficient by 20 %%."},
    )
    loss_normalization: str | None = field(
        default=None,
        metadata={
            "help": "Normaliser of the loss over the whole optimizer step; loss_type's own if not set.",
            "choices": list(LOSS_NORMALIZATIONS),
        },
    )
    loss_normalization_length: int | None = field(
        default=None, metadata={"help": "L of loss_normalization='constant'; max_completion_length if not set."}
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_process_fields()
        plan = kl_plan(self)
        if plan is not None:
            warn_off_policy(plan, self)
        self._check_normalization_fields()
        if (plan or self.loss_normalization) and liger_bypasses_loss(self):
            raise ValueError(
                "use_liger_kernel=True makes this TRL compute the loss in a fused kernel, which would ignore "
                "kl_placement and loss_normalization. Set use_liger_kernel=False."
            )

    def _check_normalization_fields(self):
        mode, length = self.loss_normalization, self.loss_normalization_length
        if mode is not None and mode not in LOSS_NORMALIZATIONS:
            raise ValueError(
                f"loss_normalization must be one of {', '.join(map(repr, LOSS_NORMALIZATIONS))} or None; got {mode!r}."
            )
        if length is not None and mode != "constant":
            raise ValueError(
                f"loss_normalization_length is the L of loss_normalization='constant'; with {mode!r} it has no effect."
            )
        if length is not None and length < 1:
            raise ValueError(f"loss_normalization_length must be at least 1, got {length}.")
        if mode == "constant" and length is None and self.max_completion_length is None:
            raise ValueError(
                "loss_normalization='constant' divides by max_completion_length, which is None: set "
                "loss_normalization_length."
            )

    def _check_process_fields(self):
        choices = {
            "credit_assignment": CREDIT_FORMS,
            "process_std": STD_FORMS,
            "process_baseline": BASELINES,
            "delimiter_advantage": ("keep", "zero"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, allowed))}; got {getattr(self, name)!r}."
                )
        if not 0 < self.credit_gamma <= 1:
            raise ValueError(f"credit_gamma must lie in (0, 1], got {self.credit_gamma}.")
        if not self.credit_tau > 0:
            raise ValueError(f"credit_tau must be positive, got {self.credit_tau}.")
        if self.process_eps < 0:
            raise ValueError(f"process_eps must not be negative, got {self.process_eps}.")
        try:
            check_delimiter(self.step_delimiter)
        except (TypeError, ValueError) as error:
            raise type(error)(f"step_delimiter: {error}") from error

    def to_dict(self):
        """As in TRL; a callable delimiter is written as its dotted name, so that the arguments can be saved."""
        values = super().to_dict()
        if isinstance(self.step_delimiter, Callable):
            values["step_delimiter"] = f"{self.step_delimiter.__module__}.{self.step_delimiter.__qualname__}"
        return values
