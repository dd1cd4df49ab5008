"""
Step time and peak memory of every KL placement against TRL's own loss-side KL: `python benchmarks/kl.py`.

One step is what TRL does for a micro-batch: the reference's pass, the loss, its backward pass and the optimizer step.
The completions are given, so generation, which is the same for all, does not hide the difference. Times are of steps
of all placements in turn in one process; the ratio is the median over the rounds of step time over TRL's in the same
round. Peak memory is the peak resident size of a process that runs only that placement.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer

TRL = "TRL's loss-side KL"
PLACEMENTS = {
    TRL: {},
    "loss, k2 stopped": {"kl_placement": "loss", "kl_estimator": "k2", "kl_importance": "stopped"},
    "reward, old": {"kl_placement": "reward", "kl_coefficient": "old"},
    "reward, per_decision": {"kl_placement": "reward", "kl_importance": "per_decision"},
    "full_vocab": {"kl_placement": "full_vocab", "kl_importance": "per_decision"},
    "full_vocab, top-64": {"kl_placement": "full_vocab", "kl_importance": "per_decision", "kl_top_k": 64},
}
LIMITS = {"reward, old": (1.02, None), "reward, per_decision": (1.02, None), "full_vocab": (1.6, 1.1)}


def save_model(directory: str, args) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "prompt": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(directory)


def make_trainer(directory: str, name: str, args):
    generator = torch.Generator().manual_seed(0)

    def rollout(prompts, trainer):
        ids = torch.randint(3, args.vocab, (len(prompts), args.tokens), generator=generator).tolist()
        return {"prompt_ids": [[3]] * len(prompts), "completion_ids": ids, "logprobs": None}

    trainer_class, config_class = (GRPOTrainer, GRPOConfig) if name == TRL else (GRPOPlusTrainer, GRPOPlusConfig)
    config = config_class(
        output_dir=f"{directory}/out",
        bf16=False,
        use_cpu=True,
        report_to=[],
        beta=0.04,
        per_device_train_batch_size=args.batch,
        num_generations=args.batch,
        max_completion_length=args.tokens,
        save_strategy="no",
        disable_tqdm=True,
        # Without Adam's moments the model weighs less, so the memory ratio is the harder one.
        optim="sgd",
        **PLACEMENTS[name],
    )
    trainer = trainer_class(
        directory,
        reward_funcs=lambda completions, **kwargs: [float(i) for i in range(len(completions))],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["prompt"] * args.batch}),
        rollout_func=rollout,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    return trainer


def step(trainer, args) -> float:
    rows = [{"prompt": "prompt"}] * args.batch
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    start = clock()
    trainer.training_step(trainer.model, rows, None)
    trainer.optimizer.step()
    trainer.model.zero_grad()
    return clock() - start


def measure_memory(directory: str, name: str, args) -> None:
    trainer = make_trainer(directory, name, args)
    for _ in range(2):
        step(trainer, args)
    # Not `ru_maxrss`: a child process inherits the peak of the one that started it.
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"peak_mb": int(kilobytes) / 1024}))


def peak_memory(directory: str, name: str, argv: list[str]) -> float:
    command = [sys.executable, __file__, *argv, "--memory-of", name, "--directory", directory]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["peak_mb"]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="steps of each placement")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, for a machine that is busy"
    )
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.memory_of:
        measure_memory(args.directory, args.memory_of, args)
        return 0

    console = Console(width=110)
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory, args)
        trainers = {name: make_trainer(directory, name, args) for name in PLACEMENTS}
        times = {name: [] for name in PLACEMENTS}
        for round_number in track(range(args.rounds + 1), "steps", console=Console(stderr=True)):
            # In a different order each round, so that no placement always comes after the same one.
            names = list(PLACEMENTS)
            names = names[round_number % len(names) :] + names[: round_number % len(names)]
            for name in names:
                elapsed = step(trainers[name], args)
                if round_number:
                    times[name].append(elapsed)
        trainers.clear()
        memory = {
            name: peak_memory(directory, name, argv)
            for name in track(PLACEMENTS, "memory", console=Console(stderr=True))
        }

    table = Table("placement", f"step s ({args.clock})", "ratio", "quartiles", "peak MB", "ratio ", "limits")
    failed = False
    for name in PLACEMENTS:
        ratios = [a / b for a, b in zip(times[name], times[TRL], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        memory_ratio = memory[name] / memory[TRL]
        limits = LIMITS.get(name, (None, None))
        for value, limit in zip((ratio, memory_ratio), limits, strict=True):
            failed |= limit is not None and value > limit
        table.add_row(
            name,
            f"{statistics.median(times[name]):.3f}",
            f"{ratio:.3f}",
            f"{low:.3f} - {high:.3f}",
            f"{memory[name]:.0f}",
            f"{memory_ratio:.3f}",
            ", ".join(f"{limit:g}" for limit in limits if limit),
        )
    console.print(table)
    console.print(
        f"{args.batch} completions of {args.tokens} tokens, vocabulary {args.vocab}, {args.layers} layers of "
        f"{args.hidden}, {torch.get_num_threads()} threads, {args.rounds} rounds"
    )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
