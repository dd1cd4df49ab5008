"""`trl-grpo-plus train-prm CONFIG.yaml`: train a process reward model from a file."""

from dataclasses import dataclass, field
from functools import partial

from trl_grpo_plus.config_file import model_init_kwargs, parse_config_file, run_from_file
from trl_grpo_plus.reward_models._cli import UsageError, load_rows

PROG = "trl-grpo-plus train-prm"
USAGE = """usage: trl-grpo-plus train-prm CONFIG.yaml [--FIELD VALUE ...]

Trains a process reward model with PRMTrainer on stepwise data (`prompt`, `completions`, `labels`). CONFIG.yaml holds
any field of PRMTrainArguments (data), PRMConfig (transformers' TrainingArguments and ours) and TRL's ModelConfig
(model_name_or_path, PEFT); --FIELD VALUE overrides it.
On several devices: accelerate launch -m trl_grpo_plus.cli train-prm CONFIG.yaml

`trl-grpo-plus train-prm --help-all` lists every field. Example: examples/configs/train_prm.yaml"""


@dataclass
class PRMTrainArguments:
    """Data of a `train-prm` run.

    Args:
        dataset: file (.parquet as `label` writes it, .jsonl, ...), save_to_disk directory, or hub id.
        dataset_config, dataset_split: configuration and split of a hub data set.
        eval_dataset, eval_split: data to measure on, likewise.
        eval_fraction: without `eval_dataset`, the share of the prompts that is held out, all completions of a prompt
            on the same side. 0: none.
        max_train_samples, max_eval_samples: only the first so many rows.
    """

    dataset: str = field(default="", metadata={"help": "File, save_to_disk directory or hub id."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Data to measure on."})
    eval_split: str = field(default="test", metadata={"help": "Split to measure on."})
    eval_fraction: float = field(default=0.0, metadata={"help": "Without eval_dataset: share of prompts held out."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Only the first so many rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Only the first so many rows."})


def main(argv: list[str]) -> int:
    """Runs the command; returns 0, or 2 for a user's mistake (one line on stderr)."""

    def prepare(argv: list[str]):
        return partial(_train, build_trainer(*_parse(argv)))

    return run_from_file(argv, PROG, USAGE, prepare)


def _parse(argv: list[str]):
    from trl import ModelConfig

    from trl_grpo_plus.reward_models.prm_config import PRMConfig

    return parse_config_file(argv, (PRMTrainArguments, PRMConfig, ModelConfig), PROG, USAGE)


def build_trainer(arguments: PRMTrainArguments, config, model_config):
    """The trainer of a parsed configuration.

    Raises:
        UsageError, ValueError, OSError: something that the configuration names is missing or unusable.
    """
    from trl import get_peft_config

    from trl_grpo_plus.reward_models.prm_trainer import PRMTrainer

    if not model_config.model_name_or_path:
        raise UsageError("model_name_or_path is not set; give a model's directory or hub id")
    if not arguments.dataset:
        raise UsageError("dataset is not set; give a file or a hub id")
    if not 0 <= arguments.eval_fraction < 1:
        raise UsageError(f"eval_fraction must be at least 0 and below 1, got {arguments.eval_fraction}")
    train = load_rows(arguments.dataset, arguments.dataset_split, arguments.dataset_config)
    held_out = None
    if arguments.eval_dataset:
        held_out = load_rows(arguments.eval_dataset, arguments.eval_split, arguments.dataset_config)
    elif arguments.eval_fraction:
        train, held_out = split_by_prompt(train, arguments.eval_fraction, config.seed)
    if arguments.max_train_samples is not None:
        train = train.select(range(min(arguments.max_train_samples, len(train))))
    if arguments.max_eval_samples is not None and held_out is not None:
        held_out = held_out.select(range(min(arguments.max_eval_samples, len(held_out))))
    config.model_init_kwargs = model_init_kwargs(config, model_config, "float32")
    return PRMTrainer(
        model_config.model_name_or_path,
        args=config,
        train_dataset=train,
        eval_dataset=held_out,
        peft_config=get_peft_config(model_config),
    )


def split_by_prompt(dataset, fraction: float, seed: int):
    """(train, held out): all completions of a prompt on the same side, chosen by a hash of the prompt."""
    import json
    import zlib

    def held(prompt) -> bool:
        return zlib.crc32(f"{seed} {json.dumps(prompt)}".encode()) < fraction * 2**32

    sides: dict[bool, list[int]] = {True: [], False: []}
    for i, prompt in enumerate(dataset["prompt"]):
        sides[held(prompt)].append(i)
    if not sides[True] or not sides[False]:
        raise UsageError(f"eval_fraction={fraction} leaves one side empty: the data set has too few different prompts")
    return dataset.select(sides[False]), dataset.select(sides[True])


def _train(trainer) -> None:
    from rich.console import Console
    from rich.table import Table

    args = trainer.args
    trainer.train(resume_from_checkpoint=_resume(args.resume_from_checkpoint))
    trainer.save_model(args.output_dir)
    trainer.save_state()
    metrics = trainer.evaluate() if trainer.eval_dataset is not None else {}
    if not trainer.accelerator.is_main_process:
        return
    console = Console()
    if metrics:
        table = Table(title="Held out", title_justify="left", show_header=False)
        for name, value in metrics.items():
            if not name.endswith(("runtime", "per_second", "epoch")):
                table.add_row(name.removeprefix("eval_"), f"{value:.4f}")
        console.print(table)
    console.print(f"Model: {args.output_dir}", soft_wrap=True, markup=False)
    console.print(
        f"Look at it: trl-grpo-plus score {args.output_dir} --prompt QUESTION --completion SOLUTION", soft_wrap=True
    )
    console.print(
        f"Next: train a policy with it, process_reward_funcs: [{args.output_dir}]", soft_wrap=True, markup=False
    )


def _resume(value):
    """The field is a string: `true` means the last checkpoint of `output_dir`."""
    return {"true": True, "false": None, "": None}.get(str(value).lower(), value) if value is not None else None
