"""The replay buffer: what it keeps, what it draws, and that it survives a kill between two writes."""

import json
import os
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_plus.iterative.replay import (
    ReplayBuffer,
    deduplicate,
    is_held_out,
    make_samples,
    num_history,
    sample_key,
    sample_keys,
)


def samples_of(completions, iteration=1, prompt="p", **columns):
    return make_samples({"prompt": [prompt] * len(completions), "completion": completions, **columns}, iteration)


def completions_in(buffer):
    return [row["completion"] for row in buffer]


def test_a_sample_comes_back_with_all_its_columns(tmp_path):
    samples = make_samples(
        {
            "prompt": ["1+1?\n", "2+2?\n"],
            "completion": ["1 + 1 = 2\n#### 2", "2 + 2 = 5\n#### 5"],
            "steps": [["1 + 1 = 2\n", "#### 2"], ["2 + 2 = 5\n", "#### 5"]],
            "step_labels": [[1.0, None], [0.0, 0.0]],
            "scores": [[0.9, 0.8], [0.5, 0.25]],
            "correct": [1.0, 0.0],
        },
        iteration=3,
    )
    buffer = ReplayBuffer(tmp_path)
    assert buffer.add(samples, 3) == 2
    rows = list(ReplayBuffer(tmp_path))
    assert rows[0]["steps"] == ["1 + 1 = 2\n", "#### 2"]
    assert rows[0]["step_labels"] == [1.0, None]
    assert rows[1]["scores"] == [0.5, 0.25]
    assert [row["correct"] for row in rows] == [1.0, 0.0]
    assert [row["iteration"] for row in rows] == [3, 3]
    # The shards are plain parquet for anyone's `datasets`.
    files = sorted(str(path) for path in tmp_path.glob("*.parquet"))
    loaded = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["completion"][:] == [row["completion"] for row in rows]


def test_conversations_are_kept_as_they_are(tmp_path):
    prompt = [{"role": "user", "content": "1+1?"}]
    completion = [{"role": "assistant", "content": "2"}]
    buffer = ReplayBuffer(tmp_path)
    buffer.add(make_samples({"prompt": [prompt], "completion": [completion]}, 1), 1)
    (row,) = buffer
    assert (row["prompt"], row["completion"]) == (prompt, completion)


def test_repeats_count_once_and_a_sample_seen_again_moves_to_the_new_iteration(tmp_path):
    buffer = ReplayBuffer(tmp_path)
    assert buffer.add(samples_of(["a", "b", "a"]), 1) == 2
    assert buffer.add(samples_of(["b", "c", "c"], iteration=2), 2) == 1
    assert Counter(completions_in(buffer)) == Counter(["a", "b", "c"])
    assert buffer.iterations == {1: 1, 2: 2}
    # The same completion to another prompt is another sample.
    assert buffer.add(samples_of(["a"], iteration=3, prompt="q"), 3) == 1


def test_key_depends_on_prompt_and_completion_and_not_on_where_one_ends():
    assert sample_key("ab", "c") != sample_key("a", "bc")
    assert sample_key("p", "c") == sample_key("p", "c")
    # Fixed for all time: keys are stored in checkpoints and compared with keys computed by later processes.
    assert sample_key("p", "c") == 6810284310280620670


def test_recency_keeps_the_newest(tmp_path):
    buffer = ReplayBuffer(tmp_path, max_size=5, strategy="recency")
    for iteration in range(1, 4):
        buffer.add(samples_of([f"{iteration}{letter}" for letter in "abc"], iteration), iteration)
    assert completions_in(buffer) == ["2b", "2c", "3a", "3b", "3c"]


def test_reservoir_is_a_uniform_sample_of_everything_ever_added(tmp_path):
    kept = Counter()
    trials = 60
    for seed in range(trials):
        buffer = ReplayBuffer(tmp_path / str(seed), max_size=6, seed=seed)
        for iteration in range(1, 5):
            buffer.add(samples_of([f"{iteration}-{i}" for i in range(6)], iteration), iteration)
        assert len(buffer) == 6
        kept.update(completion.split("-")[0] for completion in completions_in(buffer))
    # Each iteration holds a quarter of 24; 360 draws, standard deviation of a count about 8.
    for iteration in "1234":
        assert abs(kept[iteration] - trials * 6 / 4) < 4 * 8


def test_reservoir_does_not_depend_on_the_order_of_adding(tmp_path):
    forward, backward = (ReplayBuffer(tmp_path / name, max_size=4, seed=7) for name in ("f", "b"))
    batches = [[f"{i}{j}" for j in range(5)] for i in range(3)]
    for batch in batches:
        forward.add(samples_of(batch), 1)
    for batch in reversed(batches):
        backward.add(samples_of(batch), 1)
    assert set(completions_in(forward)) == set(completions_in(backward))


@settings(deadline=None, max_examples=30)
@given(fraction=st.floats(0, 0.95), fresh=st.integers(0, 500), available=st.integers(0, 500))
def test_the_share_of_history_is_exact_to_one_sample(fraction, fresh, available):
    history = num_history(fresh, fraction, available)
    assert 0 <= history <= available
    if history < available:
        assert abs(history - fraction * (fresh + history)) <= 1


