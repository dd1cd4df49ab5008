"""Labels by roll-outs, against exact enumeration, against `generate`, and with a scripted policy that counts."""

import itertools
import json
import runpy
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections import Counter

import pytest
import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from trl_grpo_plus.reward_models import label_steps_by_rollout, sample_completions
from trl_grpo_plus.reward_models.completers import Rollout, Sampling, TransformersCompleter, VLLMCompleter

TOKENS = ["<pad>", "<eos>", "a", "b", "c", "\n", "q", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
SHAPE = {
    "vocab_size": len(TOKENS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.6,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(TOKENS[:2])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def ids_of(text):
    return [TOKENS.index(char) for char in text]


def ends_with_gold(golds, completions):
    return [completion.endswith(gold) for gold, completion in zip(golds, completions, strict=True)]


# --- The completer --------------------------------------------------------------------------------------------------

SEQUENCES = [ids_of("qab\nabc\nc"), ids_of("qqqc\nba\nab\n1234"), ids_of("q\na")]
CUTS = [[4, 8, 9], [5, 8, 11], [2]]


def models_to_test():
    torch.manual_seed(1)
    # A window of 4 tokens, which the cache holds alone: what stood before cannot be sliced off it.
    window = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)).eval()
    torch.manual_seed(2)
    return {"llama": LlamaForCausalLM(LlamaConfig(**SHAPE)).eval(), "sliding window": window}


@pytest.mark.parametrize("name", ["llama", "sliding window"])
def test_greedy_continuations_are_those_of_generate(name, tokenizer, caplog):
    model = models_to_test()[name]
    completer = TransformersCompleter(model, tokenizer, batch_size=4)
    state = completer.prefill(SEQUENCES, CUTS)
    rollouts = [Rollout(row, cut, (row, cut, 0)) for row, cuts in enumerate(CUTS) for cut in cuts]
    continued = completer.complete(state, rollouts, Sampling(max_new_tokens=12, temperature=0))
    for rollout, ids in zip(rollouts, continued, strict=True):
        prefix = torch.tensor([SEQUENCES[rollout.row][: rollout.cut]])
        reference = model.generate(
            prefix, attention_mask=torch.ones_like(prefix), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert ids == reference[0, rollout.cut :].tolist()
    assert len({tuple(ids) for ids in continued}) > 3
    assert ("computes its prefixes anew" in caplog.text) == (name == "sliding window")


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"temperature": 2.0, "top_k": 5, "top_p": 0.8}]
)
def test_samples_have_the_policys_distribution(options, policy, tokenizer):
    sampling = Sampling(**{"max_new_tokens": 1, "temperature": 1.0, **options})
    completer = TransformersCompleter(policy, tokenizer, batch_size=2000)
    state = completer.prefill(SEQUENCES, CUTS)
    n = 4000
    samples = completer.complete(state, [Rollout(1, 8, (0, 0, k)) for k in range(n)], sampling)
    with torch.no_grad():
        logits = policy(torch.tensor([SEQUENCES[1][:8]])).logits[0, -1] / sampling.temperature
    # The filters by their definitions.
    p = logits.softmax(-1)
    if sampling.top_k:
        p = torch.where(p >= p.sort(descending=True).values[sampling.top_k - 1], p, 0)
        p = p / p.sum()
    if sampling.top_p < 1:
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        p[order[before >= sampling.top_p]] = 0
        p = p / p.sum()
    frequency = torch.zeros_like(p)
    for (token,), count in Counter(map(tuple, samples)).items():
        frequency[token] = count / n
    assert (frequency[p == 0] == 0).all()
    assert ((frequency - p).abs() <= 4.5 * (p * (1 - p) / n).sqrt() + 1e-9).all()


def test_a_rollout_does_not_depend_on_its_batch(policy, tokenizer):
    sampling = Sampling(max_new_tokens=10, temperature=1.0, seed=3)
    completer = TransformersCompleter(policy, tokenizer, batch_size=5)
    state = completer.prefill(SEQUENCES, CUTS)
    rollouts = [Rollout(row, cut, (row, cut, k)) for row, cuts in enumerate(CUTS) for cut in cuts for k in range(3)]
    together = completer.complete(state, rollouts, sampling)
    alone = [completer.complete(state, [rollout], sampling)[0] for rollout in rollouts]
    assert together == alone
    assert len({tuple(ids) for ids in together}) > 15
    assert together != completer.complete(state, rollouts, Sampling(max_new_tokens=10, temperature=1.0, seed=4))


