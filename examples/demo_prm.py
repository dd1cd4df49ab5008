"""A process reward model without humans, offline and on a CPU: label by roll-outs, train, measure, train a policy.

    python examples/demo_prm.py --output-dir demo-prm

On synthetic word problems the true slip is known, so every stage can be held against the truth:

1. the demo policy solves problems and slips; from the end of each step it rolls out, and the share of right answers is
   the step's label (`label_steps_by_rollout`);
2. a tiny process reward model learns these labels (`PRMTrainer`, on the demo policy's layers and two new ones);
3. its scores are compared with the true steps of held-out problems;
4. the quickstart is run on its scores and, to compare, on the exact step checker.
"""

import argparse
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForTokenClassification, set_seed

from trl_grpo_plus import PRMConfig, PRMTrainer, ProcessRewardModel, label_steps_by_rollout
from trl_grpo_plus.demo import exact_step_reward, load_demo_policy, load_demo_tokenizer, make_problems
from trl_grpo_plus.demo.command import DEFAULT_STEPS
from trl_grpo_plus.demo.training import Accuracy, quiet
from trl_grpo_plus.reward_models import sample_completions
from trl_grpo_plus.reward_models.metrics import step_metrics

SAMPLING = {"max_new_tokens": 32, "temperature": 1.0, "batch_size": 512}


def truth(rows) -> list[list[float]]:
    """1 for each step that is the true line at its place, else 0."""
    columns = {name: rows[name] for name in ("solution_steps", "answer")}
    steps = [[line for line in text.split("\n") if line.strip()] for text in rows["completion"]]
    return exact_step_reward(None, None, None, steps, **columns)


def build_prm_body(policy) -> LlamaForTokenClassification:
    """The demo policy's layers, frozen, and two new ones on top: one can hold a result against the one that the policy
    expected, the other can look back whether an earlier step failed."""
    shape = policy.config.to_dict()
    shape = {k: v for k, v in shape.items() if k not in ("layer_types", "architectures", "id2label", "label2id")}
    shape["num_hidden_layers"] += 2
    model = LlamaForTokenClassification(LlamaConfig(**shape, num_labels=2))
    model.model.load_state_dict(policy.model.state_dict(), strict=False)
    frozen = [model.model.embed_tokens, *model.model.layers[:-2]]
    for parameter in (parameter for module in frozen for parameter in module.parameters()):
        parameter.requires_grad_(False)
    return model


