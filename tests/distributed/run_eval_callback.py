"""Trains two steps with an EvalCallback and writes what it logged. Arguments: output directory, completions a rank."""

import json
import sys

import torch
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_plus import EvalCallback
from trl_grpo_plus.demo.policy import load_demo_policy, load_demo_tokenizer
from trl_grpo_plus.demo.problems import make_problems


def constant(completions, **kwargs):
    return [0.0 for _ in completions]


def main() -> None:
    output, per_device = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    tokenizer = load_demo_tokenizer()
    args = GRPOConfig(
        output_dir=output,
        per_device_train_batch_size=per_device,
        num_generations=4,
        max_completion_length=8,
        max_steps=2,
        learning_rate=0.0,
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=load_demo_policy(),
        reward_funcs=constant,
        args=args,
        train_dataset=make_problems(8, seed=0),
        processing_class=tokenizer,
    )
    problems = make_problems(11, seed=2, split="test")
    callback = EvalCallback(
        trainer, problems, every_steps=2, num_samples=2, metric="maj@2", max_tokens=60, prompt="plain", batch_size=3
    )
    trainer.add_callback(callback)
    trainer.train()
    if trainer.accelerator.is_main_process:
        with open(f"{output}/history.json", "w") as file:
            json.dump(callback.history, file)


if __name__ == "__main__":
    main()
