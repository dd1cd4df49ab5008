"""`trl-grpo-plus train CONFIG.yaml`: a GRPOPlusTrainer run from a file; the command line overrides any field."""

import importlib
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from trl_grpo_plus.config_file import model_init_kwargs, parse_config_file, run_from_file

PROG = "trl-grpo-plus train"
USAGE = """usage: trl-grpo-plus train CONFIG.yaml [--FIELD VALUE ...]

Trains with GRPOPlusTrainer. CONFIG.yaml holds any field of TrainArguments (data, prompt, rewards), GRPOPlusConfig
(TRL's GRPOConfig and ours) and TRL's ModelConfig (model_name_or_path, PEFT, quantization); --FIELD VALUE overrides it.
On several devices: accelerate launch -m trl_grpo_plus.cli train CONFIG.yaml

`trl-grpo-plus train --help-all` lists every field. Example: examples/configs/gsm8k_process.yaml"""


@dataclass
class TrainArguments:
    """Data, prompt and rewards of a `train` run.

    Args:
        dataset: hub id, a .jsonl, .json, .csv or .parquet file, or a `save_to_disk` directory.
        dataset_config, dataset_split: configuration and split of a hub data set.
        eval_dataset, eval_split: data for `eval_strategy`, likewise; by default `eval_split` of `dataset`.
        max_train_samples, max_eval_samples: take only the first so many rows.
        prompt: how a question becomes a prompt, as in `eval`: "auto", a template's name, or a template file. Not used
            where the data has a column `prompt` already.
        question_column: the question's column where it is none of the usual (`question`, `problem`).
        reward_funcs: dotted paths (`reward_fns.gsm8k_reward`), names of `reward_fns`, or outcome reward models' paths.
        process_reward_funcs: dotted paths, names of `reward_fns`, or paths of process reward models.
    """

    dataset: str = field(default="", metadata={"help": "Hub id, local file, or save_to_disk directory."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Data set to evaluate on; default: --dataset."})
    eval_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Take only the first so many rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Take only the first so many rows."})
    prompt: str = field(default="auto", metadata={"help": "Prompt template: auto, a name, or a file."})
    question_column: str | None = field(default=None, metadata={"help": "Column of the question."})
    reward_funcs: list[str] | None = field(default=None, metadata={"help": "Dotted paths, or reward model paths."})
    process_reward_funcs: list[str] | None = field(default=None, metadata={"help": "Dotted paths, or PRM paths."})


class TrainError(ValueError):
    """The run cannot start as configured."""


def main(argv: list[str]) -> int:
    """Runs `train`; returns the exit code."""

    def prepare(argv: list[str]):
        return partial(train, *build_trainer(*parse(argv)))

    return run_from_file(argv, PROG, USAGE, prepare)


def parse(argv: list[str]):
    """(TrainArguments, GRPOPlusConfig, ModelConfig) of a command line with `--config FILE`."""
    from trl import ModelConfig

    from trl_grpo_plus.config import GRPOPlusConfig

    return parse_config_file(argv, (TrainArguments, GRPOPlusConfig, ModelConfig), PROG, USAGE)


def build_trainer(arguments: TrainArguments, config, model_config):
    """The trainer of a parsed configuration.

    Raises:
        TrainError, ValueError, OSError: something that the configuration names is missing or unusable.
    """
    from transformers import AutoTokenizer
    from trl import get_peft_config, get_quantization_config

    from trl_grpo_plus.trainer import GRPOPlusTrainer

    if not model_config.model_name_or_path:
        raise TrainError("model_name_or_path is not set; give a model's path or hub id.")
    if not arguments.dataset:
        raise TrainError("dataset is not set; give a hub id or a file.")
    if not arguments.reward_funcs and not arguments.process_reward_funcs:
        raise TrainError("no reward: set reward_funcs, process_reward_funcs or both, e.g. [reward_fns.gsm8k_reward].")
    reward_funcs = [resolve_function(name, "reward_funcs") for name in arguments.reward_funcs or []]
    process_funcs = [resolve_function(name, "process_reward_funcs") for name in arguments.process_reward_funcs or []]
    tokenizer = AutoTokenizer.from_pretrained(
        model_config.model_name_or_path, revision=model_config.model_revision, padding_side="left"
    )
    train_dataset, eval_dataset = load_datasets(arguments, tokenizer, with_eval=config.eval_strategy != "no")
    config.model_init_kwargs = model_init_kwargs(config, model_config)
    trainer = GRPOPlusTrainer(
        model_config.model_name_or_path,
        reward_funcs=reward_funcs or None,
        process_reward_funcs=process_funcs or None,
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_config),
        peft_config=get_peft_config(model_config),
    )
    return trainer, arguments


def train(trainer, arguments: TrainArguments) -> None:
    """Trains, saves, and prints what changed and what to do next."""
    output_dir = trainer.args.output_dir
    trainer.train(resume_from_checkpoint=_resume_value(trainer.args.resume_from_checkpoint))
    trainer.save_model(output_dir)
    trainer.save_state()
    if trainer.accelerator.is_main_process:
        _print_summary(trainer.state.log_history, output_dir, arguments.dataset)


def resolve_function(name: str, field_name: str):
    """A function by dotted path or by its name in `reward_fns`; a directory or a string with `/` is a model's path.

    Raises:
        TrainError: it cannot be imported; the message names the field.
    """
    if "/" in name or os.path.isdir(name):
        return name
    module_name, _, attribute = name.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name or "reward_fns"), attribute)
    except (ImportError, AttributeError) as error:
        raise TrainError(
            f"{field_name}: cannot import {name!r} ({error}). Give a dotted path such as reward_fns.gsm8k_reward, "
            "or a model's directory."
        ) from error


