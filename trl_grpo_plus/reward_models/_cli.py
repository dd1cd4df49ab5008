"""What the commands of this folder share."""

import argparse
from pathlib import Path
from typing import Any

from trl_grpo_plus.config_file import one_line


class UsageError(ValueError):
    """A mistake in the command line or in a file that it names; the text is one line for the user."""


class Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process, so that `main` returns its exit code."""

    def error(self, message: str) -> None:
        raise UsageError(message)


def load_rows(source: str, split: str = "train", config: str | None = None, limit: int | None = None) -> Any:
    """A data set from a file (.jsonl, .json, .csv, .parquet), a `save_to_disk` directory, or the hub.

    Raises:
        UsageError: it cannot be read.
    """
    from datasets import Dataset, load_dataset, load_from_disk

    path = Path(source)
    kinds = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    try:
        if path.is_dir():
            dataset = load_from_disk(source)
            dataset = dataset if isinstance(dataset, Dataset) else dataset[split]
        elif path.suffix in kinds:
            if not path.is_file():
                raise UsageError(f"the file {source} does not exist")
            dataset = load_dataset(kinds[path.suffix], data_files=source, split="train")
        else:
            dataset = load_dataset(source, config, split=split)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"cannot read {source!r} (config {config!r}, split {split!r}): {one_line(error)}") from error
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


def positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def best_device() -> str:
    """The accelerator if there is one, else the CPU."""
    import torch

    return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
