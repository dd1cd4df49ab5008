"""Process-supervised and iterative GRPO beside Hugging Face TRL."""

from typing import TYPE_CHECKING

from reward_fns._lazy import lazy_attributes

__version__ = "0.1.0"

# Imported on first use, so that `import trl_grpo_plus` costs neither torch nor trl.
_LAZY = {
    "EvalCallback": "trl_grpo_plus.evaluation.callback",
    "GRPOPlusConfig": "trl_grpo_plus.config",
    "GRPOPlusTrainer": "trl_grpo_plus.trainer",
    "IterativeGRPOConfig": "trl_grpo_plus.iterative.config",
    "IterativeGRPOTrainer": "trl_grpo_plus.iterative.trainer",
    "PRMConfig": "trl_grpo_plus.reward_models.prm_config",
    "PRMTrainer": "trl_grpo_plus.reward_models.prm_trainer",
    "ProcessRewardModel": "trl_grpo_plus.reward_models.prm",
    "label_steps_by_rollout": "trl_grpo_plus.reward_models.labelling",
}

__all__ = [
    "EvalCallback",
    "GRPOPlusConfig",
    "GRPOPlusTrainer",
    "IterativeGRPOConfig",
    "IterativeGRPOTrainer",
    "PRMConfig",
    "PRMTrainer",
    "ProcessRewardModel",
    "label_steps_by_rollout",
]

if TYPE_CHECKING:
    from trl_grpo_plus.config import GRPOPlusConfig
    from trl_grpo_plus.evaluation.callback import EvalCallback
    from trl_grpo_plus.iterative.config import IterativeGRPOConfig
    from trl_grpo_plus.iterative.trainer import IterativeGRPOTrainer
    from trl_grpo_plus.reward_models.labelling import label_steps_by_rollout
    from trl_grpo_plus.reward_models.prm import ProcessRewardModel
    from trl_grpo_plus.reward_models.prm_config import PRMConfig
    from trl_grpo_plus.reward_models.prm_trainer import PRMTrainer
    from trl_grpo_plus.trainer import GRPOPlusTrainer

__getattr__, __dir__ = lazy_attributes(globals(), _LAZY)
