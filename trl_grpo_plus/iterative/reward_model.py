"""What the outer loop needs of a reward model: to score, to be trained further, and to be saved.

This package's process and outcome reward models are wrapped by [`as_updatable`]; a reward model of another kind takes
part by subclassing [`UpdatableRewardModel`].
"""

import contextlib
import inspect
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from accelerate.state import GradientState
from datasets import Dataset, are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import AutoConfig, PrinterCallback, Trainer, get_scheduler
from transformers.utils import logging

from trl_grpo_plus.iterative.config import IterativeGRPOConfig

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class FitSettings:
    """How an update is to be made.

    Args:
        args: the run's arguments; the update reads the fields `reward_model_*`.
        iteration: number of the iteration, from 1.
        seed: for the order of the samples; all generators are seeded with it already.
        scratch: a directory that the update may write in; it is removed afterwards.
    """

    args: IterativeGRPOConfig
    iteration: int
    seed: int
    scratch: Path


class UpdatableRewardModel(ABC):
    """A reward model that iterative GRPO can train further.

    It is called as TRL calls rewards: with the keywords `prompts, completions, completion_ids`, the data set's columns
        and,
    if it scores steps, `steps`. An `"outcome"` model returns one float per completion, a `"process"` model a list with
    one float or None per step. Scores are probabilities of being right; only with `reward_model_loss="pairwise"` they
    may be any numbers.
    """

    granularity: ClassVar[Literal["outcome", "process"]]
    # TRL's name of the reward in logs.
    __name__: str

    @abstractmethod
    def __call__(self, prompts: list, completions: list, **columns: Any) -> list:
        """Scores completions."""

    @abstractmethod
    def fit(self, train: Dataset, settings: FitSettings, optimizer_state: dict | None) -> tuple[float | None, dict]:
        """Trains further, in place. Called on all ranks with the same data; all must end with the same weights.

        Args:
            train: columns `prompt`, `completion`, `correct` (1.0 or 0.0), `steps` and `step_labels` (float or None
                each), and `iteration`.
            settings: how.
            optimizer_state: what the last call returned, or None to start anew.

        Returns:
            The mean loss (None if there was nothing to learn from), and the optimizer's state (tensors, numbers, lists
            and dicts).
        """

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Puts the weights back, in place."""

    @abstractmethod
    def save_pretrained(self, directory: str | Path) -> None:
        """Saves the model for use elsewhere."""

    def to(self, device: torch.device) -> None:  # noqa: B027
        """Moves the model to the policy's device; nothing needs to be done where it has none."""

    def score(self, samples: Dataset) -> list[list[float | None]]:
        """Scores stored samples: one list for each, with a score per step or the one score of the outcome."""
        columns = {"prompts": samples["prompt"][:], "completions": samples["completion"][:]}
        if self.granularity == "process":
            return self(**columns, steps=samples["steps"][:])
        return [[score] for score in self(**columns)]


class _OwnedModel(UpdatableRewardModel):
    """One whose weights are those of `self.reward_model`, a scorer of this package."""

    def state_dict(self):
        return self.reward_model.model.state_dict()

    def load_state_dict(self, state):
        self.reward_model.model.load_state_dict(state)

    def save_pretrained(self, directory):
        self.reward_model.save_pretrained(directory)

    def to(self, device):
        self.reward_model.to(device)


class ProcessAdapter(_OwnedModel):
    """A [`ProcessRewardModel`], trained with [`PRMTrainer`] on step labels.

    Raises:
        ValueError: its format is one that `PRMTrainer` does not train.
    """

    granularity = "process"

    def __init__(self, reward_model):
        if reward_model.format.name not in ("token_classification", "token_pair"):
            raise ValueError(
                f"reward_model: a process reward model in the format {reward_model.format.name!r} can score but not "
                "be trained; iterative GRPO needs 'token_classification' or 'token_pair'."
            )
        self.reward_model = reward_model
        self.__name__ = reward_model.__name__

    def __call__(self, prompts, completions, **columns):
        return self.reward_model(prompts=prompts, completions=completions, **columns)

    def fit(self, train, settings, optimizer_state):
        from trl_grpo_plus.reward_models import PRMConfig, PRMTrainer

        layout = self.reward_model.format
        options = {"step_separator": layout.separator, "max_length": self.reward_model.max_length}
        options["head"] = layout.name
        if layout.name == "token_pair":
            options |= {"good_token": layout.good_token, "bad_token": layout.bad_token}
        rows = Dataset.from_dict(
            {
                "prompt": train["prompt"][:],
                "completions": [[step.rstrip("\n") for step in steps] for steps in train["steps"]],
                "labels": train["step_labels"][:],
            }
        )
        return run_trainer(
            PRMTrainer,
            PRMConfig,
            self.reward_model.model,
            self.reward_model.tokenizer,
            rows,
            settings,
            optimizer_state,
            options,
        )


