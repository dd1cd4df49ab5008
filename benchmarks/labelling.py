"""What a step label costs: forward tokens and seconds, against the loop that one would write with `generate`.

    python benchmarks/labelling.py
    python benchmarks/labelling.py --model PATH --data ROWS.jsonl --rows 20

Peers, on the same completions, with the same number of roll-outs, in one run:

- `loop`: for each step and roll-out, `model.generate` on the prefix;
- `generate xN`: for each step, `model.generate(num_return_sequences=N)`.

A forward token is one position of an input of the embedding layer, padding included. The last step of a completion is
judged by its own answer in all of them.
"""

import argparse
import time

import torch
from datasets import Dataset, load_dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from reward_fns import grade_batch
from trl_grpo_plus.demo import load_demo_policy, load_demo_tokenizer, make_problems
from trl_grpo_plus.reward_models import label_steps_by_rollout, sample_completions
from trl_grpo_plus.reward_models.labelling import _read_rows


def by_generate(rows, model, tokenizer, num_rollouts: int, max_new_tokens: int, at_once: bool) -> int:
    """Labels with `generate`; returns the number of labels."""
    labels = 0
    returned = num_rollouts if at_once else 1
    for row in rows:
        texts = []
        for end in row.ends[:-1]:
            prefix = torch.tensor([row.prompt_ids + row.completion_ids[: end + 1]])
            for _ in range(num_rollouts // returned):
                output = model.generate(
                    prefix,
                    attention_mask=torch.ones_like(prefix),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    max_new_tokens=max_new_tokens,
                    num_return_sequences=returned,
                    pad_token_id=tokenizer.pad_token_id,
                )
                texts += tokenizer.batch_decode(output[:, len(row.prompt_ids) :], skip_special_tokens=True)
        grade_batch([row.gold] * len(texts), texts)
        labels += len(row.ends)
    return labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="directory or hub id (default: the demo policy)")
    parser.add_argument("--data", help=".jsonl with prompt, answer and completion (default: the demo's problems)")
    parser.add_argument("--rows", type=int, default=40, help="completions to label (default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=8, help="per step (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=256, help="of label_steps_by_rollout (default: %(default)s)")
    parser.add_argument("--skip-loop", action="store_true", help="leave the slowest peer out")
    args = parser.parse_args()

    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    else:
        tokenizer, model = load_demo_tokenizer(), load_demo_policy().eval()
    if args.data:
        data = load_dataset("json", data_files=args.data, split="train").select(range(args.rows))
    else:
        problems = make_problems(args.rows, 0)
        data = sample_completions(problems, model, tokenizer, num_samples=1, max_new_tokens=32, progress=False)
    rows = _read_rows(Dataset.from_list(data.to_list()), tokenizer, "answer", "newline", "\n")

    tokens = [0]
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: tokens.__setitem__(0, tokens[0] + inputs[0].numel())
    )

    def ours(label):
        options = {"max_new_tokens": args.max_new_tokens, "temperature": 1.0, "batch_size": args.batch_size}
        found = label_steps_by_rollout(
            data,
            model,
            tokenizer,
            num_rollouts=args.rollouts,
            label=label,
            rows_per_chunk=64,
            progress=False,
            **options,
        )
        return sum(map(len, found["labels"]))

    def peer(at_once):
        return by_generate(rows, model, tokenizer, args.rollouts, args.max_new_tokens, at_once)

    methods = {
        "loop": lambda: peer(False),
        f"generate x{args.rollouts}": lambda: peer(True),
        "label_steps_by_rollout, soft": lambda: ours("soft"),
        "label_steps_by_rollout, hard (early stop)": lambda: ours("hard"),
    }
    if args.skip_loop:
        del methods["loop"]
    table = Table(title=f"{len(rows)} completions, {args.rollouts} roll-outs, {torch.get_num_threads()} threads")
    for column in ("method", "labels", "forward tokens / label", "ratio", "ms / label", "ratio"):
        table.add_column(column, justify="left" if column == "method" else "right")
    base = None
    for name, method in methods.items():
        tokens[0], start = 0, time.perf_counter()
        labels = method()
        seconds = time.perf_counter() - start
        cost = (tokens[0] / labels, 1000 * seconds / labels)
        base = base or cost
        ratios = [f"{first / own:.1f}x" for first, own in zip(base, cost, strict=True)]
        table.add_row(name, str(labels), f"{cost[0]:.1f}", ratios[0], f"{cost[1]:.1f}", ratios[1])
    Console().print(table)


if __name__ == "__main__":
    main()
