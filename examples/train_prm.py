"""Train a process reward model on stepwise data and use it in GRPO.

    python examples/train_prm.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/math_shepherd --output-dir prm
    python examples/train_prm.py --model PATH --dataset labels.parquet --output-dir prm   # labels of one's own

The data has `prompt`, `completions` (a list of steps) and `labels` (one a step), as `trl-grpo-plus label` writes it.
"""

import argparse

from datasets import load_dataset

from trl_grpo_plus import PRMConfig, PRMTrainer, ProcessRewardModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--dataset", default="trl-lib/math_shepherd", help="hub id, .parquet or .jsonl")
    parser.add_argument("--output-dir", default="prm")
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--use-cpu", action="store_true")
    args = parser.parse_args()

    if args.dataset.endswith((".parquet", ".jsonl")):
        kind = "parquet" if args.dataset.endswith(".parquet") else "json"
        data = load_dataset(kind, data_files=args.dataset, split="train")
    else:
        data = load_dataset(args.dataset, split="train")
    data = data.train_test_split(test_size=min(500, len(data) // 5), seed=0)

    trainer = PRMTrainer(
        model=args.model,
        args=PRMConfig(
            output_dir=args.output_dir,
            max_steps=args.max_steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            learning_rate=1e-5,
            # The new head learns alone for a while, so that its first random gradients do not reach the body.
            head_first_steps=50,
            head_learning_rate=1e-3,
            use_cpu=args.use_cpu,
            report_to=[],
        ),
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model()

    prm = ProcessRewardModel.from_pretrained(args.output_dir)
    row = data["test"][0]
    for step in prm.score([row["prompt"]], [row["completions"]])[0]:
        print(f"{step.score:.3f}  {step.text}")
    print(f"In GRPO: GRPOPlusTrainer(..., process_reward_funcs={args.output_dir!r})")


if __name__ == "__main__":
    main()
