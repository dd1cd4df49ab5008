"""The embedded default: synthetic word problems in GSM8K format and a policy under 1M parameters that slips on them.

It needs no hub and no GPU, and serves as the fixture for everything that wants a policy with something to unlearn.
"""

from typing import TYPE_CHECKING

from reward_fns._lazy import lazy_attributes

_LAZY = {
    "exact_step_reward": "trl_grpo_plus.demo.rewards",
    "load_demo_policy": "trl_grpo_plus.demo.policy",
    "load_demo_tokenizer": "trl_grpo_plus.demo.policy",
    "make_problems": "trl_grpo_plus.demo.problems",
}

__all__ = ["exact_step_reward", "load_demo_policy", "load_demo_tokenizer", "make_problems"]

if TYPE_CHECKING:
    from trl_grpo_plus.demo.policy import load_demo_policy, load_demo_tokenizer
    from trl_grpo_plus.demo.problems import make_problems
    from trl_grpo_plus.demo.rewards import exact_step_reward

__getattr__, __dir__ = lazy_attributes(globals(), _LAZY)
