"""The replay buffer of reward-model training: every sample that the policy was judged on, on disk, each once.

DeepSeekMath (arXiv 2402.03300, §4.1.4) trains the reward model on new samples mixed with "10 % of historical data" and
says no more. Here the share is a share of samples, exact to one; the history is deduplicated, so that a policy that
repeats itself does not fill it; and what is kept when the buffer is full is a uniform sample of all that was ever
added (`"reservoir"`) or the newest (`"recency"`).

Shards are parquet files that are never changed once written, so a checkpoint can hard-link them. Only the keys, 8
bytes a sample, are held in memory.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, Value
from datasets import List as ListFeature

STRATEGIES = ("reservoir", "recency")
INDEX_NAME = "replay.json"
_ROW_GROUP = 1024

_FIXED_FEATURES = {
    "key": Value("int64"),
    "iteration": Value("int32"),
    "steps": ListFeature(Value("string")),
    "step_labels": ListFeature(Value("float64")),
    "scores": ListFeature(Value("float64")),
    "correct": Value("float64"),
}
COLUMNS = ("prompt", "completion", *_FIXED_FEATURES)


def sample_key(prompt: Any, completion: Any) -> int:
    """63-bit identity of a sample, the same in every process and run.

    Among a million distinct samples any two share a key with probability 5e-8.
    """
    text = json.dumps([prompt, completion], sort_keys=True, ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def is_held_out(prompt: Any, fraction: float, seed: int) -> bool:
    """Whether a prompt is among the `fraction` that never trains the reward model; the same in every iteration."""
    text = json.dumps([seed, prompt], sort_keys=True, ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") < fraction * 2**64


def num_history(num_fresh: int, fraction: float, available: int) -> int:
    """How many historical samples to mix with `num_fresh` new ones, so that they are `fraction` of the whole to one
    sample.

    Args:
        num_fresh: F, samples of this iteration.
        fraction: f = H / (F + H), in [0, 1).
        available: samples in the buffer; the result is no larger.

    Raises:
        ValueError: `fraction` outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"replay_fraction must lie in [0, 1), got {fraction}.")
    return min(round(fraction * num_fresh / (1 - fraction)), available)


def make_samples(rows: dict[str, list], iteration: int) -> Dataset:
    """The rows of one iteration as a data set with the buffer's columns and a key for each.

    Args:
        rows: columns `prompt` and `completion` (str, or conversations), and optionally `steps` (list of str),
            `step_labels` (list of float or None), `scores` (the reward model's, list of float or None) and `correct`
            (the grader's
            verdict: 1.0, 0.0 or None). Other columns are left out.
        iteration: written to each row.
    """
    count = len(rows["prompt"])
    columns = {name: rows.get(name, [None] * count) for name in COLUMNS if name not in ("key", "iteration")}
    columns["key"] = [
        sample_key(prompt, completion) for prompt, completion in zip(rows["prompt"], rows["completion"], strict=True)
    ]
    columns["iteration"] = [iteration] * count
    inferred = Dataset.from_dict({name: columns[name] for name in ("prompt", "completion")}).features
    features = Features({**inferred, **_FIXED_FEATURES})
    return Dataset.from_dict({name: columns[name] for name in features}, features=features)


def sample_keys(samples: Dataset) -> np.ndarray:
    """(N,) int64 keys of the samples."""
    return np.array(samples["key"][:], dtype=np.int64)


def deduplicate(samples: Dataset) -> Dataset:
    """The samples without repeats of a key; the first of each stays, in order."""
    _, first = np.unique(sample_keys(samples), return_index=True)
    return samples if len(first) == len(samples) else samples.select(np.sort(first))


@dataclass
class _Shard:
    name: str
    iteration: int
    keys: np.ndarray = field(repr=False)