def test_shared_prefixes_are_computed_once(policy, tokenizer):
    seen = []
    hook = policy.model.embed_tokens.register_forward_hook(lambda module, args, out: seen.append(args[0].numel()))
    completer = TransformersCompleter(policy, tokenizer)
    state = completer.prefill([SEQUENCES[0]], [CUTS[0]])
    rollouts = [Rollout(0, cut, (cut, k)) for cut in CUTS[0] for k in range(5)]
    continued = completer.complete(state, rollouts, Sampling(max_new_tokens=6, temperature=1.0))
    hook.remove()
    # The sequence once; then each sampled token that is not a roll-out's last.
    assert sum(seen) == completer.forward_tokens == 9 + sum(len(ids) - 1 for ids in continued)


def test_vllm(monkeypatch, tokenizer):
    """The calls that vLLM would get; it does not run on a CPU."""

    class SamplingParams(types.SimpleNamespace):
        pass

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(SamplingParams=SamplingParams))

    class LLM:
        def generate(self, prompts, params, use_tqdm):
            self.calls = list(zip(prompts, params, strict=True))
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[2, 1])]) for _ in prompts]

        def get_tokenizer(self):
            return tokenizer

    llm = LLM()
    completer = VLLMCompleter(llm)
    state = completer.prefill(SEQUENCES, CUTS)
    rollouts = [Rollout(0, 4, (0, 0, 0)), Rollout(0, 4, (0, 0, 1)), Rollout(2, 2, (2, 0, 0))]
    assert completer.complete(state, rollouts, Sampling(7, 0.7, 0.9, 0, seed=1)) == [[2, 1]] * 3
    assert [prompt["prompt_token_ids"] for prompt, _ in llm.calls] == [SEQUENCES[0][:4]] * 2 + [SEQUENCES[2][:2]]
    (first, second, _) = (params for _, params in llm.calls)
    assert (first.n, first.max_tokens, first.temperature, first.top_p, first.top_k) == (1, 7, 0.7, 0.9, -1)
    assert first.seed != second.seed
    seeds = [params.seed for _, params in llm.calls]
    completer.complete(state, rollouts[::-1], Sampling(7, 0.7, 0.9, 0, seed=1))
    assert [params.seed for _, params in llm.calls] == seeds[::-1]


# --- Labels ---------------------------------------------------------------------------------------------------------


def exact_value(policy, prefix, gold, max_new_tokens, text):
    """Probability that a continuation makes the text end with the gold answer, over all sequences of tokens."""
    total, stack = 0.0, [((), 1.0)]
    while stack:
        continuation, p = stack.pop()
        if len(continuation) == max_new_tokens or (continuation and continuation[-1] == 1):
            completed = text + "".join(TOKENS[i] for i in continuation if i > 1)
            total += p * completed.endswith(gold)
            continue
        with torch.no_grad():
            probability = policy(torch.tensor([[*prefix, *continuation]])).logits[0, -1].double().softmax(-1)
        stack += [((*continuation, token), p * probability[token].item()) for token in range(len(TOKENS))]
    return total


def test_soft_labels_are_the_value_of_the_prefix(policy, tokenizer):
    prefixes = ("ab\n", "ab\nc\n")
    values = {
        gold: [exact_value(policy, ids_of("q" + text), gold, 2, text) for text in prefixes] for gold in "0123456789"
    }
    gold = max(values, key=lambda g: min(values[g]))
    n = 3000
    labelled = label_steps_by_rollout(
        Dataset.from_list([{"prompt": "q", "completion": f"ab\nc\n{gold}", "answer": gold}]),
        policy,
        tokenizer,
        num_rollouts=n,
        label="soft",
        grader=ends_with_gold,
        max_new_tokens=2,
        temperature=1.0,
        batch_size=4096,
        progress=False,
    )
    assert labelled[0]["completions"] == ["ab", "c", gold]
    for label, value in zip(labelled[0]["labels"], values[gold], strict=False):
        assert 0.02 < value < 0.98
        assert label == pytest.approx(value, abs=4.5 * (value * (1 - value) / n) ** 0.5)
    assert labelled[0]["labels"][2] == 1.0
    assert labelled[0]["rollouts_total"] == [n, n, 0]


class Scripted:
    """A policy whose continuation number k of step j of row i is right when `right(i, j, k)`."""

    def __init__(self, tokenizer, right):
        self.tokenizer, self.right, self.seen = tokenizer, right, []

    def fingerprint(self):
        return "scripted"

    def prefill(self, sequences, cuts):
        return cuts

    def complete(self, state, rollouts, sampling):
        self.seen += [rollout.key for rollout in rollouts]
        return [[*ids_of("7" if self.right(*rollout.key) else "8"), 1] for rollout in rollouts]


def scripted_data(count=10):
    return Dataset.from_list(
        [{"prompt": "q", "completions": ["a", "b", f"{7 if i % 2 else 8}"], "answer": "7"} for i in range(count)]
    )


def right(i, j, k):
    # Row i has its first right roll-out at number i, from step 0; from step 1 none.
    return j == 0 and k >= i


