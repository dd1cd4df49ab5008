"""Peak memory of policy steps: iterative GRPO against stock TRL GRPO with the same reward model.

    python benchmarks/iterative_memory.py

Each variant runs in a process of its own on the CPU, with a policy and an outcome reward model of the same size.
Reported are the bytes of all live tensors at each policy step (largest) and the largest resident set size from the
first step on.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

VARIANTS = ("stock TRL", "iterative, policy phase", "iterative, one process")


def make_models(directory: Path, hidden: int, layers: int) -> tuple[str, str]:
    """Writes an untrained policy and an outcome reward model of the same body; returns their paths."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from trl_grpo_plus.demo import load_demo_tokenizer

    tokenizer = load_demo_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        num_labels=1,
    )
    for name, kind in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        kind(config).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    return str(directory / "policy"), str(directory / "reward")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def tensor_bytes() -> int:
    """Bytes of the storages of all live tensors, each once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def run(variant: str, policy: str, reward: str, directory: str) -> dict[str, float]:
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from trl_grpo_plus import IterativeGRPOConfig, IterativeGRPOTrainer
    from trl_grpo_plus.demo import make_problems
    from trl_grpo_plus.reward_models import OutcomeRewardModel

    torch.set_num_threads(1)
    live: list[int] = []
    largest = [0]

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            live.append(tensor_bytes())

        def on_step_end(self, *args, **kwargs):
            live.append(tensor_bytes())

    reward_model = OutcomeRewardModel.from_pretrained(reward, dtype=torch.float32)
    shared = {
        "output_dir": directory,
        "beta": 0.04,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
    }
    data = make_problems(32, seed=0)
    if variant == "stock TRL":
        trainer = GRPOTrainer(policy, reward_model, GRPOConfig(max_steps=4, **shared), data, callbacks=[Look()])
    else:
        trainer = IterativeGRPOTrainer(
            policy,
            reward_model,
            IterativeGRPOConfig(
                outer_iterations=2, steps_per_iteration=2, reward_model_batch_size=8, heldout_fraction=0.0, **shared
            ),
            data,
            grader=lambda prompts, completions, **columns: [float(i % 2) for i in range(len(completions))],
            callbacks=[Look()],
            phase="policy" if "phase" in variant else "all",
        )
    trainer.remove_callback(PrinterCallback)

    def watch():
        while True:
            largest[0] = max(largest[0], resident_bytes())
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    trainer.train()
    return {"tensors": max(live) / 2**20, "resident": largest[0] / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run(*args.run)))
        return
    with tempfile.TemporaryDirectory() as name:
        policy, reward = make_models(Path(name), args.hidden, args.layers)
        size = Path(reward, "model.safetensors").stat().st_size / 2**20
        print(f"reward model: {size:.0f} MiB of weights, {2 * size:.0f} MiB of Adam moments")
        baseline = None
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--run", variant, policy, reward, str(Path(name) / "out" / variant)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peak = json.loads(done.stdout.splitlines()[-1])
            baseline = baseline or peak
            print(
                f"{variant:26} tensors in policy steps {peak['tensors']:6.0f} MiB "
                f"({peak['tensors'] / baseline['tensors']:.2f}x)"
                f"   resident, whole run {peak['resident']:6.0f} MiB ({peak['resident'] / baseline['resident']:.2f}x)"
            )


if __name__ == "__main__":
    main()
