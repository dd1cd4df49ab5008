"""One rollout whose group lies on both ranks; each rank saves the ids and the advantages that it got."""

import sys

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer


def outcome(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


def character_codes(prompts, completions, completion_ids, steps, **kwargs):
    return [[float(ord(step[0]) % 7) if step else None for step in completion] for completion in steps]


def main(policy: str, output_dir: str):
    args = GRPOPlusConfig(
        output_dir=output_dir,
        bf16=False,
        use_cpu=True,
        report_to=[],
        max_steps=2,
        per_device_train_batch_size=3,
        num_generations=6,
        max_completion_length=12,
        step_delimiter="[aeiou]",
        process_baseline="leave_one_out",
        log_completions=True,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOPlusTrainer(
        policy,
        reward_funcs=outcome,
        process_reward_funcs=character_codes,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["1+1=", "2+2="] * 8}),
        processing_class=AutoTokenizer.from_pretrained(policy),
    )
    trainer.model.train()
    rank = trainer.accelerator.process_index
    torch.manual_seed(rank)
    output = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 3)
    result = {
        "ids": [
            ids[: int(n)].tolist()
            for ids, n in zip(output["completion_ids"], output["completion_mask"].sum(1), strict=True)
        ],
        "advantages": output["advantages"],
        "logged": list(trainer._logs["advantages"]),
        "steps_per_completion": trainer._metrics["train"]["process/steps_per_completion"],
    }
    torch.save(result, f"{output_dir}/rank{rank}.pt")
    trainer.train()
    torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), f"{output_dir}/weights{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
