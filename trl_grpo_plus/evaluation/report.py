"""Tables of results: on the terminal and as Markdown; the samples page as HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trl_grpo_plus.evaluation.results import GREEDY, Record, write_atomically


def metric_label(name: str) -> str:
    """Metric name for people."""
    if name == "greedy":
        return "pass@1 (greedy)"
    base, _, variant = name.partition("_")
    if base.startswith("maj@"):
        return f"{base} (string, first wins)" if variant else f"{base} (clusters, ties averaged)"
    model = {"orm": "ORM"}.get(variant, variant.replace("prm_", "PRM ", 1))
    if base.startswith("best@"):
        return f"{base.replace('best@', 'best of ')} ({model})"
    if base.startswith("vote@"):
        return f"vote@{base.removeprefix('vote@')} weighted by {model}"
    return name


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def cell(metric: dict[str, Any] | None) -> str:
    """ "91.0 [86.2, 95.1]", in percent."""
    if metric is None:
        return "–"
    return f"{percent(metric['value'])} [{percent(metric['low'])}, {percent(metric['high'])}]"


def metric_names(summaries: dict[str, dict[str, Any]]) -> list[str]:
    """Metrics of all models in a fixed order: greedy, mean, pass, maj, the rest; then by k."""
    names = dict.fromkeys(name for s in summaries.values() for name in s["metrics"])
    order = ("greedy", "mean", "pass", "maj", "best", "vote")

    def key(name: str):
        kind, _, rest = name.partition("@")
        k = int(re.match(r"\d+", rest).group()) if rest else 0
        return (order.index(kind), "_string" in name, name.partition("_")[2], k)

    return sorted(names, key=key)


def rate_rows(summaries: dict[str, dict[str, Any]]) -> list[tuple[str, list[str]]]:
    labels = {
        "truncated": "truncated, %",
        "no_answer": "no answer found, %",
        "unparseable": "no readable answer, %",
        "timeout": "grader timeout or refusal, %",
        "prompt_too_long": "prompt too long, %",
        "mean_tokens": "mean tokens",
        "p95_tokens": "95th percentile tokens",
    }
    rows = []
    for name, label in labels.items():
        values = [s["rates"][name] for s in summaries.values()]
        if name in ("timeout", "prompt_too_long") and not any(values):
            continue
        if all(v is None for v in values):
            continue
        shown = [percent(v) if label.endswith("%") else "–" if v is None else f"{v:.0f}" for v in values]
        rows.append((label, shown))
    failed = [s["failed"] for s in summaries.values()]
    if any(failed):
        rows.append(("failed samples, not counted", [str(f) for f in failed]))
    return rows


def terminal_table(summaries: dict[str, dict[str, Any]], title: str):
    """A rich table: one row a metric, one column a model."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("metric, % [95 % interval]" if _confidence(summaries) == 0.95 else "metric, %")
    for name, s in summaries.items():
        table.add_column(f"{name}\n{s['problems']} x {max(1, s['samples'])} samples", justify="right", overflow="fold")
    for metric in metric_names(summaries):
        table.add_row(metric_label(metric), *[cell(s["metrics"].get(metric)) for s in summaries.values()])
    table.add_section()
    for label, values in rate_rows(summaries):
        table.add_row(label, *values)
    return table


def _confidence(summaries) -> float:
    return next(iter(summaries.values()))["confidence"]