def labels_of(completer, data=None, **kwargs):
    defaults = {"num_rollouts": 4, "grader": ends_with_gold, "rows_per_chunk": 3, "progress": False}
    return label_steps_by_rollout(data or scripted_data(), completer, **{**defaults, **kwargs})


def test_hard_labels_stop_early(tokenizer):
    completer = Scripted(tokenizer, right)
    labelled = labels_of(completer)
    assert labelled["labels"] == [[i < 4, False, i % 2 == 1] for i in range(10)]
    assert labelled["rollouts_total"] == [[min(i + 1, 4), 4, 0] for i in range(10)]
    assert labelled["rollouts_right"] == [[int(i < 4), 0, 0] for i in range(10)]
    full = labels_of(Scripted(tokenizer, right), early_stop=False)
    assert full["labels"] == labelled["labels"]
    assert full["rollouts_total"] == [[4, 4, 0]] * 10
    assert labelled.features["labels"].feature.dtype == "bool"


def test_soft_labels(tokenizer):
    labelled = labels_of(Scripted(tokenizer, right), label="soft")
    assert labelled["labels"] == [[max(0, 4 - i) / 4, 0.0, float(i % 2)] for i in range(10)]
    assert labelled.features["labels"].feature.dtype == "float64"


def test_the_last_step_can_be_rolled_out(tokenizer):
    data = Dataset.from_list(
        [
            {"prompt": "q", "completion_ids": ids_of("a\nb"), "answer": "7"},
            {"prompt": "q", "completion_ids": [*ids_of("a\n7"), 1], "answer": "7"},
        ]
    )
    completer = Scripted(tokenizer, lambda i, j, k: j == 1)
    labelled = labels_of(completer, data, last_step="rollout")
    # The second has its end token, so its own answer is its verdict.
    assert labelled["labels"] == [[False, True], [False, True]]
    assert labelled["rollouts_total"] == [[4, 1], [4, 0]]


def test_columns_of_the_completion(tokenizer):
    texts = ["ab\n\nc\n7", [{"role": "assistant", "content": "ab\n\nc\n7"}]]
    for text in texts:
        data = Dataset.from_list([{"prompt": "q", "completion": text, "gold": "7"}])
        labelled = labels_of(Scripted(tokenizer, right), data, answer_column="gold")
        assert labelled.column_names == ["prompt", "completions", "labels", "rollouts_right", "rollouts_total", "gold"]
        assert labelled[0]["completions"] == ["ab", "c", "7"]
    empty = Dataset.from_list([{"prompt": "q", "completion": c, "answer": "7"} for c in ("", "a\n7")])
    assert len(labels_of(Scripted(tokenizer, right), empty)) == 1


def test_mistakes_are_named(tokenizer, policy, tmp_path):
    completer = Scripted(tokenizer, right)
    with pytest.raises(ValueError, match='label must be "hard" or "soft"'):
        labels_of(completer, label="any")
    with pytest.raises(ValueError, match="no column 'answer'"):
        labels_of(completer, scripted_data().remove_columns("answer"))
    with pytest.raises(ValueError, match="no completions but"):
        labels_of(completer, scripted_data().remove_columns("completions"))
    with pytest.raises(ValueError, match=r"must be a \.parquet file"):
        labels_of(completer, output=tmp_path / "labels.json")
    with pytest.raises(ValueError, match="needs its tokenizer"):
        labels_of(policy)
    with pytest.raises(TypeError, match="got int"):
        labels_of(3)
    with pytest.raises(ValueError, match="temperature must be at least 0"):
        labels_of(completer, temperature=-1.0)
    with pytest.raises(ValueError, match="num_rollouts and rows_per_chunk must be at least 1"):
        labels_of(completer, num_rollouts=0)


# --- Going on after a kill ------------------------------------------------------------------------------------------


def test_a_stopped_job_goes_on_and_does_nothing_twice(tokenizer, tmp_path):
    whole = Scripted(tokenizer, right)
    expected = labels_of(whole, output=tmp_path / "whole.parquet")
    assert Counter(whole.seen).most_common(1)[0][1] == 1

    output, done = tmp_path / "part.parquet", []
    for chunks in (2, 1):
        calls = itertools.count()

        def grader(golds, completions, calls=calls, chunks=chunks):
            # A chunk of three rows asks once for the completions and four times for the waves.
            if next(calls) == 5 * chunks + 2:
                raise KeyboardInterrupt
            return ends_with_gold(golds, completions)

        completer = Scripted(tokenizer, right)
        with pytest.raises(KeyboardInterrupt):
            labels_of(completer, output=output, grader=grader)
        assert not output.exists()
        done.append(completer.seen)
    last = Scripted(tokenizer, right)
    resumed = labels_of(last, output=output)
    assert resumed.to_list() == expected.to_list()
    assert load_dataset("parquet", data_files=str(output), split="train").to_list() == expected.to_list()
    # Chunks 0 and 1 by the first run, 2 by the second, 3 by the third: each run only adds its own, whole.
    assert {key[0] for key in last.seen} == {9}
    assert {key[0] for key in done[1]} == {6, 7, 8, 9}
    again = Scripted(tokenizer, right)
    assert labels_of(again, output=output).to_list() == expected.to_list()
    assert again.seen == []


