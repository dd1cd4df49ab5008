"""`IterativeGRPOTrainer`: DeepSeekMath's Algorithm 1 as one resumable training run.

Where it departs from the paper: part of the prompts is held out from the reward model's training, so that its accuracy
on the moved policy can be told; and the reward model's update after the last iteration is made too, since it is the
reward model that a next run starts from.

The work between two iterations depends only on what is on disk and on the seed. It is done when the next iteration's
first step is due (or when training ends), so the checkpoint of an iteration's last step is complete as it is: a
resumed run does the same work anew or, if it was finished, reads its result.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset, Features, Value
from datasets import List as ListFeature
from rich.console import Console
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging
from trl.trainer.callbacks import SyncRefModelCallback

from trl_grpo_plus.iterative.checkpoint import (
    STAGING_NAME,
    last_whole_checkpoint,
    list_checkpoints,
    load_reference,
    prune_checkpoints,
    publish,
    read_manifest,
    reference_parameters,
    remove,
    save_reference,
    write_manifest,
)
from trl_grpo_plus.iterative.config import IterativeGRPOConfig
from trl_grpo_plus.iterative.graders import RolloutLabeler, rule_grader
from trl_grpo_plus.iterative.phases import (
    Grader,
    Ranks,
    SampleStore,
    is_finished,
    isolated_rng,
    label_phase,
    label_source,
    load_reward_model,
    reward_model_phase,
    reward_model_source,
    save_reward_model,
)
from trl_grpo_plus.iterative.replay import ReplayBuffer, is_held_out, make_samples
from trl_grpo_plus.iterative.reward_model import UpdatableRewardModel, as_updatable
from trl_grpo_plus.iterative.workdir import WorkDirectory, read_state, record_metrics
from trl_grpo_plus.trainer import GRPOPlusTrainer

logger = logging.get_logger(__name__)
PHASES = ("all", "policy")


class IterativeGRPOTrainer(GRPOPlusTrainer):
    """GRPO in iterations: reference <- policy, M policy steps, and the reward model trained on the policy's own
    samples.

    Takes all arguments of [`GRPOPlusTrainer`] except that the reward model has an argument of its own. `train()` runs
    all iterations. `train(resume_from_checkpoint=True)` takes up the newest whole checkpoint and ends with the same
    policy, reward model and buffer as a run that was never interrupted (bit for bit on one CPU process).

    Args:
        model, reward_funcs, args, train_dataset, ...: as in TRL; `reward_funcs` are further rewards beside the
            model's.
        reward_model: the reward model that is retrained: a [`ProcessRewardModel`], an [`OutcomeRewardModel`], the path
            of one, or an [`UpdatableRewardModel`]. It is trained in place.
        grader: verdicts on completions, called as `grader(prompts=, completions=, **columns)`; returns a number or
            bool for each (right above one half) or None. None: `reward_fns.grade` against the column
            `args.answer_column`.
        step_labeler: labels of steps, called like a process reward; needed with a process reward model and
            `args.step_labels="rule"`, for example `reward_fns.step_arithmetic_reward`.
        replay_dataset: what the buffer holds at the start, such as the reward model's own training set: columns
            `prompt`, `completion`, and `correct` or `steps` and `step_labels`. Held-out prompts are left out.
        process_reward_funcs: further process rewards beside the model's.
        phase: `"all"`, or `"policy"`: `train()` ends with the iteration, and the phases between two iterations are
            left to other processes (`trl-grpo-plus iterate --phase`), so that the reward model's optimizer never
            shares their memory.

    Raises:
        TypeError: `args` is no [`IterativeGRPOConfig`], or `reward_model` cannot be trained further.
        ValueError: a field cannot work in this configuration; from `train()`, when `output_dir` holds another run.
        CorruptCheckpointError: from `train()`, when the checkpoint that was named is damaged.

    Example:

    ```python
    trainer = IterativeGRPOTrainer(
        model="deepseek-ai/deepseek-math-7b-instruct",
        reward_model="my/process-reward-model",
        step_labeler=reward_fns.step_arithmetic_reward,
        args=IterativeGRPOConfig.deepseekmath("out", outer_iterations=2, steps_per_iteration=500),
        train_dataset=gsm8k_and_math,
    )
    trainer.train()
    ```
    """

    _name = "Iterative-GRPO"

    def __init__(
        self,
        model,
        reward_model: UpdatableRewardModel | Any = None,
        args: IterativeGRPOConfig | None = None,
        train_dataset=None,
        *,
        reward_funcs=None,
        process_reward_funcs=None,
        grader: Grader | None = None,
        step_labeler: Callable | None = None,
        replay_dataset: Dataset | None = None,
        phase: str = "all",
        **kwargs,
    ):
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(map(repr, PHASES))}, got {phase!r}.")
        if not isinstance(args, IterativeGRPOConfig):
            raise TypeError(f"args must be an IterativeGRPOConfig, got {type(args).__name__}.")
        if reward_model is None:
            raise TypeError(
                "reward_model is missing: iterative GRPO retrains one. For rule rewards use GRPOPlusTrainer."
            )
        self.iterative_reward_model = as_updatable(reward_model)
        self.grader = grader or _default_grader(args, train_dataset, self.iterative_reward_model)
        self.step_labeler = step_labeler
        self.replay_dataset = replay_dataset
        self.phase = phase
        self.iteration = 0
        self._save_directory: Path | None = None
        self._train_sampler = None
        self._scores = _Recorder(self.iterative_reward_model)
        is_process = self.iterative_reward_model.granularity == "process"
        if is_process and args.step_labels == "rule" and step_labeler is None:
            raise ValueError(
                "step_labeler is missing: a process reward model needs step labels. Pass a process reward such as "
                "reward_fns.step_arithmetic_reward, or set step_labels='rollouts'."
            )
        super().__init__(
            model,
            _as_list(reward_funcs) + ([] if is_process else [self._scores]),
            args,
            train_dataset,
            process_reward_funcs=_as_list(process_reward_funcs) + ([self._scores] if is_process else []),
            **kwargs,
        )
        self._check_backend()
        self._add_reference_adapter()
        self.iterative_reward_model.to(self.accelerator.device)
        if is_process and args.step_labels == "rollouts":
            self.step_labeler = RolloutLabeler(self._policy, self._tokenizer, args, self.grader)
        self.work = WorkDirectory(args.output_dir)
        self.ranks = Ranks.of(self.accelerator)
        self.add_callback(_IterationCallback(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs) -> TrainOutput:
        """Runs all iterations, or with `phase="policy"` what is left of one.

        Args:
            resume_from_checkpoint: True for the newest whole checkpoint in `output_dir` (damaged ones are refused by
                name in a warning), or the path of one.

        Raises:
            CorruptCheckpointError: the checkpoint that was named is damaged.
            ValueError: there is no checkpoint to resume from; or a run that is there would be mixed with a new one.
        """
        checkpoint = self._choose_checkpoint(resume_from_checkpoint)
        if checkpoint is None:
            self._start_anew()
        elif self._step_of(checkpoint) >= self.args.max_steps:
            return self._resume_after_the_last_step(checkpoint)
        return super().train(checkpoint, *args, **kwargs)

    def reset_reference(self) -> None:
        """Makes the reference a copy of the policy, in place, through TRL's gather path (ZeRO-3) where that is
        needed.
        """
        pairs = reference_parameters(self)
        if pairs is None:
            raise RuntimeError(
                "This trainer has no reference to reset: beta is 0, or the PEFT adapter 'ref' is missing."
            )
        policy, reference = (torch.nn.ParameterList(parameters) for parameters in pairs)
        SyncRefModelCallback.sync_target_model(policy, reference, 1.0)

    # The loop, called by the callback.

    def begin_iteration_if_due(self) -> None:
        """Finishes the last iteration and starts the next, if the policy's next step is the first of one."""
        due = self.state.global_step // self.args.steps_per_iteration + 1
        if self.iteration == due:
            return
        generate_every = self.args.steps_per_generation * self.num_iterations
        if self._step % generate_every:
            raise RuntimeError(
                f"Iteration {due} would begin in a generation batch (micro-batch {self._step} of {generate_every})."
            )
        if due > 1:
            metrics = self.finish_iteration(due - 1)
            for name, value in metrics.items():
                if value is not None:
                    self._metrics["train"][name].append(value)
            if self.args.reset_policy_optimizer:
                getattr(self.optimizer, "optimizer", self.optimizer).state.clear()
        if self.args.resets_reference:
            self.reset_reference()
        # What is buffered was scored by the old reference.
        self._buffered_inputs = None
        self.iteration = due
        if self.ranks.is_main:
            self.work.forget_before(due)
        self.ranks.barrier()

    def finish_iteration(self, iteration: int) -> dict[str, float | None]:
        """Labels the iteration's samples and trains the reward model on them, unless both are done already."""
        if self.phase == "policy":
            self._check_phases(iteration)
        metrics = self.run_label_phase(iteration) | self.run_reward_model_phase(iteration)
        if self.ranks.is_main:
            _report(record_metrics(self.work, iteration, self.args.steps_per_iteration))
        return metrics

    def _check_phases(self, iteration: int) -> None:
        """The phases between two iterations are other processes' work; here they must be done."""
        labelled, updated = self.work.labelled(iteration), self.work.reward_model(iteration)
        last = iteration - 1
        if not is_finished(labelled, label_source(self.work.samples, self.work.replay(last))):
            missing, directory = "label", labelled
        elif not is_finished(updated, reward_model_source(labelled, self.work.reward_model(last), self.args)):
            missing, directory = "reward-model", updated
        else:
            return
        raise ValueError(
            f"The phase {missing!r} of iteration {iteration} has not been run on this iteration's samples: there is "
            f"no whole {directory} made from them. Run `trl-grpo-plus iterate ... --phase {missing}`."
        )

    def run_label_phase(self, iteration: int) -> dict[str, float | None]:
        """See [`label_phase`]."""
        was_training = self.model.training
        try:
            return label_phase(
                self.work.samples,
                self.work.replay(iteration - 1),
                self.work.labelled(iteration),
                self.args,
                iteration,
                self.iterative_reward_model.granularity,
                self.grader,
                self.step_labeler,
                self.ranks,
            )
        finally:
            self.model.train(was_training)

    def run_reward_model_phase(self, iteration: int) -> dict[str, float | None]:
        """See [`reward_model_phase`]."""
        return reward_model_phase(
            self.iterative_reward_model,
            self.work.labelled(iteration),
            self.work.reward_model(iteration - 1),
            self.work.initial_reward_model,
            self.work.reward_model(iteration),
            self.args,
            iteration,
            self.ranks,
        )

    # TRL's hooks.

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training:
            self._store_samples(inputs, prompts, completions, completion_ids_list)
        return rewards

    def _get_train_sampler(self, dataset=None):
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.args.learning_rate_scope == "run" or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        length = self.args.steps_per_iteration
        schedule = super().create_scheduler(length, optimizer)
        if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
            raise ValueError(
                f"lr_scheduler_type={self.args.lr_scheduler_type!r} cannot be started anew in each iteration; set "
                "learning_rate_scope='run'."
            )
        schedule.lr_lambdas = [_repeated(factor, length) for factor in schedule.lr_lambdas]
        return schedule

    def _get_output_dir(self, trial):
        return str(self._save_directory) if self._save_directory is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model, trial):
        final_dir = Path(super()._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        if self._step % (self.args.steps_per_generation * self.num_iterations):
            logger.warning(
                f"{name} is written inside a generation batch: a run resumed from it samples that batch anew."
            )
        staging = final_dir / STAGING_NAME
        if self.ranks.is_main:
            remove(staging)
        self.ranks.barrier()
        pushes, self.args.push_to_hub = self.args.push_to_hub, False
        self._save_directory = staging
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._save_directory = None
            self.args.push_to_hub = pushes
        save_reference(self, staging / name)
        self.ranks.barrier()
        if self.ranks.is_main:
            self.work.save(
                staging / name,
                self.iteration,
                {
                    "steps_per_iteration": self.args.steps_per_iteration,
                    "tokens": int(self._total_train_tokens),
                },
            )
            self._correct_best_checkpoint(staging / name, final_dir)
            write_manifest(staging / name, step=self.state.global_step, iteration=self.iteration)
            publish(staging / name, final_dir / name)
            remove(staging)
            prune_checkpoints(final_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
        self.ranks.barrier()
        if pushes:
            self._push_from_checkpoint(str(final_dir / name))

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_reference(self, checkpoint)
            self._load_parts(Path(checkpoint))

    # Samples.

    def _store_samples(self, inputs, prompts, completions, completion_ids_list) -> None:
        """Writes the generation batch of all ranks to the store of this iteration."""
        scores = self._scores.take(len(prompts))
        is_process = self.iterative_reward_model.granularity == "process"
        columns = [key for key in inputs[0] if key not in _NOT_STORED]
        rows = [
            {
                **{key: inputs[i][key] for key in columns},
                "prompt": prompts[i],
                "completion": completions[i],
                "completion_ids": list(completion_ids_list[i]),
                "truncated": bool(self._is_cut_off(completion_ids_list[i])),
                "scores": list(scores[i]) if is_process else [scores[i]],
                "steps": self._scores.steps[i] if is_process else [],
            }
            for i in range(len(prompts))
        ]
        rows = gather_object(rows) if self.ranks.count > 1 else rows
        if self.ranks.is_main:
            SampleStore(self.work.samples).write(rows, self.state.global_step, self._sample_features(rows))
        self._metrics["train"]["iteration"].append(self.iteration)

    def _sample_features(self, rows: list[dict]) -> Features:
        """One schema for all parts of an iteration, also where a part's values are all None."""
        known = getattr(self.train_dataset, "features", None) or {}
        inferred = Dataset.from_list(rows[:1]).features
        features = {name: known.get(name, feature) for name, feature in inferred.items()}
        features |= {name: inferred[name] for name in ("prompt", "completion")}
        return Features({**features, **_SAMPLE_FEATURES})

    # Checkpoints.

    def _choose_checkpoint(self, resume) -> Path | str | None:
        if not resume:
            return None
        if resume is not True:
            read_manifest(resume)
            return str(resume)
        found = [str(last_whole_checkpoint(self.args.output_dir) or "")] if self.ranks.is_main else [""]
        if self.ranks.count > 1:
            broadcast_object_list(found)
        if not found[0]:
            raise ValueError(
                f"resume_from_checkpoint=True, but {self.args.output_dir} has no whole checkpoint. Start without it."
            )
        return found[0]

    def _start_anew(self) -> None:
        existing = list_checkpoints(self.args.output_dir)
        if existing:
            raise ValueError(
                f"{self.args.output_dir} holds checkpoints of an earlier run ({existing[-1].name}). Go on with "
                "train(resume_from_checkpoint=True), or choose another output_dir."
            )
        if self.ranks.is_main:
            remove(self.work.root)
            buffer = ReplayBuffer(
                self.work.replay(0), self.args.replay_max_size, self.args.replay_strategy, self.args.seed
            )
            if self.replay_dataset is not None:
                known = self.replay_dataset.filter(
                    lambda row: not is_held_out(row["prompt"], self.args.heldout_fraction, self.args.seed)
                )
                buffer.add(make_samples({name: known[name][:] for name in known.column_names}, 0), 0)
            for directory in (self.work.reward_model(0), self.work.initial_reward_model):
                save_reward_model(self.iterative_reward_model, directory)
        self.ranks.barrier()
        self.iteration = 0

    def _load_parts(self, checkpoint: Path) -> None:
        state = read_state(checkpoint)
        if state["steps_per_iteration"] != self.args.steps_per_iteration:
            raise ValueError(
                f"steps_per_iteration={self.args.steps_per_iteration}, but {checkpoint} was written with "
                f"{state['steps_per_iteration']}; iterations would begin at other steps. Resume with the same value."
            )
        self.iteration = state["iteration"]
        self._total_train_tokens = state["tokens"]
        if self.ranks.is_main:
            self.work.restore(checkpoint)
        self.ranks.barrier()
        load_reward_model(self.iterative_reward_model, self.work.reward_model(self.iteration - 1))

    def _correct_best_checkpoint(self, staged: Path, final_dir: Path) -> None:
        """TRL noted the staging directory, if anything, as the place of the best checkpoint."""
        if self.state.best_global_step:
            best = final_dir / f"checkpoint-{self.state.best_global_step}"
            if best.is_dir() or best.name == staged.name:
                self.state.best_model_checkpoint = str(best)
                self.state.save_to_json(str(staged / "trainer_state.json"))

    def _step_of(self, checkpoint: str | Path) -> int:
        return TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json")).global_step

    def _resume_after_the_last_step(self, checkpoint) -> TrainOutput:
        """All policy steps are done; what may be missing is the last update of the reward model."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
        load_reference(self, checkpoint)
        self._load_parts(Path(checkpoint))
        self.finish_training()
        return TrainOutput(self.state.global_step, 0.0, {})

    def finish_training(self) -> None:
        """The last iteration's update of the reward model, which is then saved to `output_dir/reward_model`."""
        if self.phase == "policy" or self.state.global_step < self.args.max_steps:
            return
        metrics = self.finish_iteration(self.args.outer_iterations)
        self.log(
            {"iteration": self.iteration, **{name: value for name, value in metrics.items() if value is not None}}
        )
        if self.ranks.is_main:
            self.iterative_reward_model.save_pretrained(Path(self.args.output_dir) / "reward_model")
        self.ranks.barrier()

    # Construction.

    def _policy(self):
        return self.accelerator.unwrap_model(self.model)

    def _check_backend(self) -> None:
        sharded = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP" if self.is_fsdp_enabled else None
        if sharded and self.phase == "all":
            raise ValueError(
                f"phase='all' cannot train the reward model in a process whose accelerator is set up for {sharded}. "
                "Use `trl-grpo-plus iterate --separate_processes true`, or phase='policy'."
            )
        if self.args.reset_policy_optimizer and self.is_deepspeed_enabled:
            raise ValueError(
                "reset_policy_optimizer=True does not reach DeepSpeed's partitioned optimizer. Leave it out."
            )

    def _add_reference_adapter(self) -> None:
        """Gives a PEFT policy the adapter that TRL reads as reference; TRL gives it only to adapters that come
        trained.
        """
        policy = self._policy()
        if not self.args.resets_reference or not hasattr(policy, "peft_config"):
            return
        if "ref" not in policy.peft_config:
            with isolated_rng(self.args.seed):
                policy.add_adapter("ref", policy.peft_config["default"])
        for name, parameter in policy.named_parameters():
            if ".ref." in name:
                parameter.requires_grad_(False)
        self.reset_reference()


class _IterationCallback(TrainerCallback):
    """Hangs the outer loop into the training loop."""

    def __init__(self, trainer: IterativeGRPOTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        # The sampler shuffles with a generator of its own, which a resumed run would start again from the first epoch.
        sampler = self.trainer._train_sampler
        if state.global_step and sampler is not None and getattr(sampler, "shuffle", False):
            steps_per_epoch = max(1, -(-len(train_dataloader) // args.gradient_accumulation_steps))
            for _ in range(state.global_step // steps_per_epoch):
                torch.randperm(sampler.num_samples, generator=sampler.generator)

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.begin_iteration_if_due()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.steps_per_iteration == 0:
            control.should_save = control.should_save or args.save_strategy != "no"
            if self.trainer.phase == "policy":
                control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        self.trainer.finish_training()


class _Recorder:
    """The reward model as TRL calls it, keeping what it said of the last batch."""

    def __init__(self, reward_model: UpdatableRewardModel):
        self.reward_model = reward_model
        self.__name__ = reward_model.__name__
        self.last: list | None = None
        self.steps: list[list[str]] = []

    def __call__(self, prompts, completions, **columns):
        self.last = list(self.reward_model(prompts=prompts, completions=completions, **columns))
        self.steps = [list(texts) for texts in columns.get("steps", [])]
        return self.last

    def take(self, count: int) -> list:
        last, self.last = self.last, None
        if last is None or len(last) != count:
            raise RuntimeError("The reward model was not asked for these completions; see trl_grpo_plus._compat.")
        return last


_NOT_STORED = (
    "prompt",
    "completion",
    "image",
    "images",
    "completion_ids",
    "truncated",
    "scores",
    "steps",
    "environment",
)
_SAMPLE_FEATURES = {
    "completion_ids": ListFeature(Value("int32")),
    "truncated": Value("bool"),
    "scores": ListFeature(Value("float64")),
    "steps": ListFeature(Value("string")),
}


def _default_grader(args: IterativeGRPOConfig, train_dataset, reward_model: UpdatableRewardModel) -> Grader | None:
    columns = getattr(train_dataset, "column_names", None)
    if isinstance(columns, list) and args.answer_column not in columns:
        if reward_model.granularity == "process" and args.step_labels == "rule":
            return None
        raise ValueError(
            f"answer_column={args.answer_column!r} is not in train_dataset ({', '.join(columns)}), so the reward "
            "model's labels cannot be made. Name the column of the gold answers, or pass a grader."
        )
    return rule_grader(args.answer_column)


def _as_list(funcs) -> list:
    if funcs is None:
        return []
    return list(funcs) if isinstance(funcs, (list, tuple)) else [funcs]


def _repeated(factor, length):
    return lambda step: factor(step % length)


def _report(metrics: dict[str, Any]) -> None:
    def show(name):
        return "-" if metrics.get(name) is None else f"{metrics[name]:.3f}"

    Console(stderr=True).print(
        f"iteration {metrics['iteration']}: grader {show('grader/accuracy')}, reward model agrees "
        f"{show('reward_model/agreement')}, held-out accuracy {show('reward_model/accuracy_before')} -> "
        f"{show('reward_model/accuracy_after')}, {metrics['samples/new']} new + {metrics['samples/history']} old",
        highlight=False,
        soft_wrap=True,
    )
