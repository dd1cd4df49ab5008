"""`trl-grpo-plus iterate CONFIG.yaml`: an iterative GRPO run from a file, in one process or in one for each phase."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trl_grpo_plus.config_file import model_init_kwargs, parse_config_file, run_from_file
from trl_grpo_plus.train_command import TrainArguments, TrainError, load_datasets, resolve_function

PROG = "trl-grpo-plus iterate"
PHASES = ("all", "policy", "label", "reward-model")
NEW_MODELS = {"new-outcome": "outcome", "new-process": "process"}

USAGE = """usage: trl-grpo-plus iterate CONFIG.yaml [--FIELD VALUE ...]

Iterative GRPO (DeepSeekMath, Algorithm 1). CONFIG.yaml holds any field of IterateArguments (data, prompt, reward
model), IterativeGRPOConfig and TRL's ModelConfig; --FIELD VALUE overrides it. A run that is there is taken up again.

  --separate_processes true   a process for each phase: policy steps, labelling, reward-model training
  --phase PHASE               run one phase alone: policy, label or reward-model
  --launcher "accelerate launch --num_processes 8"   how those processes are started

`trl-grpo-plus iterate --help-all` lists every field. Example: examples/configs/iterative_demo.yaml"""


@dataclass
class IterateArguments(TrainArguments):
    """What an `iterate` run is made of, beside what a `train` run is.

    Args:
        reward_model: directory or hub id of the reward model that is retrained; or `new-outcome` or `new-process`: a
            new head on the policy's weights, trained on `initial_samples` of the policy before the run begins.
        initial_samples: completions for the first training of a new reward model; they are the first history.
        grader: dotted path of a grader; by default `reward_fns.grade` against `answer_column`.
        step_labeler: dotted path of a process reward that labels steps, such as `reward_fns.step_arithmetic_reward`.
        replay_dataset: file with the reward model's earlier training samples, the first history.
        phase: `all`, or one phase.
        separate_processes: a process for each phase.
        launcher: command in front of `-m trl_grpo_plus.cli` for those processes; by default this Python.
    """

    reward_model: str = field(default="", metadata={"help": "Path of the reward model; new-outcome or new-process."})
    initial_samples: int = field(default=512, metadata={"help": "Completions that a new reward model is trained on."})
    grader: str | None = field(default=None, metadata={"help": "Dotted path of a grader."})
    step_labeler: str | None = field(default=None, metadata={"help": "Dotted path of a process reward."})
    replay_dataset: str | None = field(default=None, metadata={"help": "File with earlier training samples."})
    phase: str = field(default="all", metadata={"help": "all, policy, label or reward-model.", "choices": [*PHASES]})
    separate_processes: bool = field(default=False, metadata={"help": "A process for each phase."})
    launcher: str | None = field(default=None, metadata={"help": "Command that starts a phase's process."})


def main(argv: list[str]) -> int:
    """Runs `iterate`; returns the exit code."""

    def prepare_any(argv: list[str]) -> Callable[[], int | None]:
        arguments, config, model_config = parse(argv)
        if arguments.separate_processes and arguments.phase == "all":
            # Each process shows its own errors; what is wrong between them is the user's to mend.
            code = run_in_processes(argv, arguments, config)
            return lambda: code
        return prepare(arguments, config, model_config)

    return run_from_file(argv, PROG, USAGE, prepare_any)


def parse(argv: list[str]):
    """(IterateArguments, IterativeGRPOConfig, ModelConfig) of a command line with `--config FILE`."""
    from trl import ModelConfig

    from trl_grpo_plus.iterative.config import IterativeGRPOConfig

    types = (IterateArguments, IterativeGRPOConfig, ModelConfig)
    arguments, config, model_config = parse_config_file(argv, types, PROG, USAGE)
    if arguments.phase not in PHASES:
        raise TrainError(f"phase must be one of {', '.join(PHASES)}, got {arguments.phase!r}.")
    for name, value in (("model_name_or_path", model_config.model_name_or_path), ("dataset", arguments.dataset)):
        if not value:
            raise TrainError(f"{name} is not set.")
    if not arguments.reward_model:
        raise TrainError("reward_model is not set; give a path, new-outcome or new-process.")
    return arguments, config, model_config


def next_phase(output_dir: str | Path, config) -> tuple[str, int]:
    """What a run has to do next, as its files tell: a phase (or `"done"`) and the iteration that it belongs to."""
    from transformers import TrainerState

    from trl_grpo_plus.iterative.checkpoint import last_whole_checkpoint
    from trl_grpo_plus.iterative.phases import is_finished, label_source, reward_model_source
    from trl_grpo_plus.iterative.workdir import WORK_NAME, WorkDirectory, read_state

    checkpoint = last_whole_checkpoint(output_dir)
    if checkpoint is None:
        return "policy", 1
    iteration = read_state(checkpoint)["iteration"]
    step = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).global_step
    if step < iteration * config.steps_per_iteration:
        return "policy", iteration
    work, parts = WorkDirectory(output_dir), checkpoint / WORK_NAME
    if not is_finished(work.labelled(iteration), label_source(parts / "samples", parts / "replay")):
        return "label", iteration
    source = reward_model_source(work.labelled(iteration), parts / "reward_model", config)
    if not is_finished(work.reward_model(iteration), source):
        return "reward-model", iteration
    return ("policy", iteration + 1) if iteration < config.outer_iterations else ("done", iteration)


def run_in_processes(argv: list[str], arguments: IterateArguments, config) -> int:
    """Starts a process for each phase until the run is done; a phase's failure ends it with the same exit code."""
    launcher = shlex.split(arguments.launcher) if arguments.launcher else [sys.executable]
    while True:
        phase, iteration = next_phase(config.output_dir, config)
        if phase == "done":
            summarize(config.output_dir)
            return 0
        print(f"iteration {iteration}: {phase}", file=sys.stderr)
        command = [*launcher, "-m", "trl_grpo_plus.cli", "iterate", *argv, "--phase", phase]
        code = subprocess.run([*command, "--separate_processes", "false"], check=False).returncode
        if code:
            return code
        if next_phase(config.output_dir, config) == (phase, iteration):
            raise TrainError(
                f"The phase {phase!r} of iteration {iteration} ended without its result. Set save_strategy to 'steps'."
            )


