"""`GRPOPlusConfig`: TRL's `GRPOConfig` and the fields of this package, whose defaults leave TRL as it is."""

from collections.abc import Callable
from dataclasses import dataclass, field

from trl import GRPOConfig

from trl_grpo_plus.algorithms.advantages import BASELINES, CREDIT_FORMS, STD_FORMS
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

    def __post_init__(self):
        super().__post_init__()
        self._check_process_fields()

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
