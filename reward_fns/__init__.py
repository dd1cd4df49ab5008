"""Math rewards and grading for GRPO: usable from plain TRL, without torch, trl or trl_grpo_plus."""

from typing import TYPE_CHECKING

from reward_fns._lazy import lazy_attributes

_LAZY = {
    "FormatReward": "reward_fns.rewards",
    "GSM8KReward": "reward_fns.rewards",
    "Grade": "reward_fns.policy",
    "GradePolicy": "reward_fns.policy",
    "GoldReport": "reward_fns.golds",
    "MathReward": "reward_fns.rewards",
    "OFFICIAL_MODES": "reward_fns.official",
    "format_reward": "reward_fns.rewards",
    "grade": "reward_fns.grading",
    "grade_batch": "reward_fns.grading",
    "gsm8k_reward": "reward_fns.rewards",
    "math_reward": "reward_fns.rewards",
    "StepArithmeticReward": "reward_fns.step_arithmetic",
    "step_arithmetic_reward": "reward_fns.step_arithmetic",
    "validate_golds": "reward_fns.golds",
}

__all__ = [
    "OFFICIAL_MODES",
    "FormatReward",
    "GSM8KReward",
    "GoldReport",
    "Grade",
    "GradePolicy",
    "MathReward",
    "StepArithmeticReward",
    "format_reward",
    "grade",
    "grade_batch",
    "gsm8k_reward",
    "math_reward",
    "step_arithmetic_reward",
    "validate_golds",
]

if TYPE_CHECKING:
    from reward_fns.golds import GoldReport, validate_golds
    from reward_fns.grading import grade, grade_batch
    from reward_fns.official import OFFICIAL_MODES
    from reward_fns.policy import Grade, GradePolicy
    from reward_fns.rewards import FormatReward, GSM8KReward, MathReward, format_reward, gsm8k_reward, math_reward
    from reward_fns.step_arithmetic import StepArithmeticReward, step_arithmetic_reward

__getattr__, __dir__ = lazy_attributes(globals(), _LAZY)