def train_prm(labels, policy, tokenizer, output_dir: Path, num_steps: int, seed: int) -> ProcessRewardModel:
    """Trains on the first steps alone, which are right or wrong by themselves, then on the first two, which teach that
    a step behind a wrong one is lost, then on all."""
    set_seed(seed)
    model = build_prm_body(policy)
    for depth, share, learning_rate in ((1, 0.15, 3e-3), (2, 0.15, 2e-3), (None, 0.7, 2e-3)):
        steps = max(1, int(share * num_steps))
        data = labels.map(
            lambda row, depth=depth: {"completions": row["completions"][:depth], "labels": row["labels"][:depth]}
        )
        args = PRMConfig(
            output_dir=str(output_dir),
            max_steps=steps,
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 8,
            weight_decay=0.1,
            per_device_train_batch_size=64,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            seed=seed,
            save_strategy="no",
            logging_steps=max(1, steps // 10),
            report_to=[],
            disable_tqdm=True,
        )
        trainer = PRMTrainer(model, args, train_dataset=data, processing_class=tokenizer)
        trainer.train()
    trainer.save_model()
    return ProcessRewardModel.from_pretrained(output_dir, batch_size=512)


def quickstarts(process_rewards: list[str], output_dir: Path, steps: int, seed: int) -> list[dict]:
    """Runs the quickstart on each process reward, side by side since it needs one core; the first one shows itself.
    Returns the contents of their results.json."""
    runs = []
    for name in process_rewards:
        directory = output_dir / f"quickstart-{Path(name).name}"
        options = {"--process-reward": name, "--steps": steps, "--seed": seed, "--output-dir": directory}
        command = [sys.executable, "-m", "trl_grpo_plus.cli", "quickstart", "--no-plot"]
        command += [str(part) for option in options.items() for part in option]
        runs.append((directory, subprocess.Popen(command, stdout=subprocess.DEVNULL if runs else None)))
    for directory, process in runs:
        if process.wait():
            for _, other in runs:
                other.terminate()
            sys.exit(f"the quickstart in {directory} failed (exit code {process.returncode})")
    return [json.loads((directory / "results.json").read_text()) for directory, _ in runs]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("demo-prm"))
    parser.add_argument("--problems", type=int, default=4000, help="problems to label (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=2, help="completions of each (default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=1, help="roll-outs of each step (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the roll-outs (default: %(default)s)")
    parser.add_argument(
        "--prm-steps", type=int, default=2600, help="optimizer steps of the PRM (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        help="optimizer steps of the policy; 0: none (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    console, start = Console(), time.monotonic()
    policy, tokenizer = load_demo_policy(), load_demo_tokenizer()

    problems = make_problems(args.problems, args.seed)
    rows = sample_completions(problems, policy, tokenizer, num_samples=args.samples, seed=args.seed, **SAMPLING)
    labels = label_steps_by_rollout(
        rows,
        policy,
        tokenizer,
        num_rollouts=args.rollouts,
        label="soft",
        seed=args.seed,
        rows_per_chunk=256,
        output=args.output_dir / "labels.parquet",
        **{**SAMPLING, "temperature": args.temperature},
    )
    labelled = time.monotonic() - start
    label_quality = step_metrics(labels["labels"], truth(rows))
    # What `label="hard"` would have made of the same roll-outs.
    hard = [[float(share > 0) for share in row] for row in labels["labels"]]
    hard_quality = step_metrics(hard, truth(rows))

    logging.getLogger("transformers").setLevel(logging.ERROR)
    with console.status("training the process reward model"), quiet():
        prm = train_prm(labels, policy, tokenizer, args.output_dir / "prm", args.prm_steps, args.seed)
    trained = time.monotonic() - start

    held_out = make_problems(300, args.seed, "test")
    test = sample_completions(held_out, policy, tokenizer, num_samples=2, seed=args.seed + 1, **SAMPLING)
    scores = [[step.score for step in steps] for steps in prm.score(test["prompt"][:], test["completion"][:])]
    quality = step_metrics(scores, truth(test))

    table = Table(title="Against the true steps", title_justify="left")
    for column in ("", "soft labels", "hard labels", "PRM on held-out problems"):
        table.add_column(column)
    for name in ("auc", "accuracy", "first_error_f1", "brier", "ece"):
        table.add_row(name, *(f"{measured[name]:.3f}" for measured in (label_quality, hard_quality, quality)))
    console.print(table)
    report = {
        "soft_labels": label_quality,
        "hard_labels": hard_quality,
        "prm": quality,
        "seconds": {"label": labelled, "train": trained - labelled},
    }

    if args.steps:
        names = ("the PRM", "the exact checker")
        runs = quickstarts([str(args.output_dir / "prm"), "exact"], args.output_dir, args.steps, args.seed)
        table = Table(title="Accuracy on 500 held-out problems, sampled, 95 % interval", title_justify="left")
        for column in ("GRPO on", "before", "after", "gain"):
            table.add_column(column)
        for name, run in zip(names, runs, strict=True):
            before, after = (Accuracy(**run["evaluations"][i]["sampled"]) for i in (0, -1))
            table.add_row(name, str(before), str(after), f"{run['gain']:.1f}")
            report[name] = {"before": vars(before), "after": vars(after), "gain": run["gain"]}
        console.print(table)
    report["seconds"]["all"] = time.monotonic() - start
    (args.output_dir / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    console.print(
        f"{report['seconds']['all']:.0f} s. In {args.output_dir}: labels.parquet, prm/, results.json", markup=False
    )
    console.print(
        f"Next: trl-grpo-plus score {args.output_dir / 'prm'} --prompt QUESTION --completion SOLUTION", markup=False
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