class ReplayBuffer:
    """Samples on disk in one parquet shard per iteration, deduplicated by prompt and completion.

    Args:
        directory: where the shards lie; made if it is not there, opened if it holds a buffer.
        max_size: number of samples kept; None for all.
        strategy: what stays when the buffer is full: `"reservoir"`, a uniform sample of all distinct samples that were
            ever added, or `"recency"`, the newest.
        seed: of the reservoir's choice.

    Raises:
        ValueError: an unknown strategy, a `max_size` below 1, or an index file that cannot be read.
    """

    def __init__(self, directory: str | Path, max_size: int | None = None, strategy: str = "reservoir", seed: int = 0):
        if strategy not in STRATEGIES:
            raise ValueError(f"replay_strategy must be one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}.")
        if max_size is not None and max_size < 1:
            raise ValueError(f"replay_max_size must be at least 1, got {max_size}.")
        self.directory = Path(directory)
        self.max_size, self.strategy, self.seed = max_size, strategy, seed
        self.directory.mkdir(parents=True, exist_ok=True)
        self._shards = self._read_index()

    def __len__(self) -> int:
        return sum(len(shard.keys) for shard in self._shards)

    @property
    def iterations(self) -> dict[int, int]:
        """Number of samples of each iteration that are still kept."""
        counts: dict[int, int] = {}
        for shard in self._shards:
            counts[shard.iteration] = counts.get(shard.iteration, 0) + len(shard.keys)
        return counts

    def keys(self) -> np.ndarray:
        """(N,) int64 keys of all samples, oldest shard first."""
        return np.concatenate([shard.keys for shard in self._shards] or [np.empty(0, np.int64)])

    def add(self, samples: Dataset, iteration: int) -> int:
        """Adds the samples of an iteration; one that the buffer already holds moves to this iteration.

        Args:
            samples: as from [`make_samples`]; repeats among them count once.
            iteration: of the samples.

        Returns:
            How many of them were not in the buffer before.
        """
        samples = deduplicate(samples)
        keys = sample_keys(samples)
        repeated = np.isin(self.keys(), keys)
        kept_old = ~repeated
        kept_new = np.ones(len(keys), bool)
        excess = int(kept_old.sum()) + len(keys) - self.max_size if self.max_size is not None else 0
        if excess > 0:
            everything = np.concatenate([self.keys(), keys])
            alive = np.flatnonzero(np.concatenate([kept_old, kept_new]))
            leaving = alive[np.argsort(self._rank(everything[alive]), kind="stable")[:excess]]
            kept_old[leaving[leaving < len(kept_old)]] = False
            kept_new[leaving[leaving >= len(kept_old)] - len(kept_old)] = False

        shards, start = [], 0
        taken = {shard.name for shard in self._shards}
        for shard in self._shards:
            mask = kept_old[start : start + len(shard.keys)]
            start += len(shard.keys)
            if mask.all():
                shards.append(shard)
            elif mask.any():
                shards.append(self._rewrite(shard, mask, taken))
        if kept_new.any():
            new = samples if kept_new.all() else samples.select(np.flatnonzero(kept_new))
            name = _free_name(iteration, taken)
            write_parquet(new, self.directory / name)
            shards.append(_Shard(name, iteration, keys[kept_new]))
        self._write_index(shards)
        return int(len(keys) - repeated.sum())

    def draw(self, count: int, seed: int, exclude: np.ndarray | None = None) -> Dataset | None:
        """Draws samples uniformly without replacement; all there are if there are fewer.

        Args:
            count: how many.
            seed: of the draw. The same buffer and seed give the same samples.
            exclude: (K,) keys that must not be drawn.

        Returns:
            A data set in the buffer's order, or None if it has no row.
        """
        keys = self.keys()
        candidates = np.flatnonzero(~np.isin(keys, exclude)) if exclude is not None else np.arange(len(keys))
        if count < len(candidates):
            candidates = np.sort(np.random.default_rng(seed).choice(candidates, count, replace=False))
        if count < 1 or not len(candidates):
            return None
        tables, start = [], 0
        for shard in self._shards:
            rows = candidates[(candidates >= start) & (candidates < start + len(shard.keys))] - start
            start += len(shard.keys)
            tables += _take_rows(self.directory / shard.name, rows)
        return Dataset(pa.concat_tables(tables))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All samples, oldest shard first, a row group at a time."""
        for shard in self._shards:
            for batch in pq.ParquetFile(self.directory / shard.name).iter_batches(_ROW_GROUP):
                yield from batch.to_pylist()

    def snapshot(self, directory: str | Path) -> None:
        """Writes the buffer to another directory; the shards are hard-linked where the file system can."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for shard in self._shards:
            link_or_copy(self.directory / shard.name, directory / shard.name)
        shutil.copyfile(self.directory / INDEX_NAME, directory / INDEX_NAME)

    def _rank(self, keys: np.ndarray) -> np.ndarray:
        """(N,) who leaves first (smallest) when the buffer is full."""
        if self.strategy == "recency":
            return np.arange(len(keys))
        # Bottom-k sampling: each key has a fixed pseudo-random number, and those with the largest stay. This is a
        # uniform sample of all distinct keys ever seen, whatever their order, and needs no count of them.
        return _mix(keys.astype(np.uint64) ^ _mix(np.array([self.seed], dtype=np.uint64)))

    def _rewrite(self, shard: _Shard, mask: np.ndarray, taken: set[str]) -> _Shard:
        """The shard without the rows that leave, under a new name, a row group at a time."""
        name = _free_name(shard.iteration, taken)
        source = pq.ParquetFile(self.directory / shard.name)
        with pq.ParquetWriter(self.directory / name, source.schema_arrow) as writer:
            start = 0
            for batch in source.iter_batches(_ROW_GROUP):
                rows = mask[start : start + batch.num_rows]
                start += batch.num_rows
                if rows.any():
                    writer.write_batch(batch.filter(pa.array(rows)))
        return _Shard(name, shard.iteration, shard.keys[mask])

    def _read_index(self) -> list[_Shard]:
        path = self.directory / INDEX_NAME
        if not path.exists():
            self._write_index([])
            return []
        try:
            entries = json.loads(path.read_text())["shards"]
            shards = [_Shard(e["name"], e["iteration"], _read_keys(self.directory / e["name"])) for e in entries]
        except (ValueError, KeyError, TypeError, OSError, pa.ArrowInvalid) as error:
            raise ValueError(
                f"The replay buffer at {self.directory} cannot be read ({error}). Resume from a checkpoint that is "
                "whole."
            ) from error
        return shards

    def _write_index(self, shards: list[_Shard]) -> None:
        """Replaces the index in one step, then removes the shards that it no longer names."""
        entries = [{"name": shard.name, "iteration": shard.iteration, "rows": len(shard.keys)} for shard in shards]
        temporary = self.directory / f"{INDEX_NAME}.tmp"
        temporary.write_text(json.dumps({"shards": entries}, indent=1))
        os.replace(temporary, self.directory / INDEX_NAME)
        self._shards = shards
        names = {shard.name for shard in shards}
        for path in self.directory.glob("iteration-*.parquet"):
            if path.name not in names:
                path.unlink()


