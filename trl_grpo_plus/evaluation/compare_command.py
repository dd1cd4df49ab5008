"""`trl-grpo-plus compare`: paired comparison of results on the same problems."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

from trl_grpo_plus.evaluation import metrics
from trl_grpo_plus.evaluation.datasets import DatasetError
from trl_grpo_plus.evaluation.report import metric_label, metric_names, percent


def main(argv: list[str]) -> int:
    """Runs the command; 0 done, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="trl-grpo-plus compare",
        description="Compare models on the problems they share: difference, interval, paired test, changed problems.",
    )
    parser.add_argument(
        "results",
        nargs="+",
        metavar="RESULTS",
        help="output directory of eval, or its results.json; the first model is the baseline",
    )
    parser.add_argument("--metric", help="such as greedy, mean@8, maj@8 (default: every one that all models have)")
    parser.add_argument(
        "--all-pairs", action="store_true", help="every pair, not only the first model against the others"
    )
    parser.add_argument(
        "--show", type=int, default=10, metavar="N", help="changed problems to list on the terminal (default 10)"
    )
    parser.add_argument("--output", help="write the comparison with all changed problems to this file (.json or .md)")
    parser.add_argument("--confidence", type=float, default=0.95)
    args = parser.parse_args(argv)
    try:
        models = load_models(args.results)
        pairs = compare_models(models, metric=args.metric, all_pairs=args.all_pairs, confidence=args.confidence)
        if args.output:
            _write(Path(args.output), pairs)
    except (DatasetError, ValueError) as error:
        print(f"trl-grpo-plus compare: {error}", file=sys.stderr)
        return 2
    _print(pairs, args.show)
    if args.output:
        print(f"Written to {args.output}.")
    else:
        print("Next: --output FILE.md keeps the comparison with all changed problems.")
    return 0