class OutcomeAdapter(_OwnedModel):
    """An [`OutcomeRewardModel`], trained with [`ORMTrainer`] on verdicts or with TRL's `RewardTrainer` on pairs.

    Raises:
        ValueError: from `score` with the pointwise loss, where the model gives logits.
    """

    granularity = "outcome"

    def __init__(self, reward_model):
        self.reward_model = reward_model
        self.__name__ = reward_model.__name__

    def __call__(self, prompts, completions, **columns):
        return self.reward_model(prompts=prompts, completions=completions)

    def fit(self, train, settings, optimizer_state):
        if settings.args.reward_model_loss == "pairwise":
            return self._fit_pairs(train, settings, optimizer_state)
        from trl_grpo_plus.reward_models import ORMConfig, ORMTrainer

        rows = Dataset.from_dict(
            {"prompt": train["prompt"][:], "completion": train["completion"][:], "label": train["correct"][:]}
        )
        options = {"max_length": self.reward_model.max_length}
        return run_trainer(
            ORMTrainer,
            ORMConfig,
            self.reward_model.model,
            self.reward_model.tokenizer,
            rows,
            settings,
            optimizer_state,
            options,
        )

    def _fit_pairs(self, train, settings, optimizer_state):
        from trl import RewardConfig, RewardTrainer

        pairs = make_pairs(train, settings.seed)
        if pairs is None:
            logger.warning(
                f"Iteration {settings.iteration}: no prompt has both a right and a wrong answer, so the pairwise loss "
                "has nothing to learn from and the reward model stays as it is."
            )
            return None, optimizer_state
        options = {"max_length": self.reward_model.max_length}
        return run_trainer(
            RewardTrainer,
            RewardConfig,
            self.reward_model.model,
            self.reward_model.tokenizer,
            pairs,
            settings,
            optimizer_state,
            options,
        )


def make_pairs(samples: Dataset, seed: int) -> Dataset | None:
    """Pairs of a right and a wrong completion to the same prompt: `prompt`, `chosen`, `rejected`.

    Each sample of a prompt's larger class is in one pair; those of the smaller class are used in turn, in random
    order.

    Args:
        samples: columns `prompt`, `completion` and `correct`.
        seed: of the order.

    Returns:
        The pairs; None if no prompt has completions of both kinds.
    """
    groups: dict[str, dict] = {}
    for prompt, completion, verdict in zip(samples["prompt"], samples["completion"], samples["correct"], strict=True):
        group = groups.setdefault(json.dumps(prompt, sort_keys=True), {"prompt": prompt, True: [], False: []})
        group[verdict >= 0.5].append(completion)
    rng = random.Random(seed)
    pairs = []
    for group in groups.values():
        right, wrong = (rng.sample(group[kind], len(group[kind])) for kind in (True, False))
        for i in range(max(len(right), len(wrong)) if right and wrong else 0):
            pairs.append(
                {"prompt": group["prompt"], "chosen": right[i % len(right)], "rejected": wrong[i % len(wrong)]}
            )
    return Dataset.from_list(pairs) if pairs else None


def as_updatable(reward_model: Any) -> UpdatableRewardModel:
    """Wraps what a user may pass as `reward_model`.

    Raises:
        TypeError: it cannot be trained further.
    """
    if isinstance(reward_model, UpdatableRewardModel):
        return reward_model
    from trl_grpo_plus.reward_models import OutcomeRewardModel, ProcessRewardModel

    if isinstance(reward_model, (str, Path)):
        reward_model = _load(str(reward_model))
    if isinstance(reward_model, OutcomeRewardModel):
        return OutcomeAdapter(reward_model)
    if isinstance(reward_model, ProcessRewardModel):
        return ProcessAdapter(reward_model)
    raise TypeError(
        f"reward_model: {type(reward_model).__name__} cannot be trained further. Pass a ProcessRewardModel, an "
        "OutcomeRewardModel, a path of one, or a subclass of UpdatableRewardModel."
    )


