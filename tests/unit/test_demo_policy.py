"""The shipped weights: they load, are small, and are nearly perfect greedily but right half of the time sampled."""

import functools
import random
import re

import pytest
import torch

from trl_grpo_plus.algorithms.steps import split_steps, step_texts
from trl_grpo_plus.demo import load_demo_policy, load_demo_tokenizer, make_problems
from trl_grpo_plus.demo.policy import WEIGHTS_DIR, build_policy, build_tokenizer
from trl_grpo_plus.demo.warmstart import main as make_weights
from trl_grpo_plus.demo.warmstart import make_batch, train


@pytest.fixture(scope="module")
def problems():
    return make_problems(500, seed=7, split="test")


@pytest.fixture(scope="module")
def sample(problems):
    tokenizer, policy = load_demo_tokenizer(), load_demo_policy()
    prompts = tokenizer(list(problems["prompt"]), padding=True, return_tensors="pt")

    @functools.cache
    def generate(do_sample):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            ids = policy.generate(**prompts, max_new_tokens=32, do_sample=do_sample)
        return ids[:, prompts["input_ids"].shape[1] :]

    return generate


def share_right(ids, problems):
    texts = load_demo_tokenizer().batch_decode(ids, skip_special_tokens=True)
    return sum(t.endswith(a.splitlines()[-1]) for t, a in zip(texts, problems["answer"], strict=True)) / len(texts)


def test_shipped_files_are_small_and_of_this_code():
    assert sum(path.stat().st_size for path in WEIGHTS_DIR.iterdir()) < 1.5e6
    policy, tokenizer = load_demo_policy(), load_demo_tokenizer()
    built = build_policy(build_tokenizer())
    assert policy.dtype == torch.float32 and policy.num_parameters() < 1_000_000
    assert {k: v.shape for k, v in policy.state_dict().items()} == {k: v.shape for k, v in built.state_dict().items()}
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.padding_side) == ("<pad>", "<eos>", "left")


def test_greedy_is_nearly_always_right(sample, problems):
    assert share_right(sample(do_sample=False), problems) > 0.95


def test_sampling_is_right_about_half_of_the_time_because_steps_slip(sample, problems):
    tokenizer = load_demo_tokenizer()
    ids = sample(do_sample=True)
    assert 0.45 < share_right(ids, problems) < 0.65
    slips, num_steps = [], 0
    for text in tokenizer.batch_decode(ids, skip_special_tokens=True):
        for left, sign, right, result in re.findall(r"(-?\d+) ([+-]) (\d+) = (-?\d+)", text):
            num_steps += 1
            slips.append(int(result) - int(left) - int(sign + right))
    slipped = [slip for slip in slips if slip]
    assert len(slipped) / num_steps == pytest.approx(0.2, abs=0.03)
    assert sum(abs(slip) <= 2 for slip in slipped) / len(slipped) > 0.95


def test_a_sampled_line_is_a_step(sample):
    tokenizer = load_demo_tokenizer()
    for row in sample(do_sample=True)[:50]:
        ids = row[row != tokenizer.pad_token_id].tolist()
        texts = step_texts(ids, split_steps(ids, tokenizer), tokenizer)
        assert texts == tokenizer.decode(ids, skip_special_tokens=True).splitlines(keepends=True)


def test_the_policy_trains_on_completions_only():
    tokenizer = build_tokenizer()
    input_ids, attention_mask, labels = make_batch(tokenizer, 4, random.Random(0))
    for ids, mask, label in zip(input_ids, attention_mask, labels, strict=True):
        prompt, completion = tokenizer.decode(ids[mask.bool()]).split("?\n")
        assert tokenizer.decode(label[label != -100]) == completion
        assert completion.endswith("<eos>") and "####" in completion and "####" not in prompt


def test_warm_start_learns():
    tokenizer = build_tokenizer()
    policy = build_policy(tokenizer)
    assert train(policy, tokenizer, 1, batch_size=8) > 5.5  # ln 316 = 5.76 nats: uniform over the vocabulary
    assert train(policy, tokenizer, 60, batch_size=8) < 4.5  # the mean over the last 50 steps


def test_command_writes_what_loads(tmp_path, capsys):
    assert make_weights(["--output-dir", str(tmp_path), "--steps", "2"]) == 0
    assert load_demo_policy(tmp_path).num_parameters() == load_demo_policy().num_parameters()
    assert load_demo_tokenizer(tmp_path).get_vocab() == load_demo_tokenizer().get_vocab()
    assert "nats a token" in capsys.readouterr().out
