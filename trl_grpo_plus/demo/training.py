"""The quickstart's run: train the demo policy, with its accuracy on held-out problems along the way."""

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import datasets
import torch
import transformers
import trl
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from reward_fns import gsm8k_reward
from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer, __version__
from trl_grpo_plus.algorithms.steps import split_steps
from trl_grpo_plus.demo.policy import load_demo_policy, load_demo_tokenizer
from trl_grpo_plus.demo.problems import make_problems
from trl_grpo_plus.evaluation.metrics import wilson_interval

GROUPS_PER_STEP = 16
GROUP_SIZE = 8
MAX_COMPLETION_LENGTH = 32
LEARNING_RATE = 4e-4
WARMUP_RATIO = 1 / 12
NUM_TRAIN_PROBLEMS = 4000
NUM_HELD_OUT_PROBLEMS = 500
HELD_OUT_SEED = 20240205
NUM_EVALUATIONS = 6


@dataclass
class Accuracy:
    """Share of problems solved, with its 95 % Wilson interval."""

    accuracy: float
    low: float
    high: float
    num_problems: int

    @classmethod
    def of(cls, verdicts: list[float]) -> "Accuracy":
        interval = wilson_interval(sum(verdicts), len(verdicts))
        return cls(sum(verdicts) / len(verdicts), interval.low, interval.high, len(verdicts))

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass
class Evaluation:
    """Accuracy on the held-out problems after `step` optimizer steps."""

    step: int
    sampled: Accuracy
    greedy: Accuracy


@dataclass
class ExampleStep:
    """One step of a sampled completion: its tokens, the advantage of each, and the step's score (None: not scored)."""

    tokens: list[str]
    advantages: list[float]
    score: float | None


@dataclass
class Run:
    """What a run leaves: the settings, the evaluations, one row of logged metrics a step, and one completion."""

    settings: dict
    evaluations: list[Evaluation] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    step_rewards: list[float] = field(default_factory=list)
    example_prompt: str = ""
    example: list[ExampleStep] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def gain(self) -> float:
        """Sampled accuracy after minus before, in points (0 to 100)."""
        return 100 * (self.evaluations[-1].sampled.accuracy - self.evaluations[0].sampled.accuracy)

    def save(self, path: Path):
        versions = {"trl_grpo_plus": __version__, "trl": trl.__version__, "transformers": transformers.__version__}
        path.write_text(json.dumps({"versions": versions, "gain": self.gain, **asdict(self)}, indent=2) + "\n")


def evaluate(policy, tokenizer, problems: datasets.Dataset, step: int = 0, seed: int = 0) -> Evaluation:
    """Sampled (temperature 1, one sample a problem) and greedy accuracy. Leaves the global random state as it was."""
    prompts = tokenizer(list(problems["prompt"]), padding=True, return_tensors="pt").to(policy.device)
    was_training = policy.training
    policy.eval()
    results = {}
    for name, do_sample in (("sampled", True), ("greedy", False)):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            output = policy.generate(
                **prompts, max_new_tokens=MAX_COMPLETION_LENGTH, do_sample=do_sample, use_cache=True
            )
        completions = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        results[name] = Accuracy.of(gsm8k_reward(completions=completions, answer=list(problems["answer"])))
    policy.train(was_training)
    return Evaluation(step, **results)


class _Recorder(TrainerCallback):
    """Fills a `Run` while the trainer works, and tells how far it is."""

    def __init__(self, run: Run, tokenizer, problems, on_step: Callable[[int, float], None]):
        self.run, self.tokenizer, self.problems, self.on_step = run, tokenizer, problems, on_step

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.run.evaluations.append(evaluate(model, self.tokenizer, self.problems))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        due = state.global_step % max(1, state.max_steps // NUM_EVALUATIONS) == 0
        if due or state.global_step == state.max_steps:
            self.run.evaluations.append(evaluate(model, self.tokenizer, self.problems, state.global_step))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" not in logs:
            return
        self.run.rewards.append(logs["reward"])
        self.run.step_rewards += [v for k, v in logs.items() if k.startswith("process/") and k.endswith("/step_mean")]
        self.on_step(state.global_step, logs["reward"])


class _QuickstartTrainer(GRPOPlusTrainer):
    """Keeps the most telling completion of the first batch, with the advantages that the loss was given."""

    def __init__(self, *args, run: Run, **kwargs):
        self._run = run
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if not self._run.example:
            self._run.example_prompt, self._run.example = self._find_example(inputs, output)
        return output

    def _find_example(self, inputs, output) -> tuple[str, list[ExampleStep]]:
        advantages = output["advantages"]
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1).expand_as(output["completion_ids"])
        candidates = []
        for row, ids in enumerate(output["completion_ids"]):
            ids = ids[output["completion_mask"][row].bool()].tolist()
            ends = split_steps(ids, self.processing_class, self.args.step_delimiter)
            scores = [None] * len(ends)
            if self._step_scores is not None:
                scores = [None if s != s else s for s in self._step_scores.scores[row, : len(ends), 0].tolist()]
            starts = [0, *(end + 1 for end in ends)]
            candidates.append(
                [
                    ExampleStep(
                        [self.processing_class.decode([i]) for i in ids[a : b + 1]],
                        advantages[row, a : b + 1].tolist(),
                        score,
                    )
                    for a, b, score in zip(starts, ends, scores, strict=False)
                ]
            )
        best = max(range(len(candidates)), key=lambda row: _tells(candidates[row]))
        return inputs[best]["prompt"], candidates[best]


