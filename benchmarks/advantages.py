"""Times step splitting and process advantages as ratios of one `batch_decode` of the same ids.

    python benchmarks/advantages.py
    python benchmarks/advantages.py --tokenizer path/or/hub-id            # any tokenizer
    python benchmarks/advantages.py --tokenizer DIR --gguf-file F.gguf    # one that is stored in a GGUF file

Without `--tokenizer`, a byte-level BPE of about 30,000 pieces is trained on generated text. Every completion has
exactly the given number of tokens and ends each step with a newline. Peer and subject alternate in one process; the
ratio is that of the medians of their processor times.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from rich.table import Table

from trl_grpo_plus.algorithms.advantages import process_advantages
from trl_grpo_plus.algorithms.steps import split_steps_batch

GROUP_SIZE = 8
SPLIT_TARGET, ADVANTAGES_TARGET = 2.0, 0.2


def sentences(rng: random.Random, words: list[str], count: int) -> list[str]:
    """Lines in the manner of a worked solution: words, sums and their results."""
    lines = []
    for _ in range(count):
        a, b = rng.randint(2, 999), rng.randint(2, 999)
        text = " ".join(rng.choices(words, k=rng.randint(6, 14)))
        lines.append(f"{text.capitalize()} {a} + {b} = {a + b} {rng.choice(words)}.")
    return lines


def made_up_words(rng: random.Random, count: int) -> list[str]:
    syllables = [c + v + e for c in "bcdfghklmnprstvwz" for v in "aeiou" for e in ("", "n", "r", "s", "l")]
    return ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(count)]


def train_tokenizer(rng: random.Random, words: list[str], vocab_size: int = 30_000):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(sentences(rng, words, 20_000), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def make_batch(rng: random.Random, lines: list[list[int]], newline: list[int], B: int, T: int, steps: int):
    """B completions of exactly T token ids each, with `steps` newlines."""
    batch = []
    for _ in range(B):
        ids: list[int] = []
        for step in range(steps):
            length = T * (step + 1) // steps - len(ids) - len(newline)
            body: list[int] = []
            while len(body) < length:
                body += rng.choice(lines)
            ids += body[:length] + newline
        batch.append(ids)
    return batch


def medians(repeats: int, *functions: Callable[[], object]) -> list[float]:
    """Median seconds of each function; they take turns, after one warm-up each."""
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 1):
        for function, seconds in zip(functions, times, strict=True):
            start = time.process_time()
            function()
            if repeat:
                seconds.append(time.process_time() - start)
    return [statistics.median(seconds) for seconds in times]


def measure(tokenizer, batch: list[list[int]], T: int, repeats: int) -> list[float]:
    """Processor seconds of batch_decode, split and advantages."""
    ends = split_steps_batch(batch, tokenizer)
    rewards = [[float((i + j) % 3) / 2 for j in range(len(row))] for i, row in enumerate(ends)]
    return medians(
        repeats,
        lambda: tokenizer.batch_decode(batch, skip_special_tokens=True),
        lambda: split_steps_batch(batch, tokenizer),
        lambda: process_advantages(rewards, ends, GROUP_SIZE, T),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="path or hub id; default: a byte-level BPE trained here")
    parser.add_argument("--gguf-file", help="name of the GGUF file inside --tokenizer that holds it")
    parser.add_argument("--completions", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    console = Console()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    words = made_up_words(rng, 12_000)
    with console.status("Preparing the tokenizer and the batches"):
        if args.tokenizer:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, gguf_file=args.gguf_file)
            name = args.gguf_file or args.tokenizer
        else:
            tokenizer = train_tokenizer(rng, words)
            name = "byte-level BPE trained here"
        lines = [tokenizer.encode(line, add_special_tokens=False) for line in sentences(rng, words, 2000)]
        newline = tokenizer.encode("\n", add_special_tokens=False)
        B, T = args.completions, args.tokens
        sizes = {
            "the batch": (B, T),
            "half B": (B // 2, T),
            "twice B": (2 * B, T),
            "half T": (B, T // 2),
            "twice T": (B, 2 * T),
        }
        batches = {label: make_batch(rng, lines, newline, b, t, args.steps) for label, (b, t) in sizes.items()}
        start = time.process_time()
        split_steps_batch(batches["the batch"], tokenizer)
        cold = time.process_time() - start

    table = Table(title=f"{name}, {len(tokenizer):,} pieces", caption="growth: processor time / that of the batch")
    for column in ("", "B x T", "split / decode", "adv. / decode", "split growth", "adv. growth"):
        table.add_column(column, justify="left" if not column else "right")
    base: tuple[float, float] | None = None
    for label, (b, t) in sizes.items():
        with console.status(f"Timing {label}"):
            decode, split, advantages = measure(tokenizer, batches[label], t, args.repeats)
        base = base or (split, advantages)
        ratios = (split / decode, advantages / decode)
        if label == "the batch":
            result = ratios
        table.add_row(
            label,
            f"{b:,} x {t:,}",
            *(f"{ratio:.3f}" for ratio in ratios),
            f"{split / base[0]:.2f}",
            f"{advantages / base[1]:.2f}",
        )
    console.print(table)
    console.print(f"First split of a new tokenizer, which fills its table: {cold:.3f} s.")
    for label, ratio, target in (
        ("split_steps_batch", result[0], SPLIT_TARGET),
        ("process_advantages", result[1], ADVANTAGES_TARGET),
    ):
        verdict = "[green]met[/green]" if ratio <= target else "[red]missed[/red]"
        console.print(f"{label} / batch_decode = {ratio:.3f} (target at most {target}): {verdict}")


if __name__ == "__main__":
    main()
