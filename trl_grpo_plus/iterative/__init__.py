"""Iterative GRPO (DeepSeekMath, arXiv 2402.03300, Algorithm 1): the loop, the replay buffer and its checkpoints."""

from typing import TYPE_CHECKING

from reward_fns._lazy import lazy_attributes

_LAZY = {
    "CorruptCheckpointError": "trl_grpo_plus.iterative.checkpoint",
    "IterativeGRPOConfig": "trl_grpo_plus.iterative.config",
    "IterativeGRPOTrainer": "trl_grpo_plus.iterative.trainer",
    "ReplayBuffer": "trl_grpo_plus.iterative.replay",
    "UpdatableRewardModel": "trl_grpo_plus.iterative.reward_model",
}

__all__ = [
    "CorruptCheckpointError",
    "IterativeGRPOConfig",
    "IterativeGRPOTrainer",
    "ReplayBuffer",
    "UpdatableRewardModel",
]

if TYPE_CHECKING:
    from trl_grpo_plus.iterative.checkpoint import CorruptCheckpointError
    from trl_grpo_plus.iterative.config import IterativeGRPOConfig
    from trl_grpo_plus.iterative.replay import ReplayBuffer
    from trl_grpo_plus.iterative.reward_model import UpdatableRewardModel
    from trl_grpo_plus.iterative.trainer import IterativeGRPOTrainer

__getattr__, __dir__ = lazy_attributes(globals(), _LAZY)
