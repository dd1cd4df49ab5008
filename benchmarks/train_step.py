"""Step time of GRPOPlusTrainer with process rewards as a ratio of stock GRPOTrainer's, same model and batch.

    python benchmarks/train_step.py

Both trainers sample the same completions (same weights and seed, learning rate 0) and alternate in one process; a step
is sampling, rewards, loss, backward and optimizer, in CPU seconds of one thread. The ratio is the median over pairs.
"""

import argparse
import os
import statistics
import tempfile
import time

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from reward_fns import step_arithmetic_reward
from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer
from trl_grpo_plus.demo import load_demo_tokenizer, make_problems

TARGET = 1.03
PROBLEMS = make_problems(64, seed=0)


def distinct_characters(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


def step_lengths(prompts, completions, completion_ids, steps, **kwargs):
    return [[float(len(step)) for step in completion] for completion in steps]


def random_policy(tokenizer, hidden_size):
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def build(trainer_class, config_class, model_dir, tokenizer, options, **kwargs):
    args = config_class(
        output_dir=tempfile.mkdtemp(),
        bf16=False,
        use_cpu=True,
        report_to=[],
        learning_rate=0.0,
        per_device_train_batch_size=options.batch,
        num_generations=8,
        max_completion_length=options.tokens,
        gradient_checkpointing=False,
    )
    trainer = trainer_class(
        model_dir,
        reward_funcs=distinct_characters,
        args=args,
        train_dataset=PROBLEMS,
        processing_class=tokenizer,
        **kwargs,
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def seconds_of_step(trainer, seed, batch):
    set_seed(seed)
    start = time.process_time()
    inputs = trainer._generate_and_score_completions([dict(PROBLEMS[row // 8]) for row in range(batch)])
    trainer._compute_loss(trainer.model, inputs).backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return time.process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--hidden-size", type=int, default=192)
    options = parser.parse_args()

    tokenizer = load_demo_tokenizer()
    model_dir = tempfile.mkdtemp()
    random_policy(tokenizer, options.hidden_size).save_pretrained(model_dir)
    stock = build(GRPOTrainer, GRPOConfig, model_dir, tokenizer, options)
    subjects = {
        "process_reward_funcs off": build(GRPOPlusTrainer, GRPOPlusConfig, model_dir, tokenizer, options),
        "a trivial process reward": build(
            GRPOPlusTrainer, GRPOPlusConfig, model_dir, tokenizer, options, process_reward_funcs=step_lengths
        ),
        "step_arithmetic_reward": build(
            GRPOPlusTrainer, GRPOPlusConfig, model_dir, tokenizer, options, process_reward_funcs=step_arithmetic_reward
        ),
    }
    ratios = {name: [] for name in subjects}
    seconds_of_step(stock, 0, options.batch)
    for seed in track(range(options.pairs), "Steps", console=Console(stderr=True)):
        for name, subject in subjects.items():
            # The order within a pair alternates, so that a drift of the machine's speed cancels.
            pair = [(stock, "stock"), (subject, "plus")][:: 1 if seed % 2 else -1]
            times = {kind: seconds_of_step(trainer, seed, options.batch) for trainer, kind in pair}
            ratios[name].append(times["plus"] / times["stock"])

    table = Table(
        title=f"Step time, stock GRPOTrainer = 1 ({options.batch} x {options.tokens} tokens, {options.pairs} pairs)"
    )
    for column in ("GRPOPlusTrainer with", "median ratio", "quartiles", "target"):
        table.add_column(column, justify="left" if column.startswith("GRPO") else "right")
    for name, values in ratios.items():
        low, _, high = statistics.quantiles(values, n=4)
        table.add_row(name, f"{statistics.median(values):.3f}", f"{low:.3f} - {high:.3f}", f"<= {TARGET}")
    Console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
