"""`trl-grpo-plus check-data`: how the golds of a data set are read, before a run is paid for."""

import argparse
import sys
from pathlib import Path

STYLES = {"ok": "green", "symbolic": "cyan", "ambiguous": "yellow", "unreadable": "red"}


def main(argv: list[str]) -> int:
    """Prints the table. Returns 0 when every gold can be read, 1 when some cannot, 2 for wrong usage."""
    args = _parser().parse_args(argv)
    try:
        dataset = _load(args)
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        print(f"check-data: {args.dataset}: {_first_line(error)}", file=sys.stderr)
        return 2
    from reward_fns import GradePolicy, validate_golds

    try:
        report = validate_golds(dataset, args.column, GradePolicy(mode="math"), args.limit)
    except ValueError as error:
        print(f"check-data: {error}. Name the column with --column.", file=sys.stderr)
        return 2
    if not len(report):
        print(f"check-data: {args.dataset} has no rows", file=sys.stderr)
        return 2
    _print(report, args)
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-grpo-plus check-data",
        description="Shows how the rewards read each gold answer: what it is, which are unreadable or ambiguous.",
    )
    parser.add_argument("dataset", help="a JSON, JSONL, CSV or Parquet file, or the name of a data set on the hub")
    parser.add_argument("--config", help="configuration of a data set on the hub, such as main")
    parser.add_argument("--split", default="train", help="split (default: train)")
    parser.add_argument("--column", help="column of the gold (default: solution, answer, gold or final_answer)")
    parser.add_argument("--limit", type=_positive, help="read only the first rows")
    parser.add_argument("--show", type=int, default=20, help="rows to show (default: 20; -1: all that need a look)")
    parser.add_argument("--all", action="store_true", help="show rows that are fine too")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _load(args: argparse.Namespace):
    import datasets

    path = Path(args.dataset)
    kinds = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    if path.suffix in kinds:
        if not path.exists():
            raise FileNotFoundError("no such file")
        datasets.disable_progress_bars()
        return datasets.load_dataset(kinds[path.suffix], data_files={args.split: str(path)}, split=args.split)
    return datasets.load_dataset(args.dataset, args.config, split=args.split)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _print(report, args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=False)
    rows = report.rows if args.all else report.with_status("unreadable", "ambiguous")
    shown = rows if args.show < 0 else rows[: args.show]
    if shown:
        table = Table(title=None if args.all else "rows that need a look", title_justify="left")
        for name, options in (
            ("row", {"justify": "right", "no_wrap": True}),
            ("gold in the data", {"overflow": "fold", "ratio": 3}),
            ("read as", {"overflow": "fold", "ratio": 2}),
            ("found as", {"no_wrap": True}),
            ("kind", {"no_wrap": True}),
            ("status", {"no_wrap": True}),
            ("why", {"overflow": "fold", "ratio": 2}),
        ):
            table.add_column(name, **options)
        for row in shown:
            status = f"[{STYLES[row.status]}]{row.status}[/]"
            cells = (escape(row.raw), escape(row.read or "-"), escape(row.method), row.kind, status, escape(row.note))
            table.add_row(str(row.index), *cells)
        console.print(table)
        if len(rows) > len(shown):
            console.print(f"... and {len(rows) - len(shown)} more (--show -1 shows all)")
    counts = "  ".join(f"[{style}]{report.counts[status]} {status}[/]" for status, style in STYLES.items())
    console.print(f"{len(report)} golds from {' / '.join(report.columns)}:  {counts}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds().most_common())
    console.print(f"kinds: {escape(kinds)}")
    if report.ok:
        console.print("Next: every gold can be read; train with reward_fns.math_reward or reward_fns.gsm8k_reward.")
    else:
        count = report.counts["unreadable"]
        console.print(f"Next: mend or drop the {count} unreadable golds; their completions get the reward None.")
