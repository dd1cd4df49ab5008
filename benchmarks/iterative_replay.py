"""Does a reward model forget without replay? Six updates on a policy that has moved, with 0, 10 and 50 % history.

    python benchmarks/iterative_replay.py

The moved policy is the demo policy at temperature 0.3: it is nearly always right, as a policy is after much training,
so new samples hold few mistakes. The reward model (that of benchmarks/iterative.py) was trained on samples at
temperature 1, where half are wrong; those are the history. Reported is its accuracy on samples at temperature 1 that
it never saw, after each update. Updates run through the same two phases as in a training run.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from iterative import LineRewardModel, labelled_samples, make_config, make_start, mean_and_interval
from rich.console import Console
from rich.table import Table

FRACTIONS = (0.0, 0.1, 0.5)


def quality(reward_model: LineRewardModel, samples) -> tuple[float, float]:
    """Accuracy at 0.5, and AUC, against the grader."""
    from trl_grpo_plus.reward_models.metrics import auc

    scores = reward_model(samples["prompt"][:], samples["completion"][:])
    labels = [verdict > 0.5 for verdict in samples["correct"]]
    agreed = [(score > 0.5) == label for score, label in zip(scores, labels, strict=True)]
    return sum(agreed) / len(agreed), auc(scores, labels)


def run_seed(seed: int, directory: Path, args) -> dict[float, list[tuple[float, float]]]:
    """For each share of history the quality on the first policy before and after each update."""
    import pyarrow.parquet as pq
    from datasets import Dataset

    from trl_grpo_plus.demo import load_demo_policy, make_problems
    from trl_grpo_plus.iterative.graders import rule_grader
    from trl_grpo_plus.iterative.phases import SampleStore, label_phase, reward_model_phase, save_reward_model
    from trl_grpo_plus.iterative.replay import ReplayBuffer

    start, unseen = make_start(seed, directory, args)
    policy = load_demo_policy()
    for iteration in range(1, args.iterations + 1):
        problems = make_problems(args.samples // 8, seed=100 * seed + iteration)
        moved = labelled_samples(policy, problems, 8, seed + iteration, temperature=args.temperature)
        rows = [
            {**row, "truncated": False, "scores": [], "steps": []} for row in moved.remove_columns("correct").to_list()
        ]
        SampleStore(directory / f"samples-{iteration}").write(rows, iteration)
    curves = {}
    for fraction in FRACTIONS:
        config = make_config(directory / str(fraction), seed, args, replay_fraction=fraction)
        work = Path(config.output_dir)
        reward_model = LineRewardModel(start / "weights.pt")
        ReplayBuffer(work / "0" / "label" / "replay", seed=seed).add(
            Dataset(pq.read_table(start / "samples.parquet")), 0
        )
        save_reward_model(reward_model, work / "0" / "reward_model")
        curve = [quality(reward_model, unseen)]
        for iteration in range(1, args.iterations + 1):
            before, now = work / str(iteration - 1), work / str(iteration)
            label_phase(
                directory / f"samples-{iteration}",
                before / "label" / "replay",
                now / "label",
                config,
                iteration,
                "outcome",
                rule_grader("answer"),
            )
            reward_model_phase(
                reward_model,
                now / "label",
                before / "reward_model",
                work / "0" / "reward_model",
                now / "reward_model",
                config,
                iteration,
            )
            curve.append(quality(reward_model, unseen))
        curves[fraction] = curve
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--samples", type=int, default=320, help="new samples in an update")
    parser.add_argument("--temperature", type=float, default=0.3)
    # What make_config and make_start of the other benchmark read besides.
    parser.set_defaults(
        steps=1,
        learning_rate=1e-4,
        beta=0.0,
        batch=64,
        group=8,
        problems=1000,
        reward_model_learning_rate=0.02,
        reward_model_epochs=5,
        initial_samples=2048,
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    curves = {fraction: [] for fraction in FRACTIONS}
    with tempfile.TemporaryDirectory() as name:
        for seed in args.seeds:
            for fraction, curve in run_seed(seed, Path(name) / str(seed), args).items():
                curves[fraction].append(curve)
    console = Console(width=140)
    for which, name in enumerate(("accuracy", "AUC")):
        table = Table(title=f"{name} on unseen samples of the first policy, {len(args.seeds)} seeds, 95 % t interval")
        for column in ("history", "before", *(f"update {i + 1}" for i in range(args.iterations))):
            table.add_column(column, justify="right")
        for fraction, runs in curves.items():
            columns = [[point[which] for point in column] for column in zip(*runs, strict=True)]
            table.add_row(f"{fraction:.0%}", *("{:.3f} ± {:.3f}".format(*mean_and_interval(c)) for c in columns))
        console.print(table)
        for fraction in FRACTIONS[1:]:
            gains = [run[-1][which] - base[-1][which] for run, base in zip(curves[fraction], curves[0.0], strict=True)]
            mean, half = mean_and_interval(gains)
            console.print(f"{fraction:.0%} - 0%, last update, paired: {mean:+.3f} ± {half:.3f}", highlight=False)


if __name__ == "__main__":
    main()
