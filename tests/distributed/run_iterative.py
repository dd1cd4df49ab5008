"""One iterative run whose completions depend on the prompt alone; the ends of it are in the output directory."""

import random
import sys
import zlib

import torch
from trainer.iterative_toys import has_an_even_word, label_by_length, toy_config
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PrinterCallback

from trl_grpo_plus import IterativeGRPOTrainer
from trl_grpo_plus.demo import load_demo_tokenizer, make_problems
from trl_grpo_plus.reward_models import OutcomeRewardModel, ProcessRewardModel


def rollout(prompts, trainer):
    """Completions drawn from the prompt, the step and the place in the group: the same on any number of ranks."""
    tokenizer, seen, completions = load_demo_tokenizer(), {}, []
    for prompt in prompts:
        seen[prompt] = seen.get(prompt, -1) + 1
        rng = random.Random(zlib.crc32(f"{prompt} {trainer.state.global_step} {seen[prompt]}".encode()))
        lines = [f"{rng.randrange(9)} + {rng.randrange(9)} = {rng.randrange(9)}" for _ in range(rng.choice((1, 2)))]
        completions.append([*tokenizer("\n".join(lines))["input_ids"][:11], tokenizer.eos_token_id])
    return {
        "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": [[0.0] * len(ids) for ids in completions],
    }


def main(policy: str, output_dir: str, kind: str, per_device: int):
    tokenizer = load_demo_tokenizer()
    torch.manual_seed(0)
    if kind == "outcome":
        reward_model = OutcomeRewardModel(
            AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1), tokenizer
        )
    else:
        reward_model = ProcessRewardModel(
            AutoModelForTokenClassification.from_pretrained(policy, num_labels=2), tokenizer
        )
    trainer = IterativeGRPOTrainer(
        policy,
        reward_model,
        toy_config(
            output_dir,
            per_device_train_batch_size=per_device,
            num_iterations=1,
            reward_model_learning_rate=1e-2,
            replay_fraction=0.3,
        ),
        make_problems(12, seed=0),
        grader=has_an_even_word,
        step_labeler=label_by_length,
        rollout_func=rollout,
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    torch.save(reward_model.model.state_dict(), f"{output_dir}/rank{trainer.accelerator.process_index}.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