def prepare(arguments: IterateArguments, config, model_config) -> Callable[[], None]:
    """Builds what the phase of `arguments.phase` needs; returns the function that runs it in this process.

    Raises:
        TrainError, ValueError, OSError: something that the configuration names is missing or unusable.
    """
    if arguments.phase in ("all", "policy"):
        return prepare_policy(arguments, config, model_config)
    from accelerate import PartialState

    from trl_grpo_plus.iterative.checkpoint import last_whole_checkpoint
    from trl_grpo_plus.iterative.phases import Ranks
    from trl_grpo_plus.iterative.workdir import WorkDirectory

    phase, iteration = next_phase(config.output_dir, config)
    if phase != arguments.phase:
        raise TrainError(f"phase {arguments.phase!r} is not due in {config.output_dir}; next is {phase!r}.")
    state = PartialState()
    ranks = Ranks(state.process_index, state.num_processes, state.wait_for_everyone)
    work = WorkDirectory(config.output_dir)
    checkpoint = last_whole_checkpoint(config.output_dir)
    if ranks.is_main:
        work.restore(checkpoint)
    ranks.barrier()
    if phase == "label":
        return _prepare_label(arguments, config, model_config, work, checkpoint, iteration, ranks)
    return _prepare_reward_model(arguments, config, model_config, work, iteration, ranks)


def prepare_policy(arguments: IterateArguments, config, model_config) -> Callable[[], None]:
    """The whole run, or with `phase="policy"` the policy steps that are left of an iteration."""
    from transformers import AutoTokenizer
    from trl import get_peft_config, get_quantization_config

    from trl_grpo_plus.iterative.checkpoint import last_whole_checkpoint
    from trl_grpo_plus.iterative.trainer import IterativeGRPOTrainer

    path = demo_path(model_config.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(path, revision=model_config.model_revision, padding_side="left")
    train_dataset, eval_dataset = _datasets(arguments, tokenizer, config)
    reward_model, replay = start_reward_model(arguments, config, model_config, train_dataset)
    config.model_init_kwargs = model_init_kwargs(config, model_config)
    trainer = IterativeGRPOTrainer(
        path,
        reward_model,
        config,
        train_dataset,
        reward_funcs=_functions(arguments.reward_funcs, "reward_funcs"),
        process_reward_funcs=_functions(arguments.process_reward_funcs, "process_reward_funcs"),
        grader=_function(arguments.grader, "grader"),
        step_labeler=_function(arguments.step_labeler, "step_labeler"),
        replay_dataset=replay,
        phase=arguments.phase,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_config),
        peft_config=get_peft_config(model_config),
    )
    resume = config.resume_from_checkpoint
    if resume in (None, "", "true", "True", True):
        resume = last_whole_checkpoint(config.output_dir) is not None

    def run() -> None:
        trainer.train(resume_from_checkpoint=resume)
        if trainer.state.global_step == config.max_steps:
            trainer.save_model(config.output_dir)
        if arguments.phase == "all" and trainer.accelerator.is_main_process:
            summarize(config.output_dir)

    return run


def start_reward_model(arguments: IterateArguments, config, model_config, train_dataset=None):
    """The reward model that the run starts from, and the history that comes with it.

    A new one is made once: it is kept in `output_dir/initial_reward_model` with its samples.
    """
    from datasets import Dataset

    from trl_grpo_plus.evaluation.datasets import read_rows
    from trl_grpo_plus.iterative.reward_model import as_updatable
    from trl_grpo_plus.iterative.start import make_reward_model, read_initial_samples

    history = None
    if arguments.replay_dataset:
        history = Dataset.from_list(read_rows(Path(arguments.replay_dataset), "train"))
    if arguments.reward_model not in NEW_MODELS:
        return as_updatable(arguments.reward_model), history
    directory = Path(config.output_dir) / "initial_reward_model"
    if not (directory / "manifest.json").exists():
        make_reward_model(
            directory,
            NEW_MODELS[arguments.reward_model],
            demo_path(model_config.model_name_or_path),
            train_dataset,
            config,
            arguments.initial_samples,
            _function(arguments.grader, "grader"),
            _function(arguments.step_labeler, "step_labeler"),
        )
    return as_updatable(directory), history or read_initial_samples(directory)