def load_datasets(arguments: TrainArguments, tokenizer, with_eval: bool):
    """(train, eval or None) data sets with a `prompt` column."""
    train_dataset = _with_prompts(
        _load(arguments.dataset, arguments.dataset_config, arguments.dataset_split, arguments.max_train_samples),
        arguments,
        tokenizer,
    )
    if not with_eval:
        return train_dataset, None
    source = arguments.eval_dataset or arguments.dataset
    if source == arguments.dataset and Path(source).is_file():
        raise TrainError("eval_strategy is set, but dataset is a file without splits; set eval_dataset.")
    rows = _load(source, arguments.dataset_config, arguments.eval_split, arguments.max_eval_samples)
    return train_dataset, _with_prompts(rows, arguments, tokenizer)


def _load(source: str, config: str | None, split: str, limit: int | None):
    from datasets import Dataset, load_dataset

    from trl_grpo_plus.evaluation.datasets import read_rows

    if Path(source).exists():
        dataset = Dataset.from_list(read_rows(Path(source), split))
    elif Path(source).suffix in (".jsonl", ".json", ".csv", ".parquet"):
        raise TrainError(f"dataset: the file {source} does not exist.")
    else:
        try:
            dataset = load_dataset(source, config, split=split)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TrainError(
                f"dataset: cannot load {source!r} (config {config!r}, split {split!r}): {reason}"
            ) from error
    if limit is not None:
        if limit < 1:
            raise TrainError(f"max_train_samples and max_eval_samples must be at least 1, got {limit}.")
        dataset = dataset.select(range(min(limit, len(dataset))))
    return dataset


def _with_prompts(dataset, arguments: TrainArguments, tokenizer):
    from trl_grpo_plus.evaluation.datasets import GOLD_COLUMNS, QUESTION_COLUMNS
    from trl_grpo_plus.evaluation.prompts import load_template

    columns = dataset.column_names
    if "prompt" in columns:
        return dataset
    question = arguments.question_column or next((c for c in QUESTION_COLUMNS if c in columns), None)
    if question not in columns:
        raise TrainError(
            f"dataset: no column {question!r} among {', '.join(columns)}; set question_column."
            if question
            else f"dataset: none of the columns {', '.join(columns)} is a question; set question_column."
        )
    gold = next((c for c in GOLD_COLUMNS if c in columns), None)
    is_gsm8k = gold is not None and all("####" in str(row) for row in dataset[: min(20, len(dataset))][gold])
    template = load_template(
        arguments.prompt, kind="gsm8k" if is_gsm8k else "math", has_chat_template=tokenizer.chat_template is not None
    )

    def render(row):
        prompt = template.render(row[question])
        return {"prompt": list(prompt.messages) if prompt.messages is not None else prompt.text}

    return dataset.map(render, desc="Rendering prompts")


def _resume_value(value):
    """TRL's field is a string: `true` means the last checkpoint of `output_dir`."""
    return {"true": True, "false": None, "": None}.get(str(value).lower(), value) if value is not None else None


def _print_summary(log_history: list[dict], output_dir: str, dataset: str) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = [log for log in log_history if "reward" in log]
    table = Table(title=f"{len(rows)} logged steps")
    window = max(1, len(rows) // 5)
    for column in ("", f"first {window}", f"last {window}"):
        table.add_column(column, justify="left" if not column else "right")
    wanted = (
        "reward",
        "kl",
        "entropy",
        "completions/mean_length",
        "completions/clipped_ratio",
        "process/steps_per_completion",
    )
    names = [name for name in (rows[0] if rows else {}) if name in wanted or name.endswith(("/mean", "/step_mean"))]
    for name in names:
        first, last = (_mean([log.get(name) for log in part]) for part in (rows[:window], rows[-window:]))
        table.add_row(name, first, last)
    console = Console()
    console.print(table)
    console.print(f"Model and logs: {output_dir}")
    console.print(f"Curves:   trl-grpo-plus report {output_dir}", highlight=False)
    console.print(f"Accuracy: trl-grpo-plus eval --model {output_dir} --dataset gsm8k", highlight=False)


def _mean(values) -> str:
    numbers = [value for value in values if isinstance(value, (int, float))]
    return f"{sum(numbers) / len(numbers):.3f}" if numbers else "-"
