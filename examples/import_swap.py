"""A stock TRL GRPO script with the two lines that change: one import, one argument.

python examples/import_swap.py
"""

from datasets import load_dataset

from reward_fns import gsm8k_reward, step_arithmetic_reward
from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer  # changed; was: from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("openai/gsm8k", "main", split="train")
dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})

trainer = GRPOPlusTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    args=GRPOPlusConfig(output_dir="runs/import-swap", num_generations=8, max_completion_length=512),
    reward_funcs=gsm8k_reward,
    process_reward_funcs=step_arithmetic_reward,  # new: each token gets the advantage of its own and the later steps
    train_dataset=dataset,
)
trainer.train()
