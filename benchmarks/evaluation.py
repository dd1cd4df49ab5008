"""Speed and verdicts of the evaluation against lm-evaluation-harness's `hf` backend, on the same problems and prompts.

Both run GSM8K's 5-shot prompt greedily on one model in float32, one after the other or at the same time (`--together`,
which lets other load on the machine hit both alike), with the same batch size, stop strings and longest completion.
lm-evaluation-harness runs its own `gsm8k` task, with the data read from local files and the first five training rows
as exemplars; this package runs the `gsm8k-5shot` prompt and the `gsm8k_strict` grader. Printed are wall and processor
time of the sampling alone, completion tokens a second, their ratio, and the problems whose strict verdicts differ.

`--engines` needs neither lm-eval nor a model: it compares the sampler with transformers' continuous batching
(`generate_batch`) and with plain batches of `generate` on the demo policy, in processor time, best of three rounds.

    python benchmarks/evaluation.py --engines
    pip install lm-eval
    python benchmarks/evaluation.py --model HuggingFaceTB/SmolLM2-135M-Instruct --train train.jsonl --test test.jsonl
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", action="store_true", help="compare engines on the demo policy instead")
    parser.add_argument("--model", help="model directory or hub id")
    parser.add_argument("--train", help="GSM8K's train.jsonl: the exemplars")
    parser.add_argument("--test", help="GSM8K's test.jsonl")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="write both sides' completions and the figures to this JSON file")
    parser.add_argument("--together", action="store_true", help="both sides at once, in a process each")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engines:
        compare_engines(args)
        return
    if not (args.model and args.train and args.test):
        parser.error("give --model, --train and --test, or --engines")
    if args.side:
        print(json.dumps(SIDES[args.side](*load(args), args)))
        return
    if args.together:
        command = [sys.executable, *sys.argv, "--side"]
        running = {side: subprocess.Popen([*command, side], stdout=subprocess.PIPE, text=True) for side in SIDES}
        runs = {side: json.loads(process.communicate()[0].splitlines()[-1]) for side, process in running.items()}
    else:
        model, tokenizer = load(args)
        runs = {side: run(model, tokenizer, args) for side, run in SIDES.items()}
    ours, theirs = runs["ours"], runs["theirs"]
    report("this package", ours)
    report("lm-evaluation-harness", theirs)

    same_prompt = [ours["prompts"][i] == theirs["prompts"][i] for i in range(args.problems)]
    differ = [i for i in range(args.problems) if ours["correct"][i] != theirs["correct"][i]]
    same_text = sum(a.strip() == b.strip() for a, b in zip(ours["texts"], theirs["texts"], strict=True))
    print(f"prompts equal: {sum(same_prompt)} of {args.problems}")
    print(f"completions equal: {same_text} of {args.problems}")
    print(f"strict verdicts equal: {args.problems - len(differ)} of {args.problems}; they differ in {differ}")
    for clock in ("wall", "cpu"):
        ratio = (ours["tokens"] / ours[clock]) / (theirs["tokens"] / theirs[clock])
        print(f"tokens a second, {clock} time: {ratio:.2f} times lm-evaluation-harness")
    if args.output:
        Path(args.output).write_text(json.dumps({"arguments": vars(args), "ours": ours, "theirs": theirs}, indent=1))


def load(args):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(args.model)


def report(name: str, run: dict) -> None:
    print(
        f"{name}: {sum(run['correct'])} of {len(run['correct'])} correct, {run['tokens']} completion tokens, "
        f"{run['wall']:.1f} s wall, {run['cpu']:.1f} s processor, {run['tokens'] / run['wall']:.1f} tokens/s",
        flush=True,
    )
    if "stats" in run:
        print(f"  {run['stats']}", flush=True)


def compare_engines(args) -> None:
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    from trl_grpo_plus.demo.policy import load_demo_policy, load_demo_tokenizer
    from trl_grpo_plus.demo.problems import make_problems
    from trl_grpo_plus.evaluation.sampling import ContinuousSampler, SamplingParams, TokenRequest

    torch.set_num_threads(args.threads)
    tokenizer, model = load_demo_tokenizer(), load_demo_policy()
    prompts = [tokenizer(p)["input_ids"] for p in make_problems(256, seed=1, split="test")["prompt"]]
    eos = tokenizer.eos_token_id
    config = GenerationConfig(
        max_new_tokens=60, do_sample=False, eos_token_id=eos, pad_token_id=tokenizer.pad_token_id
    )

    def ours() -> list[int]:
        sampler = ContinuousSampler(model, tokenizer, SamplingParams(max_tokens=60), batch_size=args.batch_size)
        done = sampler.run([TokenRequest(str(i), 0, tuple(p)) for i, p in enumerate(prompts)])
        return [g.num_tokens for g in sorted(done, key=lambda g: int(g.problem_id))]

    def continuous_batching() -> list[int]:
        paged = ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=512)
        out = model.generate_batch(prompts, generation_config=config, continuous_batching_config=paged)
        return [len(v.generated_tokens) for _, v in sorted(out.items(), key=lambda kv: int(kv[0].split("_")[-1]))]

    def generate() -> list[int]:
        lengths = {}
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        for start in range(0, len(order), args.batch_size):
            part = order[start : start + args.batch_size]
            inputs = tokenizer.pad({"input_ids": [prompts[i] for i in part]}, return_tensors="pt")
            out = model.generate(**inputs, generation_config=config)[:, inputs["input_ids"].shape[1] :].tolist()
            lengths |= {i: (row.index(eos) + 1 if eos in row else len(row)) for i, row in zip(part, out, strict=True)}
        return [lengths[i] for i in range(len(prompts))]

    engines = {"this package": ours, "generate_batch": continuous_batching, "generate, batches by length": generate}
    best: dict[str, float] = {}
    lengths = {}
    for _ in range(3):
        for name, run in engines.items():
            cpu = time.process_time()
            lengths[name] = run()
            best[name] = min(best.get(name, float("inf")), time.process_time() - cpu)
    for name, seconds in best.items():
        tokens = sum(lengths[name])
        same = sum(a == b for a, b in zip(lengths[name], lengths["this package"], strict=True))
        ratio = seconds / best["this package"]
        print(
            f"{name}: {tokens / seconds:.0f} tokens a second of processor time, {ratio:.2f} times the time of this "
            f"package, {same} of {len(prompts)} completions as long"
        )


def run_ours(model, tokenizer, args) -> dict:
    from reward_fns import GradePolicy, grade_batch
    from trl_grpo_plus.evaluation.backends import SampleRequest, TransformersBackend
    from trl_grpo_plus.evaluation.datasets import load_problems
    from trl_grpo_plus.evaluation.prompts import load_template
    from trl_grpo_plus.evaluation.sampling import SamplingParams

    problems = load_problems(args.test, limit=args.problems).problems
    template = load_template("gsm8k-5shot", kind="gsm8k", has_chat_template=False, fewshot_file=args.train)
    backend = TransformersBackend(model=model, tokenizer=tokenizer, batch_size=args.batch_size)
    requests = [SampleRequest(p.id, 0, template.render(p.question)) for p in problems]
    params = SamplingParams(max_tokens=args.max_tokens, stop=template.stop)
    wall, cpu = time.perf_counter(), time.process_time()
    done = {g.problem_id: g for g in backend.sample(requests, params)}
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    texts = [done[p.id].text for p in problems]
    grades = grade_batch([p.gold for p in problems], texts, GradePolicy(mode="gsm8k_strict"))
    return {
        "prompts": [r.prompt.text for r in requests],
        "texts": texts,
        "correct": [g.correct for g in grades],
        "tokens": count_tokens(tokenizer, texts),
        "wall": wall,
        "cpu": cpu,
        "stats": backend.stats,
    }


def run_harness(model, tokenizer, args) -> dict:
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    class TimedHFLM(HFLM):
        """Times the sampling alone."""

        def generate_until(self, requests, disable_tqdm=False):
            wall, cpu = time.perf_counter(), time.process_time()
            out = super().generate_until(requests, disable_tqdm=True)
            self.wall, self.cpu = time.perf_counter() - wall, time.process_time() - cpu
            return out

    task = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml").read_text())
    task.pop("dataset_name")
    task |= {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"train": args.train, "test": args.test}},
        "fewshot_config": {"sampler": "first_n"},
    }
    task["generation_kwargs"]["max_gen_toks"] = args.max_tokens
    harness = TimedHFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.batch_size, device="cpu")
    results = lm_eval.simple_evaluate(
        model=harness, tasks=[task], limit=args.problems, log_samples=True, bootstrap_iters=0
    )
    strict = [s for s in results["samples"]["gsm8k"] if s["filter"] == "strict-match"]
    strict.sort(key=lambda s: s["doc_id"])
    texts = [s["resps"][0][0] for s in strict]
    return {
        "prompts": [_first_argument(s) for s in strict],
        "texts": texts,
        "correct": [bool(s["exact_match"]) for s in strict],
        "tokens": count_tokens(tokenizer, texts),
        "wall": harness.wall,
        "cpu": harness.cpu,
    }


def _first_argument(sample: dict) -> str:
    arguments = sample["arguments"]
    return arguments["gen_args_0"]["arg_0"] if isinstance(arguments, dict) else arguments[0][0]


def count_tokens(tokenizer, texts: list[str]) -> int:
    """Tokens of the completions that were kept, counted in the same way for both."""
    return sum(len(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts)


SIDES = {"ours": run_ours, "theirs": run_harness}

if __name__ == "__main__":
    main()