def write_parquet(dataset: Dataset, path: str | Path) -> None:
    """Writes a data set as parquet, with its features, in row groups that can be read one at a time."""
    with pq.ParquetWriter(path, dataset.features.arrow_schema) as writer:
        for table in dataset.with_format("arrow").iter(_ROW_GROUP):
            writer.write_table(table.cast(dataset.features.arrow_schema))


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Hard-links a file that is never changed in place; copies it where the file system cannot link."""
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _free_name(iteration: int, taken: set[str]) -> str:
    """A shard's file name that is not taken yet; it is then."""
    version = 0
    while (name := f"iteration-{iteration:05d}-{version}.parquet") in taken:
        version += 1
    taken.add(name)
    return name


def _read_keys(path: Path) -> np.ndarray:
    return pq.read_table(path, columns=["key"])["key"].to_numpy()


def _take_rows(path: Path, rows: np.ndarray) -> list[pa.Table]:
    """The rows of a parquet file, reading only the row groups that have any."""
    if not len(rows):
        return []
    file, tables, start = pq.ParquetFile(path), [], 0
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        inside = rows[(rows >= start) & (rows < start + count)] - start
        if len(inside):
            tables.append(file.read_row_group(group).take(pa.array(inside)))
        start += count
    return tables


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of uint64 whose output looks random."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
