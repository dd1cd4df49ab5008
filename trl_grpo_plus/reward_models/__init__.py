"""Process and outcome reward models: scoring, training, labelling."""

from typing import TYPE_CHECKING

from reward_fns._lazy import lazy_attributes

_LAZY = {
    "ORMConfig": "trl_grpo_plus.reward_models.orm",
    "ORMTrainer": "trl_grpo_plus.reward_models.orm",
    "OutcomeRewardModel": "trl_grpo_plus.reward_models.orm",
    "PRMConfig": "trl_grpo_plus.reward_models.prm_config",
    "PRMTrainer": "trl_grpo_plus.reward_models.prm_trainer",
    "ProcessRewardModel": "trl_grpo_plus.reward_models.prm",
    "ScoredStep": "trl_grpo_plus.reward_models.prm",
    "aggregate": "trl_grpo_plus.reward_models.prm",
    "label_steps_by_rollout": "trl_grpo_plus.reward_models.labelling",
    "make_format": "trl_grpo_plus.reward_models.formats",
    "sample_completions": "trl_grpo_plus.reward_models.labelling",
}

__all__ = [
    "ORMConfig",
    "ORMTrainer",
    "OutcomeRewardModel",
    "PRMConfig",
    "PRMTrainer",
    "ProcessRewardModel",
    "ScoredStep",
    "aggregate",
    "label_steps_by_rollout",
    "make_format",
    "sample_completions",
]

if TYPE_CHECKING:
    from trl_grpo_plus.reward_models.formats import make_format
    from trl_grpo_plus.reward_models.labelling import label_steps_by_rollout, sample_completions
    from trl_grpo_plus.reward_models.orm import ORMConfig, ORMTrainer, OutcomeRewardModel
    from trl_grpo_plus.reward_models.prm import ProcessRewardModel, ScoredStep, aggregate
    from trl_grpo_plus.reward_models.prm_config import PRMConfig
    from trl_grpo_plus.reward_models.prm_trainer import PRMTrainer

__getattr__, __dir__ = lazy_attributes(globals(), _LAZY)
