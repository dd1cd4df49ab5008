"""Iterative GRPO in full: a process reward model that is retrained as the policy moves, labelled by rule.

python examples/iterative.py --model PATH_OR_ID --reward-model PATH [--cpu]
python examples/iterative.py --demo --cpu      # the policy and problems of the package, a new reward model; minutes
"""

import argparse

from datasets import load_dataset

from reward_fns import step_arithmetic_reward
from trl_grpo_plus import IterativeGRPOConfig, IterativeGRPOTrainer
from trl_grpo_plus.demo import exact_step_reward, make_problems
from trl_grpo_plus.demo.policy import WEIGHTS_DIR
from trl_grpo_plus.iterative.start import make_reward_model, read_initial_samples


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--reward-model", help="process reward model, as PRMTrainer makes it")
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--output-dir", default="runs/iterative")
    parser.add_argument("--outer-iterations", type=int, default=2)
    parser.add_argument("--steps-per-iteration", type=int, default=5)
    options = parser.parse_args()

    small = options.demo
    args = IterativeGRPOConfig(
        output_dir=options.output_dir,
        outer_iterations=options.outer_iterations,  # I of Algorithm 1
        steps_per_iteration=options.steps_per_iteration,  # M
        beta=0.04,  # the reference is reset to the policy as each iteration starts
        learning_rate=2e-4 if small else 1e-6,
        num_generations=8,
        per_device_train_batch_size=32 if small else 8,
        gradient_accumulation_steps=1 if small else 8,
        max_completion_length=48 if small else 512,
        credit_assignment="min",  # a completion is worth its worst step: leaving steps out gains nothing
        reward_model_learning_rate=1e-3 if small else 2e-5,
        reward_model_batch_size=32,
        replay_fraction=0.1,  # a tenth of each update is history
        heldout_fraction=0.1,  # these prompts never train the reward model and measure it
        skip_worse_update=True,
        save_total_limit=2,
        logging_steps=1,
        gradient_checkpointing=not small,
        use_cpu=options.cpu,
        bf16=not options.cpu,
        report_to=[],
    )
    if options.demo:
        model, labeler, dataset = str(WEIGHTS_DIR), exact_step_reward, make_problems(200, seed=0)
        reward_model = f"{options.output_dir}-reward-model"
        make_reward_model(reward_model, "process", model, dataset, args, 256, step_labeler=labeler)
        history = read_initial_samples(reward_model)
    else:
        model, labeler, history = options.model, step_arithmetic_reward, None
        reward_model = options.reward_model
        dataset = load_dataset("openai/gsm8k", "main", split="train")
        dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})

    trainer = IterativeGRPOTrainer(
        model,
        reward_model,
        args,
        dataset,
        step_labeler=labeler,  # labels of steps; verdicts on completions come from reward_fns.grade
        replay_dataset=history,
    )
    trainer.train()


if __name__ == "__main__":
    main()