def test_a_tenth_is_a_tenth():
    assert num_history(900, 0.1, 10_000) == 100
    assert num_history(9, 0.1, 10_000) == 1
    assert num_history(900, 0.0, 10_000) == 0
    with pytest.raises(ValueError, match="replay_fraction"):
        num_history(10, 1.0, 10)


def test_draw_is_without_replacement_seeded_and_leaves_out_the_excluded(tmp_path):
    buffer = ReplayBuffer(tmp_path)
    for iteration in (1, 2, 3):
        buffer.add(samples_of([f"{iteration}-{i}" for i in range(2000)], iteration), iteration)
    drawn = buffer.draw(500, seed=4)
    assert len(set(drawn["completion"])) == 500
    assert drawn["completion"][:] == buffer.draw(500, seed=4)["completion"][:]
    assert drawn["completion"][:] != buffer.draw(500, seed=5)["completion"][:]
    exclude = sample_keys(drawn)
    rest = buffer.draw(10_000, seed=4, exclude=exclude)
    assert len(rest) == 5500
    assert not set(rest["completion"]) & set(drawn["completion"])
    assert buffer.draw(3, seed=0, exclude=buffer.keys()) is None
    counts = Counter(buffer.draw(3000, seed=9)["iteration"])
    assert all(abs(count - 1000) < 4 * 26 for count in counts.values())


def test_snapshot_shares_the_shards_and_does_not_follow_later_changes(tmp_path):
    buffer = ReplayBuffer(tmp_path / "live", max_size=3, strategy="recency")
    buffer.add(samples_of(["a", "b"]), 1)
    buffer.snapshot(tmp_path / "copy")
    buffer.add(samples_of(["c", "d"], 2), 2)
    assert completions_in(buffer) == ["b", "c", "d"]
    copy = ReplayBuffer(tmp_path / "copy")
    assert completions_in(copy) == ["a", "b"]
    shard = next((tmp_path / "copy").glob("*.parquet"))
    assert os.stat(shard).st_nlink == 1  # the live one was rewritten without "a"; before that it was one file


def test_kill_between_writing_a_shard_and_naming_it_leaves_the_buffer_as_it_was(tmp_path, monkeypatch):
    buffer = ReplayBuffer(tmp_path, max_size=3, strategy="recency")
    buffer.add(samples_of(["a", "b", "c"]), 1)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        buffer.add(samples_of(["d", "e"], 2), 2)
    monkeypatch.undo()
    assert completions_in(ReplayBuffer(tmp_path)) == ["a", "b", "c"]
    reopened = ReplayBuffer(tmp_path, max_size=3, strategy="recency")
    reopened.add(samples_of(["d", "e"], 2), 2)
    assert completions_in(reopened) == ["c", "d", "e"]
    names = {entry["name"] for entry in json.loads((tmp_path / "replay.json").read_text())["shards"]}
    assert {path.name for path in tmp_path.glob("*.parquet")} == names


def test_a_damaged_buffer_is_refused_by_name(tmp_path):
    buffer = ReplayBuffer(tmp_path)
    buffer.add(samples_of(["a"]), 1)
    (shard,) = tmp_path.glob("*.parquet")
    shard.write_bytes(shard.read_bytes()[:40])
    with pytest.raises(ValueError, match=str(tmp_path)):
        ReplayBuffer(tmp_path)


def test_draws_read_only_the_row_groups_they_need(tmp_path, monkeypatch):
    buffer = ReplayBuffer(tmp_path)
    buffer.add(samples_of([str(i) for i in range(5000)]), 1)
    groups = []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda self, i: groups.append(i) or original(self, i))
    assert len(buffer.draw(1, seed=0)) == 1
    assert len(groups) == 1


def test_deduplicate_keeps_the_first_in_order():
    assert deduplicate(samples_of(["b", "a", "b", "c", "a"]))["completion"][:] == ["b", "a", "c"]


def test_prompts_are_split_the_same_way_every_time():
    prompts = [f"question {i}" for i in range(4000)]
    held_out = [is_held_out(prompt, 0.1, 3) for prompt in prompts]
    assert held_out == [is_held_out(prompt, 0.1, 3) for prompt in prompts]
    assert held_out != [is_held_out(prompt, 0.1, 4) for prompt in prompts]
    assert not any(is_held_out(prompt, 0.0, 3) for prompt in prompts)
    assert abs(np.mean(held_out) - 0.1) < 4 * np.sqrt(0.09 / 4000)


@pytest.mark.parametrize(
    "arguments, field", [({"max_size": 0}, "replay_max_size"), ({"strategy": "x"}, "replay_strategy")]
)
def test_arguments_that_mean_nothing_are_refused(tmp_path, arguments, field):
    with pytest.raises(ValueError, match=field):
        ReplayBuffer(tmp_path, **arguments)
