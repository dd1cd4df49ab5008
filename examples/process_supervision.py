"""Process supervision in full: several process rewards with weights, a credit form, and what reaches the tokens.

python examples/process_supervision.py --model PATH_OR_ID [--max-steps 20] [--cpu]
"""

import argparse

from datasets import load_dataset

from reward_fns import gsm8k_reward, step_arithmetic_reward
from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer


def brevity(prompts, completions, completion_ids, steps, **kwargs):
    """A process reward of one's own: 1 for a step of at most 40 words, falling to 0 at 80; None for an empty step."""
    return [
        [None if not step.strip() else min(1.0, max(0.0, 2 - len(step.split()) / 40)) for step in completion]
        for completion in steps
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()

    dataset = load_dataset("openai/gsm8k", "main", split="train")
    dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
    args = GRPOPlusConfig(
        output_dir="runs/process-supervision",
        max_steps=options.max_steps,
        num_generations=8,
        max_completion_length=256,
        step_delimiter="newline",
        credit_assignment="min",  # a completion is worth its worst step; "sum" is the paper's form
        credit_tau=0.1,
        process_reward_weights=[1.0, 0.1],
        outcome_weight=1.0,
        process_weight=0.5,
        delimiter_advantage="zero",  # neither teach to split nor to stop splitting
        log_completions=True,
        bf16=not options.cpu,
        use_cpu=options.cpu,
        report_to=[],
    )
    trainer = GRPOPlusTrainer(
        options.model,
        reward_funcs=gsm8k_reward,
        process_reward_funcs=[step_arithmetic_reward, brevity],
        args=args,
        train_dataset=dataset,
    )
    trainer.train()
    trainer.save_model()
    print(f"Curves: trl-grpo-plus report {args.output_dir}")


if __name__ == "__main__":
    main()
