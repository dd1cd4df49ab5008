"""`trl-grpo-plus label`: step labels by roll-outs from a policy, without humans."""

import sys
from pathlib import Path

from trl_grpo_plus.reward_models._cli import Parser, UsageError, load_rows, one_line, positive

PROG = "trl-grpo-plus label"


def main(argv: list[str]) -> int:
    """Runs the command; returns 0, or 2 for a user's mistake (one line on stderr)."""
    try:
        return _run(_parse(argv))
    except UsageError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2


def _parse(argv: list[str]):
    parser = Parser(
        prog=PROG,
        description="Labels the steps of completions: from each step's end the policy rolls out, and the grader tells "
        "whether it still reaches the right answer. A killed job goes on when it is started again.",
    )
    parser.add_argument("--model", required=True, help="the policy that rolls out: directory or hub id")
    parser.add_argument(
        "--dataset",
        required=True,
        help="file, save_to_disk directory or hub id with `prompt`, the gold answer, and `completion`, "
        "`completion_ids` or `completions`; without completions give --samples",
    )
    parser.add_argument("--config", help="configuration of a hub data set")
    parser.add_argument("--split", default="train", help="split of a hub data set (default: %(default)s)")
    parser.add_argument("--limit", type=positive, help="only the first so many rows")
    parser.add_argument("--answer-column", default="answer", help="column of the gold answer (default: %(default)s)")
    parser.add_argument("--samples", type=positive, help="sample so many completions of each prompt first")
    parser.add_argument("--output", type=Path, required=True, help="the .parquet file to write")
    parser.add_argument(
        "--label",
        choices=("hard", "soft"),
        default="hard",
        help="hard: any roll-out is right; soft: the share (default: %(default)s)",
    )
    parser.add_argument("--rollouts", type=positive, default=8, help="most roll-outs of a step (default: %(default)s)")
    parser.add_argument(
        "--delimiter",
        default="newline",
        help="what ends a step: newline, paragraph or a regular expression (default: %(default)s)",
    )
    parser.add_argument("--max-new-tokens", type=positive, default=512, help="of a roll-out (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="(default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="0: off (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=positive, default=64, help="sequences in one forward pass (default: %(default)s)"
    )
    parser.add_argument(
        "--rows-per-chunk", type=positive, default=16, help="rows labelled together (default: %(default)s)"
    )
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM")
    args = parser.parse_args(argv)
    if args.output.suffix != ".parquet":
        raise UsageError(f"--output must be a .parquet file, got {args.output}")
    return args


def _run(args) -> int:
    from rich.console import Console
    from transformers import AutoTokenizer

    from trl_grpo_plus.reward_models.labelling import as_completer, label_steps_by_rollout, sample_completions

    console = Console()
    rows = load_rows(args.dataset, args.split, args.config, args.limit)
    sampling = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.seed,
        "batch_size": args.batch_size,
    }
    has_completions = {"completion", "completion_ids", "completions"} & set(rows.column_names)
    if not has_completions and args.samples is None:
        raise UsageError(f"{args.dataset} has no completions but {rows.column_names}; sample some with --samples 4")
    if has_completions and args.samples is not None:
        raise UsageError(f"{args.dataset} has completions already; leave --samples out")
    try:
        with console.status("loading the model"):
            policy = _vllm(args.model) if args.vllm else args.model
            tokenizer = None if args.vllm else AutoTokenizer.from_pretrained(args.model)
            completer = as_completer(policy, tokenizer, args.batch_size)
        if args.samples is not None:
            rows = sample_completions(rows, completer, num_samples=args.samples, **sampling)
        labelled = label_steps_by_rollout(
            rows,
            completer,
            num_rollouts=args.rollouts,
            label=args.label,
            answer_column=args.answer_column,
            delimiter=args.delimiter,
            rows_per_chunk=args.rows_per_chunk,
            output=args.output,
            **sampling,
        )
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(one_line(error)) from error
    labels = [float(label) for row in labelled["labels"] for label in row]
    rollouts = sum(map(sum, labelled["rollouts_total"]))
    console.print(
        f"{len(labels)} steps of {len(labelled)} completions, {100 * sum(labels) / len(labels):.1f} % right, "
        f"{rollouts} roll-outs."
    )
    console.print(f"Labels: {args.output}", soft_wrap=True, markup=False)
    console.print(f"Next: trl-grpo-plus train-prm CONFIG.yaml --dataset {args.output}", soft_wrap=True, markup=False)
    return 0


def _vllm(path: str):
    from vllm import LLM

    return LLM(model=path, enable_prefix_caching=True)
