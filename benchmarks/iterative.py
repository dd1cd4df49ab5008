"""Does retraining the reward model pay? Iterative GRPO against a frozen reward model, and with and without replay.

    python benchmarks/iterative.py --output-dir runs/iterative-benchmark

The demo policy is trained on the demo problems against an outcome reward model alone, never against the grader. The
reward
model is a logistic regression on what can be seen of a completion without doing the sums: its lines (hashed), how many
there are, how many the story asks for, and whether there is an answer line. (A transformer of the demo's size does not
learn to check sums from this little data.) It is first trained on samples of the first policy. Arms, each with the
same seeds, steps and first reward model:

- `frozen`: the reward model stays as it is (one-round RLHF);
- `retrained`: after each iteration it is trained on the policy's samples with 10 % history (DeepSeekMath, Algorithm
1);
- `no replay`: the same with no history.

Per iteration: the policy's true accuracy (grader, sampled), how the reward model ranks its samples (AUC against the
grader) and how often it agrees with the grader; and its accuracy on samples of the first policy that it never saw
(forgetting).
"""

import argparse
import json
import math
import zlib
from pathlib import Path

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table

from trl_grpo_plus.iterative import UpdatableRewardModel

ARMS = {
    "frozen": {"update_reward_model": False},
    "retrained": {"replay_fraction": 0.1},
    "no replay": {"replay_fraction": 0.0},
}
# Two-sided 95 % quantiles of Student's t, by the number of seeds.
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}


BUCKETS = 4096


class LineRewardModel(UpdatableRewardModel):
    """Logistic regression on the hashed lines of a completion, their number, and how many lines the story asks for."""

    granularity = "outcome"
    __name__ = "line_reward_model"

    def __init__(self, path: Path | None = None):
        self.model = torch.nn.Linear(BUCKETS + 16, 1)
        torch.nn.init.zeros_(self.model.weight)
        torch.nn.init.zeros_(self.model.bias)
        if path is not None:
            self.load_state_dict(torch.load(path))

    @staticmethod
    def features(prompts: list[str], completions: list[str]) -> torch.Tensor:
        """(N, BUCKETS + 16): counts of hashed lines, then indicators."""
        rows = torch.zeros(len(completions), BUCKETS + 16)
        for row, prompt, completion in zip(rows, prompts, completions, strict=True):
            lines = [line.strip() for line in completion.split("\n") if line.strip()]
            for line in lines:
                row[zlib.crc32(line.encode()) % BUCKETS] += 1
            # A story of n changes has n + 2 sentences and a solution of n + 1 lines.
            missing = (prompt.count(".") + prompt.count("?") - 1) - len(lines)
            row[BUCKETS + min(max(missing, -3), 3) + 3] = 1
            row[BUCKETS + 7 + min(len(lines), 6)] = 1
            row[BUCKETS + 14] = float(any(line.startswith("####") for line in lines))
            row[BUCKETS + 15] = len(set(lines)) / max(1, len(lines))
        return rows

    def __call__(self, prompts, completions, **columns):
        with torch.no_grad():
            return torch.sigmoid(self.model(self.features(prompts, completions)))[:, 0].tolist()

    def fit(self, train, settings, optimizer_state):
        args = settings.args
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.reward_model_learning_rate, weight_decay=0.01)
        if optimizer_state is not None:
            optimizer.load_state_dict(optimizer_state)
        inputs = self.features(train["prompt"], train["completion"])
        targets = torch.tensor(train["correct"][:], dtype=torch.float32)
        losses = []
        for _ in range(math.ceil(args.reward_model_epochs)):
            for rows in torch.randperm(len(inputs)).split(args.reward_model_batch_size):
                logits = self.model(inputs[rows])[:, 0]
                loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return sum(losses) / len(losses), optimizer.state_dict()

    def state_dict(self):
        return self.model.state_dict()

    def load_state_dict(self, state):
        self.model.load_state_dict(state)

    def save_pretrained(self, directory):
        Path(directory).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(directory) / "weights.pt")