def _load(path: str):
    """An outcome reward model if the files say sequence classification, else a process reward model."""
    from trl_grpo_plus.reward_models import OutcomeRewardModel, ProcessRewardModel

    architectures = AutoConfig.from_pretrained(path).architectures or [""]
    kind = OutcomeRewardModel if architectures[0].endswith("ForSequenceClassification") else ProcessRewardModel
    return kind.from_pretrained(path, dtype=torch.float32)


def run_trainer(
    trainer_class: type[Trainer],
    config_class: type,
    model: torch.nn.Module,
    tokenizer: Any,
    rows: Dataset,
    settings: FitSettings,
    optimizer_state: dict | None,
    options: dict[str, Any],
) -> tuple[float, dict]:
    """Trains a model in place with a transformers trainer whose optimizer comes from and goes back to a state dict.

    Args:
        trainer_class, config_class: the trainer and its arguments.
        model, tokenizer: what is trained.
        rows: its training set.
        settings, optimizer_state: as in [`UpdatableRewardModel.fit`].
        options: further arguments of `config_class`; `reward_model_args` wins over them.

    Returns:
        The mean training loss and the optimizer's state.
    """
    args = settings.args
    ranks = args.world_size
    per_rank = args.reward_model_batch_size // ranks
    if per_rank * ranks != args.reward_model_batch_size:
        raise ValueError(
            f"reward_model_batch_size={args.reward_model_batch_size} is no multiple of the {ranks} processes."
        )
    micro = min(per_rank, args.reward_model_micro_batch_size or per_rank)
    if per_rank % micro:
        raise ValueError(
            f"reward_model_micro_batch_size={micro} does not divide a rank's {per_rank} samples of an optimizer step."
        )
    known = inspect.signature(config_class).parameters
    shared = {
        name: getattr(args, name) for name in ("use_cpu", "bf16", "fp16", "gradient_checkpointing") if name in known
    }
    config = config_class(
        **{
            **shared,
            "output_dir": str(settings.scratch),
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": per_rank // micro,
            "num_train_epochs": args.reward_model_epochs,
            # Ranks fill a short last batch with repeats, each count of them with others; without it all counts agree.
            "dataloader_drop_last": len(rows) >= args.reward_model_batch_size,
            "learning_rate": args.reward_model_learning_rate,
            "seed": settings.seed,
            "report_to": [],
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            **options,
            **(args.reward_model_args or {}),
        }
    )
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    steps = math.ceil(max(1, len(rows) // args.reward_model_batch_size) * config.num_train_epochs)
    was_training = model.training
    with _nested_trainer():
        trainer = trainer_class(
            model=model,
            args=config,
            train_dataset=rows,
            processing_class=tokenizer,
            optimizers=(optimizer, _schedule(optimizer, config, settings, steps)),
        )
        # It would print a line for each update.
        trainer.remove_callback(PrinterCallback)
        loss = torch.tensor(trainer.train().training_loss, device=trainer.accelerator.device)
        # Each rank has that of its own samples.
        loss = trainer.accelerator.gather(loss).mean().item()
    model.train(was_training)
    for parameter in model.parameters():
        parameter.grad = None
    state = optimizer.state_dict()
    # The rate belongs to the next update's schedule.
    for group in state["param_groups"]:
        group["lr"] = config.learning_rate
        group.pop("initial_lr", None)
    return loss, state


def _schedule(optimizer, config, settings: FitSettings, steps: int):
    """The update's learning-rate schedule: its own, or its part of one over all iterations."""
    scope = settings.args.learning_rate_scope
    first = (settings.iteration - 1) * steps if scope == "run" else 0
    total = settings.args.outer_iterations * steps if scope == "run" else steps
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate
        group.pop("initial_lr", None)
    schedule = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.get_warmup_steps(total),
        num_training_steps=total,
        scheduler_specific_kwargs=config.lr_scheduler_kwargs,
    )
    if first and not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        raise ValueError(
            f"lr_scheduler_type={config.lr_scheduler_type!r} cannot be cut into iterations; set "
            "learning_rate_scope='iteration'."
        )
    if not first:
        return schedule
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [_shifted(factor, first) for factor in schedule.lr_lambdas])


def _shifted(factor, first):
    return lambda step: factor(first + step)


@contextlib.contextmanager
def _nested_trainer() -> Iterator[None]:
    """Keeps accelerate's process-wide gradient state, which the outer trainer is using, from the inner trainer;
    and the inner one's progress bars from the screen."""
    state = GradientState()
    kept = dict(state.__dict__)
    shows_bars = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shows_bars:
            enable_progress_bars()
        state.__dict__.clear()
        state.__dict__.update(kept)