def load_models(paths: list[str]) -> dict[str, dict[str, Any]]:
    """Summaries by model name, of result directories or files; equal names get their directory in front.

    Raises:
        DatasetError: a path has no results, or fewer than two models are there.
    """
    found: list[tuple[str, str, dict[str, Any]]] = []
    for given in paths:
        path = Path(given)
        path = path / "results.json" if path.is_dir() else path
        if not path.exists():
            raise DatasetError(f"{given} has no results.json; run `trl-grpo-plus eval` first")
        try:
            models = json.loads(path.read_text(encoding="utf-8"))["models"]
            for summary in models.values():
                summary["per_problem"], summary["metrics"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DatasetError(f"{path} is not a results.json of `trl-grpo-plus eval`") from error
        summaries = [(name, str(path.parent), s) for name, s in models.items()]
        found += summaries
    if len(found) < 2:
        raise DatasetError("a comparison needs at least two models")
    names = [name for name, _, _ in found]
    out: dict[str, dict[str, Any]] = {}
    for name, place, summary in found:
        label = name if names.count(name) == 1 else f"{place}: {name}"
        if label in out:
            raise DatasetError(f"{place} is given twice")
        out[label] = summary
    return out


def compare_models(
    models: dict[str, dict[str, Any]],
    *,
    metric: str | None = None,
    all_pairs: bool = False,
    confidence: float = 0.95,
) -> list[dict[str, Any]]:
    """Paired tests of each later model against the first, or of every pair.

    Returns:
        for each pair "a", "b", "problems", "tests" (metric -> `PairedTest` as dict, with both means) and "changed":
        the problems that changed side by the main metric (half of the samples right, or more), "gained" or "lost".

    Raises:
        DatasetError: no metric or no problem in common.
    """
    names = list(models)
    pairs = list(combinations(names, 2)) if all_pairs else [(names[0], other) for other in names[1:]]
    return [_compare(a, b, models[a], models[b], metric, confidence) for a, b in pairs]


def _compare(a: str, b: str, left: dict, right: dict, metric: str | None, confidence: float) -> dict[str, Any]:
    shared = [p for p in left["per_problem"] if p in right["per_problem"]]
    if not shared:
        raise DatasetError(f"{a} and {b} have no problem in common")
    common = [m for m in metric_names({a: left, b: right}) if m in left["metrics"] and m in right["metrics"]]
    if metric is not None:
        if metric not in common:
            raise DatasetError(f"{a} and {b} do not both have {metric!r}; they share {', '.join(common) or 'none'}")
        common = [metric]
    if not common:
        raise DatasetError(f"{a} and {b} have no metric in common; sample both with the same number of samples")
    tests = {}
    for name in common:
        both = [p for p in shared if name in left["per_problem"][p] and name in right["per_problem"][p]]
        if not both:
            continue
        x = [left["per_problem"][p][name] for p in both]
        y = [right["per_problem"][p][name] for p in both]
        test = metrics.paired_test(x, y, confidence)
        tests[name] = {"a": sum(x) / len(x), "b": sum(y) / len(y), **test.to_dict()}
    side = next((m for m in common if m.startswith("mean@") or m == "greedy"), common[0])
    changed: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for p in shared:
        before, after = left["per_problem"][p].get(side), right["per_problem"][p].get(side)
        if before is None or after is None or (before >= 0.5) == (after >= 0.5):
            continue
        changed["gained" if after > before else "lost"].append({"problem_id": p, "a": before, "b": after})
    for rows in changed.values():
        rows.sort(key=lambda r: -abs(r["b"] - r["a"]))
    return {
        "a": a,
        "b": b,
        "problems": len(shared),
        "only_a": len(left["per_problem"]) - len(shared),
        "only_b": len(right["per_problem"]) - len(shared),
        "side_metric": side,
        "tests": tests,
        "changed": {"gained": changed["gained"], "lost": changed["lost"]},
    }


def _row(name: str, t: dict[str, Any]) -> list[str]:
    sign = "+" if t["difference"] >= 0 else ""
    return [
        metric_label(name),
        percent(t["a"]),
        percent(t["b"]),
        f"{sign}{percent(t['difference'])} [{percent(t['low'])}, {percent(t['high'])}]",
        f"{t['p_value']:.2g}" if t["p_value"] < 0.1 else f"{t['p_value']:.2f}",
        f"{t['gained']} / {t['lost']}",
    ]


def _header(pair: dict[str, Any]) -> list[str]:
    confidence = next(iter(pair["tests"].values()))["confidence"]
    return ["metric, %", pair["a"], pair["b"], f"difference [{100 * confidence:.0f} %]", "p", "gained / lost"]


def _print(pairs: list[dict[str, Any]], show: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for pair in pairs:
        table = Table(title=f"{pair['b']} against {pair['a']}: {pair['problems']} problems", title_justify="left")
        for i, column in enumerate(_header(pair)):
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i in (3, 4, 5))
        shown = _shown(pair["tests"])
        for name in shown:
            table.add_row(*_row(name, pair["tests"][name]))
        console.print(table)
        if len(shown) < len(pair["tests"]):
            console.print(f"{len(pair['tests']) - len(shown)} more with --output, or one with --metric")
        for line in _notes(pair):
            console.print(line)
        for kind in ("gained", "lost"):
            rows = pair["changed"][kind]
            if rows and show:
                ids = ", ".join(r["problem_id"] for r in rows[:show])
                more = f" and {len(rows) - show} more" if len(rows) > show else ""
                console.print(f"{kind} ({len(rows)}): {ids}{more}", markup=False)


def _shown(tests: dict[str, Any]) -> list[str]:
    """Of each kind of metric the one with the largest k: a terminal has little room."""
    last: dict[str, str] = {}
    for name in tests:
        kind, _, rest = name.partition("@")
        last[kind + rest.lstrip("0123456789")] = name
    return list(last.values())


def _notes(pair: dict[str, Any]) -> list[str]:
    notes = []
    for key, name in (("only_a", pair["a"]), ("only_b", pair["b"])):
        if pair[key]:
            notes.append(f"{pair[key]} problems of {name} are not shared and left out")
    methods = {t["method"] for t in pair["tests"].values()}
    words = {"mcnemar": "exact McNemar test for 0/1 values", "sign-flip": "sign-flip permutation test for the others"}
    notes.append(f"p: {', '.join(words[m] for m in sorted(methods))}; interval: paired bootstrap over problems")
    return notes


def _write(path: Path, pairs: list[dict[str, Any]]) -> None:
    from trl_grpo_plus.evaluation.report import _table
    from trl_grpo_plus.evaluation.results import write_atomically

    if path.suffix == ".json":
        write_atomically(path, json.dumps(pairs, indent=1, ensure_ascii=False) + "\n")
        return
    if path.suffix != ".md":
        raise ValueError(f"--output must end in .json or .md, got {path}")
    lines: list[str] = []
    for pair in pairs:
        lines += [f"# {pair['b']} against {pair['a']}", "", f"{pair['problems']} problems.", ""]
        lines += _table(_header(pair), [_row(name, t) for name, t in pair["tests"].items()])
        lines += [*(f"{note}." for note in _notes(pair)), ""]
        for kind in ("gained", "lost"):
            rows = pair["changed"][kind]
            lines += [f"## {kind.capitalize()}: {len(rows)} problems by {metric_label(pair['side_metric'])}", ""]
            if rows:
                lines += _table(
                    ["problem", pair["a"], pair["b"]],
                    [[r["problem_id"], percent(r["a"]), percent(r["b"])] for r in rows],
                )
    write_atomically(path, "\n".join(lines).rstrip() + "\n")