def make_config(output_dir: Path, seed: int, args, **overrides):
    from trl_grpo_plus import IterativeGRPOConfig

    return IterativeGRPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        outer_iterations=args.iterations,
        steps_per_iteration=args.steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        beta=args.beta,
        per_device_train_batch_size=args.batch,
        num_generations=args.group,
        max_completion_length=48,
        reward_model_learning_rate=args.reward_model_learning_rate,
        reward_model_epochs=args.reward_model_epochs,
        reward_model_batch_size=32,
        learning_rate_scope="iteration",
        heldout_fraction=0.1,
        save_strategy="no",
        logging_steps=args.steps,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        **overrides,
    )


def run_arm(name: str, seed: int, start: Path, first_samples: Dataset, args) -> list[dict]:
    """One run; returns what was measured at the end of each iteration."""
    from transformers import PrinterCallback

    from trl_grpo_plus import IterativeGRPOTrainer
    from trl_grpo_plus.demo import load_demo_tokenizer, make_problems
    from trl_grpo_plus.demo.policy import WEIGHTS_DIR
    from trl_grpo_plus.iterative.graders import rule_grader
    from trl_grpo_plus.iterative.phases import SampleStore
    from trl_grpo_plus.reward_models.metrics import auc

    measured = []

    class Measured(IterativeGRPOTrainer):
        def finish_iteration(self, iteration):
            rows = SampleStore(self.work.samples).read()
            metrics = super().finish_iteration(iteration)
            verdicts = self.grader(
                prompts=None, completions=[r["completion"] for r in rows], answer=[r["answer"] for r in rows]
            )
            scores = [row["scores"][0] for row in rows]
            last = slice(-args.batch * max(1, args.steps // 4), None)
            kept = self.iterative_reward_model(first_samples["prompt"][:], first_samples["completion"][:])
            agreed = [(s > 0.5) == (v > 0.5) for s, v in zip(kept, first_samples["correct"], strict=True)]
            measured.append(
                {
                    "iteration": iteration,
                    "true accuracy": sum(verdicts[last]) / len(verdicts[last]),
                    "reward": sum(scores[last]) / len(scores[last]),
                    "agreement": metrics["reward_model/agreement"],
                    "auc": auc(scores, [verdict > 0.5 for verdict in verdicts]),
                    "accuracy on the first policy": sum(agreed) / len(agreed),
                }
            )
            return metrics

    output_dir = start.parent / name.replace(" ", "-")
    trainer = Measured(
        str(WEIGHTS_DIR),
        LineRewardModel(start / "weights.pt"),
        make_config(output_dir, seed, args, **ARMS[name]),
        make_problems(args.problems, seed=seed),
        grader=rule_grader("answer"),
        replay_dataset=Dataset(pq.read_table(start / "samples.parquet")),
        processing_class=load_demo_tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    measured[-1]["test accuracy"] = test_accuracy(trainer.model, seed, args)
    return measured


def labelled_samples(policy, problems, num_samples: int, seed: int, temperature: float = 1.0) -> Dataset:
    """Completions with the grader's verdict in `correct`."""
    from trl_grpo_plus.demo import load_demo_tokenizer
    from trl_grpo_plus.iterative.graders import rule_grader
    from trl_grpo_plus.reward_models import sample_completions

    samples = sample_completions(
        problems,
        policy.eval(),
        load_demo_tokenizer(),
        num_samples=num_samples,
        max_new_tokens=48,
        temperature=temperature,
        seed=seed,
        progress=False,
    )
    verdicts = rule_grader("answer")(prompts=None, completions=samples["completion"][:], answer=samples["answer"][:])
    return samples.add_column("correct", verdicts)


def test_accuracy(policy, seed: int, args) -> float:
    """Share of right completions for problems that no run trains on."""
    from trl_grpo_plus.demo import make_problems

    problems = make_problems(args.test_problems, seed=0, split="test")
    verdicts = labelled_samples(policy, problems, 4, seed)["correct"][:]
    return sum(verdicts) / len(verdicts)


def make_start(seed: int, directory: Path, args) -> tuple[Path, Dataset]:
    """The first reward model of a seed, and labelled samples of the first policy that it was not trained on."""
    from trl_grpo_plus.demo import load_demo_policy, make_problems
    from trl_grpo_plus.iterative.phases import isolated_rng
    from trl_grpo_plus.iterative.replay import is_held_out, make_samples, write_parquet
    from trl_grpo_plus.iterative.reward_model import FitSettings

    start, policy = directory / "start", load_demo_policy()
    config = make_config(directory / "unused", seed, args)
    problems = make_problems(args.problems, seed=seed).filter(
        lambda row: not is_held_out(row["prompt"], config.heldout_fraction, seed)
    )
    samples = labelled_samples(policy, problems.select(range(args.initial_samples // 8)), 8, seed)
    samples = make_samples({name: samples[name][:] for name in ("prompt", "completion", "correct")}, 0)
    reward_model = LineRewardModel()
    with isolated_rng(seed):
        reward_model.fit(samples, FitSettings(config, 1, seed, directory), None)
    reward_model.save_pretrained(start)
    write_parquet(samples, start / "samples.parquet")
    unseen = labelled_samples(policy, make_problems(75, seed=1000 + seed, split="test"), 4, seed)
    return start, unseen


def mean_and_interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of the 95 % t interval."""
    count, mean = len(values), sum(values) / len(values)
    if count < 2:
        return mean, float("nan")
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    return mean, T_95[count] * deviation / math.sqrt(count)


def report(results: dict[str, dict[str, list[dict]]], iterations: int) -> None:
    names = ("true accuracy", "reward", "agreement", "auc", "accuracy on the first policy", "test accuracy")
    table = Table(title="last iteration, mean over seeds and 95 % t interval")
    table.add_column("")
    for arm in results:
        table.add_column(arm, justify="right")
    for name in names:
        cells = []
        for runs in results.values():
            mean, half = mean_and_interval([run[-1][name] for run in runs.values()])
            cells.append(f"{mean:.3f} ± {half:.3f}")
        table.add_row(name, *cells)
    console = Console(width=120)
    console.print(table)
    if {"frozen", "retrained"} <= results.keys():
        seeds = results["frozen"].keys() & results["retrained"].keys()
        gains = [
            results["retrained"][seed][-1]["test accuracy"] - results["frozen"][seed][-1]["test accuracy"]
            for seed in sorted(seeds)
        ]
        mean, half = mean_and_interval(gains)
        console.print(f"retrained - frozen, test accuracy, paired: {mean:+.3f} ± {half:.3f} {gains}", highlight=False)


def plot(results: dict[str, dict[str, list[dict]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.4), layout="constrained")
    names = ("true accuracy", "reward", "auc", "accuracy on the first policy")
    for axes, name in zip(figure.subplots(1, len(names)), names, strict=True):
        for arm, runs in results.items():
            curves = [[point[name] for point in run] for run in runs.values()]
            means = [sum(column) / len(column) for column in zip(*curves, strict=True)]
            iterations = range(1, len(means) + 1)
            (line,) = axes.plot(iterations, means, marker="o", label=arm)
            for curve in curves:
                axes.plot(iterations, curve, color=line.get_color(), alpha=0.25, linewidth=1)
        axes.set(title=name, xlabel="iteration", xticks=list(iterations))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="policy steps in an iteration")
    parser.add_argument("--batch", type=int, default=64, help="completions in a step")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--test-problems", type=int, default=100)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--reward-model-learning-rate", type=float, default=0.02)
    parser.add_argument("--reward-model-epochs", type=float, default=5)
    parser.add_argument("--initial-samples", type=int, default=768)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "results.json"
    results: dict[str, dict[str, list[dict]]] = json.loads(path.read_text()) if path.exists() else {}
    for seed in args.seeds:
        start, first_samples = make_start(seed, args.output_dir / f"seed-{seed}", args)
        for arm in args.arms:
            if str(seed) in results.get(arm, {}):
                continue
            measured = run_arm(arm, seed, start, first_samples, args)
            results.setdefault(arm, {})[str(seed)] = measured
            path.write_text(json.dumps(results, indent=1))
            for point in measured:
                print(seed, arm, json.dumps({k: round(v, 3) for k, v in point.items()}), flush=True)
    report(results, args.iterations)
    plot(results, args.output_dir / "iterative.png")


if __name__ == "__main__":
    main()