def test_a_torn_line_is_done_again(tokenizer, tmp_path):
    output = tmp_path / "labels.parquet"
    expected = labels_of(Scripted(tokenizer, right), output=output)
    journal = tmp_path / "labels.journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-10])
    completer = Scripted(tokenizer, right)
    assert labels_of(completer, output=output).to_list() == expected.to_list()
    assert {key[0] for key in completer.seen} == {9}
    assert len(journal.read_text().splitlines()) == 5


def test_a_job_with_other_settings_is_refused(tokenizer, tmp_path):
    output = tmp_path / "labels.parquet"
    labels_of(Scripted(tokenizer, right), output=output)
    with pytest.raises(ValueError, match=r"other settings \(num_rollouts 4 -> 5\)"):
        labels_of(Scripted(tokenizer, right), output=output, num_rollouts=5)
    with pytest.raises(ValueError, match=r"other settings \(data"):
        labels_of(Scripted(tokenizer, right), scripted_data(9), output=output)
    other = Scripted(tokenizer, right)
    other.fingerprint = lambda: "other"
    with pytest.raises(ValueError, match="policy 'scripted' -> 'other'"):
        labels_of(other, output=output)


def test_killed_for_real(tmp_path, monkeypatch):
    """A job with the demo policy killed by SIGKILL, then run to its end, against one that ran through."""
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(
            """
            import re, sys
            import torch
            from trl_grpo_plus.demo import load_demo_policy, load_demo_tokenizer, make_problems
            from trl_grpo_plus.reward_models import label_steps_by_rollout, sample_completions

            torch.set_num_threads(1)

            def grader(golds, completions):
                last = lambda text: (re.findall(r"#### (-?[0-9]+)", text) or [None])[-1]
                return [last(a) == last(b) for a, b in zip(golds, completions)]

            policy, tokenizer = load_demo_policy(), load_demo_tokenizer()
            options = {"max_new_tokens": 48, "temperature": 1.0, "progress": False}
            data = sample_completions(make_problems(12, 0), policy, tokenizer, num_samples=2, **options)
            label_steps_by_rollout(
                data, policy, tokenizer, num_rollouts=4, grader=grader, rows_per_chunk=2, label="soft",
                output=sys.argv[1], **options
            )
            """
        )
    )

    def run(output):
        monkeypatch.setattr(sys, "argv", [str(script), str(output)])
        runpy.run_path(str(script))

    killed = subprocess.Popen([sys.executable, str(script), str(tmp_path / "killed.parquet")])
    journal = tmp_path / "killed.journal.jsonl"
    deadline = time.monotonic() + 120
    while not (journal.exists() and len(journal.read_text().splitlines()) >= 3) and time.monotonic() < deadline:
        assert killed.poll() is None, "the job ended before it could be killed"
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed.parquet").exists()
    before = [json.loads(line) for line in journal.read_text().splitlines()[:3]]
    threads = torch.get_num_threads()
    run(tmp_path / "killed.parquet")
    assert [json.loads(line) for line in journal.read_text().splitlines()[:3]] == before
    run(tmp_path / "whole.parquet")
    torch.set_num_threads(threads)
    tables = [
        load_dataset("parquet", data_files=str(tmp_path / name), split="train").to_list()
        for name in ("killed.parquet", "whole.parquet")
    ]
    assert tables[0] == tables[1]
    assert len(tables[0]) == 24


# --- Completions to label -------------------------------------------------------------------------------------------


def test_sample_completions(policy, tokenizer):
    data = Dataset.from_list([{"prompt": p, "answer": "1", "level": n} for n, p in enumerate(("q", "qa", "qqb"))])
    options = {"num_samples": 3, "max_new_tokens": 6, "progress": False}
    samples = sample_completions(data, policy, tokenizer, batch_size=4, **options)
    assert samples["level"] == [0] * 3 + [1] * 3 + [2] * 3
    assert samples["completion"][0] == tokenizer.decode(samples["completion_ids"][0], skip_special_tokens=True)
    assert len(set(samples["completion"])) > 5
    same = sample_completions(data, policy, tokenizer, batch_size=64, **options)
    assert same["completion_ids"] == samples["completion_ids"]
    labelled = label_steps_by_rollout(
        samples, policy, tokenizer, grader=ends_with_gold, max_new_tokens=4, num_rollouts=2, progress=False
    )
    assert len(labelled) == sum(len(ids) > 0 for ids in samples["completion_ids"])