def summarize(output_dir: str | Path) -> None:
    """Prints the iterations of a finished run, plots them, and says what to do next."""
    from rich.console import Console
    from rich.table import Table

    from trl_grpo_plus.iterative.plots import plot_iterations
    from trl_grpo_plus.iterative.workdir import WorkDirectory

    table = Table(title="iterations")
    columns = {
        "grader": "grader/accuracy",
        "agreement": "reward_model/agreement",
        "before": "reward_model/accuracy_before",
        "after": "reward_model/accuracy_after",
        "loss": "reward_model/loss",
        "buffer": "replay/size",
        "history": "replay/fraction",
    }
    for name in ("iteration", *columns):
        table.add_column(name, justify="right")
    for entry in json.loads(WorkDirectory(output_dir).metrics.read_text()):
        table.add_row(str(entry["iteration"]), *(_show(entry.get(key)) for key in columns.values()))
    console = Console()
    console.print(table)
    console.print(f"Policy: {output_dir}, reward model: {Path(output_dir) / 'reward_model'}", highlight=False)
    try:
        console.print(f"Plot:   {plot_iterations(output_dir)}", highlight=False)
    except ImportError as error:
        console.print(f"No plot: {error}", highlight=False)
    console.print(f"Next:   trl-grpo-plus report {output_dir}", highlight=False)


def demo_path(name: str) -> str:
    """The path of a model; `demo` is the policy that comes with this package."""
    if name != "demo":
        return name
    from trl_grpo_plus.demo.policy import WEIGHTS_DIR

    return str(WEIGHTS_DIR)


def _prepare_label(arguments, config, model_config, work, checkpoint, iteration, ranks) -> Callable[[], None]:
    from transformers import AutoTokenizer

    from trl_grpo_plus.iterative.graders import RolloutLabeler, rule_grader
    from trl_grpo_plus.iterative.phases import label_phase

    granularity = NEW_MODELS.get(arguments.reward_model) or _granularity(arguments.reward_model)
    grader = _function(arguments.grader, "grader") or rule_grader(config.answer_column)
    labeler = _function(arguments.step_labeler, "step_labeler")
    if granularity == "process" and config.step_labels == "rollouts":
        path = demo_path(model_config.model_name_or_path)
        labeler = RolloutLabeler(lambda: _policy_of(checkpoint), AutoTokenizer.from_pretrained(path), config, grader)

    def run() -> None:
        label_phase(
            work.samples,
            work.replay(iteration - 1),
            work.labelled(iteration),
            config,
            iteration,
            granularity,
            grader,
            labeler,
            ranks,
        )

    return run


def _prepare_reward_model(arguments, config, model_config, work, iteration, ranks) -> Callable[[], None]:
    from trl_grpo_plus.iterative.phases import load_reward_model, reward_model_phase
    from trl_grpo_plus.iterative.workdir import record_metrics

    reward_model, _ = start_reward_model(arguments, config, model_config)
    reward_model.to(config.device)
    load_reward_model(reward_model, work.reward_model(iteration - 1))

    def run() -> None:
        reward_model_phase(
            reward_model,
            work.labelled(iteration),
            work.reward_model(iteration - 1),
            work.initial_reward_model,
            work.reward_model(iteration),
            config,
            iteration,
            ranks,
        )
        if ranks.is_main:
            record_metrics(work, iteration, config.steps_per_iteration)
            if iteration == config.outer_iterations:
                reward_model.save_pretrained(Path(config.output_dir) / "reward_model")

    return run


def _policy_of(checkpoint: Path):
    from transformers import AutoModelForCausalLM

    if not (checkpoint / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(checkpoint)
    from peft import AutoPeftModelForCausalLM

    return AutoPeftModelForCausalLM.from_pretrained(checkpoint).merge_and_unload()


def _granularity(path: str) -> str:
    from transformers import AutoConfig

    architecture = (AutoConfig.from_pretrained(path).architectures or [""])[0]
    return "outcome" if architecture.endswith("ForSequenceClassification") else "process"


def _datasets(arguments: IterateArguments, tokenizer, config):
    if arguments.dataset != "demo":
        return load_datasets(arguments, tokenizer, with_eval=config.eval_strategy != "no")
    from trl_grpo_plus.demo import make_problems

    size = arguments.max_train_samples or 1000
    test = make_problems(arguments.max_eval_samples or 64, seed=config.seed, split="test")
    return make_problems(size, seed=config.seed), test if config.eval_strategy != "no" else None


def _functions(names: list[str] | None, field_name: str) -> list:
    return [resolve_function(name, field_name) for name in names or []]


def _function(name: str | None, field_name: str):
    return resolve_function(name, field_name) if name else None


def _show(value) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
