"""A process reward model on real solutions with human labels, beside the arithmetic check.

    python benchmarks/prm_real_data.py --model HuggingFaceTB/SmolLM2-135M-Instruct --data DIR

DIR holds `mr_gsm8k_steps.jsonl`, `gsm8k/train.jsonl` and `gsm8k/test.jsonl`.

MR-GSM8K (arXiv 2312.17080) has solutions of language models with the first wrong step marked by humans. Steps before
it are right, it is wrong, and the steps behind it carry no label. All of its solutions here are wrong, so gold
solutions of GSM8K, written in the same manner (`Step 1: ...`), stand for the right ones. Questions of the held-out
solutions are not trained on.

Only the top layers get adapters, so that a CPU can do it.
"""

import argparse
import json
import time
import zlib
from pathlib import Path

import numpy as np
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from reward_fns import step_arithmetic_reward
from trl_grpo_plus import PRMConfig, PRMTrainer
from trl_grpo_plus.reward_models.metrics import auc, step_metrics


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def labelled_row(row: dict) -> dict:
    """A row of MR-GSM8K up to its first wrong step."""
    wrong = row["model_output_solution_first_error_step"] - 1
    steps = row["model_output_steps"][: wrong + 1]
    return _row(row["question"], steps, [1.0] * wrong + [0.0] * (len(steps) - wrong))


def gold_row(row: dict) -> dict:
    lines = [line for line in row["answer"].splitlines() if line.strip()]
    return _row(row["question"], [f"Step {j + 1}: {line}" for j, line in enumerate(lines)], [1.0] * len(lines))


def _row(question: str, steps: list[str], labels: list[float]) -> dict:
    return {"prompt": [{"role": "user", "content": question}], "completions": steps, "labels": labels}


def compare(scores, rows) -> dict[str, float]:
    return step_metrics(scores, [row["labels"] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--gold-train", type=int, default=100, help="gold solutions to train on (default: %(default)s)"
    )
    parser.add_argument(
        "--gold-test", type=int, default=60, help="gold solutions to measure on (default: %(default)s)"
    )
    parser.add_argument(
        "--held-out", type=float, default=0.4, help="share of MR-GSM8K's questions (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--layers", type=int, default=6, help="top layers with adapters (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--output-dir", default="prm-real-data")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.monotonic()

    sides: dict[bool, list[dict]] = {True: [], False: []}
    for row in read(next(args.data.rglob("mr_gsm8k_steps.jsonl"))):
        held = zlib.crc32(row["question"].encode()) < args.held_out * 2**32
        # `POT` solutions are programs.
        if row["question_type"] != "POT":
            sides[held].append(labelled_row(row))
    order = np.random.default_rng(args.seed)
    gold = [gold_row(row) for row in order.permutation(read(args.data / "gsm8k" / "train.jsonl"))[: args.gold_train]]
    gold_test = [
        gold_row(row) for row in order.permutation(read(args.data / "gsm8k" / "test.jsonl"))[: args.gold_test]
    ]
    train, test = sides[False] + gold, sides[True] + gold_test

    depth = AutoConfig.from_pretrained(args.model).num_hidden_layers
    trainer = PRMTrainer(
        args.model,
        args=PRMConfig(
            output_dir=args.output_dir,
            num_train_epochs=args.epochs,
            learning_rate=args.learning_rate,
            head_learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            per_device_train_batch_size=8,
            max_length=512,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            seed=args.seed,
            save_strategy="no",
            logging_steps=5,
            report_to=[],
        ),
        train_dataset=Dataset.from_list(train),
        peft_config=LoraConfig(
            r=16,
            lora_alpha=32,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            layers_to_transform=list(range(depth - args.layers, depth)),
        ),
    )
    prompts, steps = [row["prompt"] for row in test], [row["completions"] for row in test]
    trainer.train()
    trainer.save_model()
    trained = trainer.as_reward_model().score_steps(prompts, steps)
    arithmetic = step_arithmetic_reward(steps=steps)
    unsure = [[0.5 if score is None else score for score in row] for row in arithmetic]

    console, n = Console(), len(sides[True])
    table = Table(title=f"{n} held-out solutions of MR-GSM8K and {len(gold_test)} gold ones", title_justify="left")
    for column in ("", "AUC, MR-GSM8K", "AUC, with gold", "accuracy", "F1 of the first wrong step"):
        table.add_column(column, justify="left" if not column else "right")
    report = {}
    for name, scores in (("PRM", trained), ("step_arithmetic_reward", unsure)):
        wrong, both = compare(scores[:n], test[:n]), compare(scores, test)
        report[name] = {"mr_gsm8k": wrong, "with_gold": both}
        numbers = (wrong["auc"], both["auc"], both["accuracy"], both["first_error_f1"])
        table.add_row(name, *(f"{number:.3f}" for number in numbers))
    console.print(table)
    pairs = [
        (score, label, own)
        for scores, row, owns in zip(arithmetic[:n], test[:n], trained[:n], strict=True)
        for score, label, own in zip(scores, row["labels"], owns, strict=True)
        if score is not None
    ]
    checked, labels, own = (np.array(column) for column in zip(*pairs, strict=True))
    console.print(
        f"On the {len(pairs)} MR-GSM8K steps with an equality to check: AUC of step_arithmetic_reward "
        f"{auc(checked, labels > 0):.3f}, of the PRM {auc(own, labels > 0):.3f}."
    )
    counts = {"train": len(train), "test": len(test), "steps": sum(map(len, steps))}
    report |= {"counts": counts, "seconds": time.monotonic() - start}
    Path(args.output_dir, "results.json").write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"{counts}, {report['seconds']:.0f} s")


if __name__ == "__main__":
    main()