def _tells(steps: list[ExampleStep]) -> tuple[float, ...]:
    """How much a completion shows of the method: best a single low score amid high ones, with large advantages."""
    scores = [step.score for step in steps if step.score is not None]
    advantages = [abs(advantage) for step in steps for advantage in step.advantages]
    if not scores:
        return (len(steps), max(advantages, default=0.0))
    is_amid = min(scores) not in (scores[0], scores[-1])
    return (max(scores) - min(scores), sum(scores) / len(scores), is_amid, max(advantages))


@contextmanager
def _one_thread() -> Iterator[None]:
    """A model of this size makes threads wait more than compute; and one thread gives the same sums anywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def train_demo_policy(
    supervision: str,
    num_steps: int,
    seed: int,
    output_dir: Path,
    process_reward_func: Callable | None = None,
    on_step: Callable[[int, float], None] = lambda step, reward: None,
    credit: str = "sum",
    beta: float = 0.0,
) -> Run:
    """Trains the demo policy and saves it under `output_dir/policy`.

    Args:
        supervision: `"outcome"` (one reward a completion: is the final answer right), `"process"` (one a step) or
            `"both"`.
        num_steps: optimizer steps, each on 16 groups of 8 completions.
        seed: of the training problems and the sampling. The held-out problems are always the same.
        process_reward_func: scores steps; not used with `"outcome"`.
        on_step: called with the step and the mean outcome reward of its batch.
        credit: `credit_assignment` of the trainer: `"sum"`, `"min"` or `"mean"`.
        beta: coefficient of the KL from the untrained policy in the loss.
    """
    start = time.monotonic()
    settings = {"supervision": supervision, "steps": num_steps, "seed": seed, "learning_rate": LEARNING_RATE}
    run = Run({**settings, "credit_assignment": credit, "beta": beta})
    tokenizer, policy = load_demo_tokenizer(), load_demo_policy()
    args = GRPOPlusConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=num_steps,
        per_device_train_batch_size=GROUPS_PER_STEP * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_COMPLETION_LENGTH,
        learning_rate=LEARNING_RATE,
        # Adam's first steps move every parameter by the full rate, whatever the gradient: without a warm-up they undo
        # the supervised training.
        warmup_steps=int(WARMUP_RATIO * num_steps),
        lr_scheduler_type="linear",
        credit_assignment=credit,
        beta=beta,
        # With weight 0 the outcome reward is only watched.
        outcome_weight=0.0 if supervision == "process" else 1.0,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = _QuickstartTrainer(
        model=policy,
        reward_funcs=gsm8k_reward,
        process_reward_funcs=None if supervision == "outcome" else process_reward_func,
        args=args,
        train_dataset=make_problems(NUM_TRAIN_PROBLEMS, seed),
        processing_class=tokenizer,
        callbacks=[_Recorder(run, tokenizer, make_problems(NUM_HELD_OUT_PROBLEMS, HELD_OUT_SEED, "test"), on_step)],
        run=run,
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.train()
    trainer.save_state()
    policy.save_pretrained(output_dir / "policy")
    tokenizer.save_pretrained(output_dir / "policy")
    run.seconds = time.monotonic() - start
    return run


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the chatter of TRL, transformers and datasets; warnings of this package's own checks stay errors."""
    verbosity = transformers.logging.get_verbosity()
    bars = (transformers.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled())
    trl_logger = logging.getLogger("trl")
    trl_level = trl_logger.level
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    trl_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars[0]:
            transformers.logging.enable_progress_bar()
        if not bars[1]:
            datasets.enable_progress_bars()
        trl_logger.setLevel(trl_level)
