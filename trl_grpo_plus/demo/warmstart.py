"""Makes the demo policy's warm-start weights: supervised training on traces that slip.

    python -m trl_grpo_plus.demo.warmstart --output-dir weights

In each trace every step slips with probability 0.2: its result is off by 1 or 2, and the later steps go on from the
wrong value. The policy learns this distribution, so its greedy answer is nearly always right and a sampled one about
half of the time: reinforcement learning has a mode to unlearn, as in a real model that knows better than it samples.
"""

import argparse
import random
from pathlib import Path

import torch
from rich.progress import track
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from trl_grpo_plus.demo.policy import build_policy, build_tokenizer
from trl_grpo_plus.demo.problems import Problem, sample_problem, tell, write_solution

SLIP_PROBABILITY = 0.2
SLIPS = (-2, -1, 1, 2)


def slip_values(problem: Problem, rng: random.Random, probability: float = SLIP_PROBABILITY) -> list[int]:
    """The results of a solver that slips: each step is off by 1 or 2 with `probability` and goes on from there."""
    values, value = [], problem.start
    for change in problem.changes:
        value += change
        if rng.random() < probability:
            value += rng.choice(SLIPS)
        values.append(value)
    return values


def make_batch(
    tokenizer: PreTrainedTokenizerFast, batch_size: int, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws traces of train problems: `input_ids`, `attention_mask` and `labels` (-100 on the prompt), each (B, T)."""
    prompts, texts = [], []
    for _ in range(batch_size):
        problem = sample_problem(rng)
        values = slip_values(problem, rng)
        prompts.append(tell(problem, rng))
        texts.append(prompts[-1] + write_solution(problem.solution_steps(values), values[-1]) + tokenizer.eos_token)
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, prompt in zip(labels, prompts, strict=True):
        row[: len(tokenizer(prompt)["input_ids"])] = -100
    return batch["input_ids"], batch["attention_mask"], labels


def train(
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    num_steps: int = 1200,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> float:
    """Trains in place with AdamW and a one-cycle rate; returns the mean loss of the last 50 steps in nats a token."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=learning_rate, total_steps=num_steps)
    losses = []
    policy.train()
    for _ in track(range(num_steps), description="warm start"):
        input_ids, attention_mask, labels = make_batch(tokenizer, batch_size, rng)
        logits = policy(input_ids=input_ids, attention_mask=attention_mask).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    policy.eval()
    return sum(losses[-50:]) / len(losses[-50:])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trl_grpo_plus.demo.warmstart", description=__doc__.split("\n")[0])
    parser.add_argument("--output-dir", type=Path, required=True, help="where to write weights, config and tokenizer")
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and the traces (default: %(default)s)"
    )
    args = parser.parse_args(argv)

    tokenizer = build_tokenizer()
    policy = build_policy(tokenizer, args.seed)
    loss = train(policy, tokenizer, args.steps, seed=args.seed)
    policy.to(torch.bfloat16).save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"loss {loss:.4f} nats a token; wrote {args.output_dir}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
