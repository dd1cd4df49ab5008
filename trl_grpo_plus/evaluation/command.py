"""`trl-grpo-plus eval`: samples, grades and reports on GSM8K, MATH or your own problems."""

from __future__ import annotations

import argparse
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GRADERS_HELP = (
    "auto, math, gsm8k, or an official mode by name: gsm8k_strict, gsm8k_flexible, hendrycks_math, minerva_math, "
    "deepseek_math, qwen25_math"
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-grpo-plus eval",
        description="Evaluate models on GSM8K, MATH or your own problems: pass@1, maj@k, pass@k with intervals.",
    )
    what = parser.add_argument_group("what to evaluate")
    what.add_argument(
        "--model",
        nargs="+",
        default=[],
        metavar="PATH_OR_ID",
        help="model, PEFT adapter, checkpoint or run directory; several make one table",
    )
    what.add_argument("--dataset", help="gsm8k, math, math500, a .jsonl/.json/.csv/.parquet file, or a hub id")
    what.add_argument("--dataset-config", help="configuration of a hub data set")
    what.add_argument("--split", help="split of a hub data set (default: test)")
    what.add_argument("--question-column", help="where it is not question, problem, prompt or input")
    what.add_argument("--gold-column", help="where it is not answer, gold, solution, target or ground_truth")
    what.add_argument("--limit", type=int, help="take the first so many problems")
    what.add_argument("--samples-file", help="score completions at hand instead of sampling")
    what.add_argument(
        "--keep-verdicts",
        action="store_true",
        help="with --samples-file: take the file's verdicts and answers as they are",
    )
    sample = parser.add_argument_group("sampling")
    sample.add_argument("--samples", type=int, default=1, metavar="K", help="samples a problem (default 1, greedy)")
    sample.add_argument("--temperature", type=float, help="default 0 for one sample, 0.7 for more")
    sample.add_argument("--top-p", type=float, default=1.0)
    sample.add_argument("--top-k", type=int, default=0)
    sample.add_argument("--max-tokens", type=int, default=1024, help="longest completion (default 1024)")
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--no-greedy", action="store_true", help="no greedy completion beside the samples")
    sample.add_argument(
        "--prompt",
        default="auto",
        help="auto, chat, deepseekmath, gsm8k-5shot, gsm8k-8shot, math-4shot, plain, or a template file",
    )
    sample.add_argument("--fewshot-file", help="exemplars of gsm8k-5shot, where the hub cannot be reached")
    sample.add_argument("--stop", nargs="+", default=[], help="strings that end a completion (default: the prompt's)")
    run = parser.add_argument_group("backend")
    run.add_argument("--backend", choices=("transformers", "vllm", "server"), default="transformers")
    run.add_argument("--batch-size", type=int, default=32, help="transformers: rows that decode together (default 32)")
    run.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    run.add_argument("--device", help="transformers: cpu, cuda, ... (default: a GPU where there is one)")
    run.add_argument("--server-url", help="server: base address, such as http://localhost:8000/v1")
    run.add_argument("--api-key-env", default="OPENAI_API_KEY", help="server: environment variable with the key")
    run.add_argument("--concurrency", type=int, default=16, help="server: requests under way at once (default 16)")
    run.add_argument("--attempts", type=int, default=5, help="server: tries of one request (default 5)")
    run.add_argument("--timeout", type=float, default=600.0, help="server: seconds for one answer (default 600)")
    run.add_argument(
        "--vllm-option", nargs="+", default=[], metavar="KEY=VALUE", help="vllm: further arguments of vllm.LLM"
    )
    score = parser.add_argument_group("scoring")
    score.add_argument("--grader", default="auto", metavar="MODE", help=GRADERS_HELP)
    score.add_argument("--k", type=int, nargs="+", help="sizes of votes and pass@k (default 1, 2, 4, ... samples)")
    score.add_argument(
        "--prm",
        metavar="PATH",
        help="process reward model, or a function's dotted path: scores the steps, ranks the samples",
    )
    score.add_argument(
        "--orm", metavar="PATH", help="outcome reward model, or a function's dotted path: ranks the samples"
    )
    score.add_argument("--step-aggregation", choices=("min", "last", "mean", "product"), default="min")
    score.add_argument(
        "--score-transform",
        choices=("auto", "sigmoid", "none", "exp"),
        default="auto",
        help="reward-model score to vote weight (auto: as it is where all are in [0, 1], else sigmoid)",
    )
    score.add_argument("--confidence", type=float, default=0.95)
    out = parser.add_argument_group("output")
    out.add_argument(
        "--output", default="eval_results", help="directory (default eval_results); a killed evaluation goes on there"
    )
    out.add_argument("--overwrite", action="store_true", help="delete the samples that are there first")
    out.add_argument("--no-plots", action="store_true")
    out.add_argument("--no-page", action="store_true", help="no HTML page")
    out.add_argument("--page-problems", type=int, default=2000, help="problems on the HTML page (default 2000)")
    out.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; 0 done, 1 some samples failed, 2 wrong usage."""
    args = build_parser().parse_args(argv)
    from trl_grpo_plus.evaluation.backends import BackendError
    from trl_grpo_plus.evaluation.datasets import DatasetError
    from trl_grpo_plus.evaluation.evaluate import SettingsMismatch
    from trl_grpo_plus.evaluation.prompts import PromptError

    try:
        return _run(args)
    except (DatasetError, PromptError, SettingsMismatch, ValueError, ImportError) as error:
        print(f"trl-grpo-plus eval: {error}", file=sys.stderr)
        return 2
    except BackendError as error:
        print(f"trl-grpo-plus eval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped; run the same command again to go on from {args.output}", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    from reward_fns import GradePolicy
    from trl_grpo_plus.evaluation.evaluate import by_dotted_path

    policy = GradePolicy(mode=args.grader)
    if bool(args.model) == bool(args.samples_file):
        raise ValueError("give either --model or --samples-file")
    if args.keep_verdicts and not args.samples_file:
        raise ValueError("--keep-verdicts belongs to --samples-file")
    if not 0 < args.confidence < 1:
        raise ValueError(f"--confidence must be between 0 and 1, got {args.confidence}")
    if args.model and not args.dataset:
        raise ValueError("give --dataset: gsm8k, math, math500, a file or a hub id")
    if args.k and args.model and max(args.k) > args.samples:
        raise ValueError(f"--k {max(args.k)} needs at least as many --samples, got {args.samples}")
    if not args.no_plots and find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib: pip install 'trl-grpo-plus[plots]', or give --no-plots")
    for path in (args.prm, args.orm):
        # A wrong path should not be found out after hours of sampling.
        if path:
            by_dotted_path(path)
    output = Path(args.output)
    with _Progress(not args.quiet) as progress:
        summarize = {
            "ks": sorted(set(args.k)) if args.k else None,
            "score_transform": args.score_transform,
            "step_aggregation": args.step_aggregation,
            "confidence": args.confidence,
            "seed": args.seed,
            "prm": args.prm,
            "orm": args.orm,
        }
        if args.samples_file:
            settings, records, summaries = _score_file(args, policy, summarize, progress)
        else:
            settings, records, summaries = _sample(args, policy, summarize, progress, output)
    return _report(args, output, settings, records, summaries)


def _problems(args: argparse.Namespace):
    from trl_grpo_plus.evaluation.datasets import load_problems

    return load_problems(
        args.dataset,
        split=args.split,
        config=args.dataset_config,
        limit=args.limit,
        question_column=args.question_column,
        gold_column=args.gold_column,
    )


def _score_file(args, policy, options: dict[str, Any], progress):
    from trl_grpo_plus.evaluation.evaluate import finish
    from trl_grpo_plus.evaluation.results import keep_file_verdicts, read_samples_file

    problems = _problems(args) if args.dataset else None
    by_model = read_samples_file(Path(args.samples_file), problems)
    summaries = {}
    for name, records in by_model.items():
        if args.keep_verdicts:
            keep_file_verdicts(records)
        summaries[name] = finish(records, policy, regrade=not args.keep_verdicts, progress=progress, **options)
    settings = {
        "dataset": problems.name if problems else Path(args.samples_file).name,
        "samples_file": args.samples_file,
        "grader": "the file's verdicts" if args.keep_verdicts else args.grader,
        **_scoring_settings(options),
    }
    return settings, by_model, summaries


def _sample(args, policy, options: dict[str, Any], progress, output: Path):
    from trl_grpo_plus.evaluation.evaluate import Plan, evaluate
    from trl_grpo_plus.evaluation.prompts import load_template
    from trl_grpo_plus.evaluation.results import params_dict, write_results
    from trl_grpo_plus.evaluation.sampling import SamplingParams

    problems = _problems(args)
    temperature = args.temperature if args.temperature is not None else (0.0 if args.samples == 1 else 0.7)
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        stop=tuple(args.stop),
        seed=args.seed,
    )
    plan = Plan(params, args.samples, greedy=not args.no_greedy)
    names = _model_names(args.model)
    records, summaries, used = {}, {}, {}
    settings: dict[str, Any] = {}
    for path, name in zip(args.model, names, strict=True):
        backend = _backend(args, path)
        template = load_template(
            args.prompt,
            kind=problems.kind,
            has_chat_template=backend.has_chat_template,
            fewshot_file=args.fewshot_file,
        )
        used[name] = template.name
        place = output if len(names) == 1 else output / _slug(name)
        if args.overwrite and place.exists():
            for file in ("samples.jsonl", "settings.json", "prompts.jsonl"):
                (place / file).unlink(missing_ok=True)
        progress.model = name if len(names) > 1 else ""
        records[name], summaries[name] = evaluate(
            backend, problems, template, plan, place, policy, model_name=name, progress=progress, **options
        )
        settings = {
            "dataset": problems.name,
            "problems": len(problems),
            "dataset_sha256": problems.fingerprint,
            "models": dict(zip(names, args.model, strict=True)),
            "backend": args.backend,
            "prompt": used,
            "samples": args.samples,
            "greedy": plan.greedy,
            **params_dict(params),
            "stop": list(params.stop or template.stop),
            "grader": args.grader,
            **_scoring_settings(options),
        }
        if len(names) > 1:
            write_results(place / "results.json", settings, {name: summaries[name]})
        del backend
    return settings, records, summaries


def _scoring_settings(options: dict[str, Any]) -> dict[str, Any]:
    keep = ("prm", "orm", "step_aggregation", "score_transform", "confidence", "seed")
    return {k: options[k] for k in keep if options[k] is not None}


def _backend(args: argparse.Namespace, path: str):
    from transformers.utils.logging import disable_progress_bar

    from trl_grpo_plus.evaluation import backends

    disable_progress_bar()
    if args.backend == "server":
        if not args.server_url:
            raise ValueError("--backend server needs --server-url, such as http://localhost:8000/v1")
        return backends.ServerBackend(
            path,
            args.server_url,
            api_key_env=args.api_key_env,
            concurrency=args.concurrency,
            attempts=args.attempts,
            timeout=args.timeout,
        )
    if args.backend == "vllm":
        pairs = [option.partition("=") for option in args.vllm_option]
        if any(not sep for _, sep, _ in pairs):
            raise ValueError("--vllm-option takes KEY=VALUE")
        options = {key: _literal(value) for key, _, value in pairs}
        return backends.VLLMBackend(path, dtype=args.dtype, seed=args.seed, **options)
    return backends.TransformersBackend(path, batch_size=args.batch_size, dtype=args.dtype, device=args.device)


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _model_names(paths: list[str]) -> list[str]:
    """Short names: the last part of the path, longer where two would be the same."""
    parts = [p.rstrip("/").split("/") for p in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError("the same model is given twice")


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def _report(args, output: Path, settings, records, summaries) -> int:
    from rich.console import Console

    from trl_grpo_plus.evaluation import report
    from trl_grpo_plus.evaluation.results import write_atomically, write_results

    results = write_results(output / "results.json", settings, summaries)
    if args.samples_file:
        lines = (json.dumps(r, ensure_ascii=False) + "\n" for rows in records.values() for r in rows)
        write_atomically(output / "samples.jsonl", "".join(lines))
    plots: list[str] = []
    if not args.no_plots:
        from trl_grpo_plus.evaluation.plots import write_plots

        plots = write_plots(summaries, records, output)
    page = None
    if not args.no_page:
        page = "samples.html"
        report.samples_page(output / page, results, records, args.page_problems)
    write_atomically(output / "report.md", report.markdown(results, plots, page))

    console = Console(soft_wrap=False)
    console.print(report.terminal_table(summaries, settings["dataset"]))
    for name, s in summaries.items():
        if "file_verdicts" in s and not args.keep_verdicts:
            f = s["file_verdicts"]
            console.print(f"{name}: the file's own verdicts agree on {f['agree']} of {f['of']} samples")
        for note in s["notes"]:
            console.print(f"{name}: {note}")
    failed = sum(s["failed"] for s in summaries.values())
    if failed:
        print(
            f"trl-grpo-plus eval: {failed} samples failed and are not counted; run the same command to try them again",
            file=sys.stderr,
        )
    shown = page or "report.md"
    print(f"Written to {output}. Next: open {output / shown}, or `trl-grpo-plus compare {output} OTHER_RESULTS`.")
    return 1 if failed else 0


class _Progress:
    """A rich progress bar with one line a stage, or nothing."""

    def __init__(self, shown: bool):
        self.model = ""
        self._bar = None
        self._tasks: dict[str, Any] = {}
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )

    def __enter__(self):
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_):
        if self._bar:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self._bar:
            return
        name = f"{self.model}: {stage}" if self.model else stage
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total)
        self._bar.update(self._tasks[name], completed=done, total=total)
