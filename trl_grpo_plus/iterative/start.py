"""The first reward model of a run that has none: a new head on the policy, trained on samples of the policy."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from trl_grpo_plus.algorithms.steps import split_steps, step_texts
from trl_grpo_plus.iterative.checkpoint import publish, remove, write_manifest
from trl_grpo_plus.iterative.config import IterativeGRPOConfig
from trl_grpo_plus.iterative.graders import RolloutLabeler, rule_grader
from trl_grpo_plus.iterative.phases import isolated_rng, label_steps
from trl_grpo_plus.iterative.replay import is_held_out, make_samples, write_parquet
from trl_grpo_plus.iterative.reward_model import FitSettings, as_updatable

SAMPLES_NAME = "samples.parquet"


def make_reward_model(
    directory: str | Path,
    granularity: str,
    policy: str,
    dataset: Dataset,
    args: IterativeGRPOConfig,
    num_samples: int,
    grader=None,
    step_labeler=None,
    initial_args: dict[str, Any] | None = None,
) -> None:
    """Makes a reward model from a policy and writes it to a directory, whole or not at all. Call it on all ranks.

    Args:
        directory: where to write; it can be loaded with `from_pretrained` of the reward model's class.
        granularity: `"outcome"` or `"process"`.
        policy: path of the policy.
        dataset: problems, with `prompt` and the gold answers.
        args: gives the sampling (`temperature`, `max_completion_length`) and the reward model's training.
        num_samples: completions to train on, `args.num_generations` for each prompt, held-out prompts left out.
        grader, step_labeler: as of [`IterativeGRPOTrainer`].
        initial_args: fields of `args` that are other in this first training, such as `reward_model_epochs`.
    """
    from trl_grpo_plus.reward_models import OutcomeRewardModel, ProcessRewardModel, sample_completions

    tokenizer = AutoTokenizer.from_pretrained(policy)
    grader = grader or rule_grader(args.answer_column)
    with isolated_rng(args.seed):
        model = AutoModelForCausalLM.from_pretrained(policy).to(args.device).eval()
        problems = dataset.filter(lambda row: not is_held_out(row["prompt"], args.heldout_fraction, args.seed))
        problems = problems.shuffle(seed=args.seed).select(
            range(min(len(dataset), -(-num_samples // args.num_generations)))
        )
        samples = sample_completions(
            problems,
            model,
            tokenizer,
            num_samples=args.num_generations,
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
            seed=args.seed,
            progress=not args.disable_tqdm,
        )
        rows = [
            {**row, "truncated": row["completion_ids"][-1:] != [tokenizer.eos_token_id], "scores": []}
            for row in samples
        ]
        columns = {name: [row[name] for row in rows] for name in problems.column_names if name != "prompt"}
        verdicts = grader(
            prompts=[row["prompt"] for row in rows], completions=[row["completion"] for row in rows], **columns
        )
        for row, verdict in zip(rows, verdicts, strict=True):
            row["correct"] = None if verdict is None else float(verdict)
            ids = row["completion_ids"]
            row["steps"] = step_texts(ids, split_steps(ids, tokenizer, args.step_delimiter), tokenizer)
        if granularity == "process":
            if args.step_labels == "rollouts":
                step_labeler = RolloutLabeler(lambda: model, tokenizer, args, grader)
            for row, labels in zip(rows, label_steps(step_labeler, rows, args), strict=True):
                row["step_labels"] = labels
        head = AutoModelForSequenceClassification if granularity == "outcome" else AutoModelForTokenClassification
        base = head.from_pretrained(policy, num_labels=1 if granularity == "outcome" else 2, dtype=torch.float32)
        kind = OutcomeRewardModel if granularity == "outcome" else ProcessRewardModel
        reward_model = kind(base.to(args.device), tokenizer)
        data = make_samples({name: [row.get(name) for row in rows] for name in _NAMES}, 0)
        directory = Path(directory)
        staged = directory.with_name(f".staging-{directory.name}")
        ranks = PartialState()
        if ranks.is_main_process:
            remove(staged)
            staged.mkdir(parents=True)
        ranks.wait_for_everyone()
        settings = FitSettings(_with(args, initial_args or {}), 1, args.seed, staged / "scratch")
        as_updatable(reward_model).fit(data, settings, None)
    ranks.wait_for_everyone()
    if ranks.is_main_process:
        remove(staged / "scratch")
        reward_model.save_pretrained(staged)
        write_parquet(data, staged / SAMPLES_NAME)
        write_manifest(staged)
        publish(staged, directory)
    ranks.wait_for_everyone()


def read_initial_samples(directory: str | Path) -> Dataset:
    """The samples that [`make_reward_model`] trained on."""
    return Dataset(pq.read_table(Path(directory) / SAMPLES_NAME))


def _with(args: IterativeGRPOConfig, changes: dict[str, Any]) -> IterativeGRPOConfig:
    """A shallow copy with other values; the checks of `__post_init__` have been made."""
    copy = object.__new__(type(args))
    copy.__dict__.update(vars(args))
    copy.__dict__.update({"learning_rate_scope": "iteration", **changes})
    return copy


_NAMES = ("prompt", "completion", "steps", "step_labels", "scores", "correct")