def markdown(results: dict[str, Any], plots: Sequence[str] = (), page: str | None = None) -> str:
    """The Markdown report of `results.json`."""
    summaries = results["models"]
    settings = results["settings"]
    names = list(summaries)
    lines = [f"# {settings.get('dataset', 'Evaluation')}", ""]
    sizes = [f"{n}: {s['problems']} problems, {max(1, s['samples'])} samples each" for n, s in summaries.items()]
    lines += ["; ".join(sizes) + ".", ""]
    lines += _table(
        [f"metric, % [{100 * _confidence(summaries):.0f} % interval]", *names],
        [[metric_label(m), *[cell(s["metrics"].get(m)) for s in summaries.values()]] for m in metric_names(summaries)],
    )
    methods = sorted({m["method"] for s in summaries.values() for m in s["metrics"].values()})
    explain = {"wilson": "Wilson score for 0/1 values", "bootstrap": "bootstrap over problems for the others"}
    lines += [f"Intervals: {', '.join(explain[m] for m in methods)}.", ""]
    lines += ["## Completions", ""]
    lines += _table(["", *names], [[label, *values] for label, values in rate_rows(summaries)])
    for field, title in (("by_level", "By level"), ("by_subject", "By subject")):
        groups = sorted({g for s in summaries.values() for g in s[field]})
        if not groups:
            continue
        lines += [f"## {title}", ""]
        header, rows = [title.removeprefix("By ").capitalize(), "problems"], []
        columns = [(n, c) for n, s in summaries.items() for c in _group_columns(s[field])]
        header += [f"{n}: {metric_label(c)}" if len(names) > 1 else metric_label(c) for n, c in columns]
        for group in groups:
            count = next(s[field][group]["problems"] for s in summaries.values() if group in s[field])
            rows.append([group, str(count), *[cell(summaries[n][field].get(group, {}).get(c)) for n, c in columns]])
        lines += _table(header, rows)
    for name, s in summaries.items():
        if "file_verdicts" in s:
            f = s["file_verdicts"]
            lines += [f"{name}: the file's own verdicts agree on {f['agree']} of {f['of']} samples.", ""]
        lines += [f"{name}: {note}." for note in s["notes"]]
    if plots:
        lines += ["## Plots", "", *[f"![{Path(p).stem}]({p})" for p in plots], ""]
    if page:
        lines += [f"Samples: [{page}]({page})", ""]
    lines += ["## Settings", ""]
    lines += _table(["setting", "value"], [[k, f"`{json.dumps(v, ensure_ascii=False)}`"] for k, v in settings.items()])
    lines += [f"Versions: {', '.join(f'{k} {v}' for k, v in results['versions'].items())}."]
    return "\n".join(lines).rstrip() + "\n"


def _group_columns(groups: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(c for g in groups.values() for c in g if c != "problems"))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells):
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    rule = "|" + "|".join([" :-- ", *[" --: "] * (len(header) - 1)]) + "|"
    return [line(header), rule, *map(line, rows), ""]


def samples_page(
    path: Path, results: dict[str, Any], records: dict[str, Sequence[Record]], max_problems: int | None = None
) -> None:
    """Writes the self-contained page to browse samples.

    Args:
        path: of the HTML file.
        results: as in `results.json`.
        records: graded samples of each model.
        max_problems: keep the page small by leaving out the rest (the page says so).
    """
    problems: dict[str, dict[str, Any]] = {}
    for model, rows in records.items():
        for r in rows:
            problem = problems.setdefault(
                r["problem_id"],
                {
                    "id": r["problem_id"],
                    "q": r["question"],
                    "gold": r.get("gold_read") or r["gold"],
                    "level": r.get("level"),
                    "subject": r.get("subject"),
                    "s": {},
                },
            )
            sample = {
                "n": "greedy" if r["sample"] == GREEDY else r["sample"],
                "c": r["completion"],
                "v": _verdict_class(r),
                "x": r.get("extracted"),
                "r": r["reason"],
                "m": r.get("method"),
                "t": r.get("num_tokens"),
                "f": r["finish_reason"],
            }
            if r.get("steps") and r.get("step_scores"):
                sample["st"] = [[text, score] for text, score in zip(r["steps"], r["step_scores"], strict=True)]
            if r.get("rm_score") is not None:
                sample["rm"] = round(r["rm_score"], 4)
            if r.get("error"):
                sample["e"] = r["error"]
            problem["s"].setdefault(model, []).append(sample)
    rows = list(problems.values())
    data = {
        "title": str(results["settings"].get("dataset", "Evaluation")),
        "models": {
            name: [[metric_label(m), cell(s["metrics"][m])] for m in metric_names({name: s})]
            for name, s in results["models"].items()
        },
        "total": len(rows),
        "problems": rows[:max_problems],
    }
    write_atomically(path, fill_template("samples.html", data))


def _verdict_class(record: Record) -> str:
    if record["finish_reason"] == "error":
        return "failed"
    if record["correct"]:
        return "correct"
    if record["reason"] in ("no answer", "unparseable", "timeout", "refused"):
        return "unread"
    return "wrong"


def fill_template(name: str, data: Any) -> str:
    """A template of this package with `data` in it as JSON, safe inside a script element."""
    template = files("trl_grpo_plus.evaluation").joinpath("templates", name).read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return template.replace("__DATA__", safe)
