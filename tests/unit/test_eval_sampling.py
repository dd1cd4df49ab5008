"""Continuous sampling against `model.generate` and against running every row alone, on tiny models made here."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from trl_grpo_plus.evaluation.sampling import (
    ContinuousSampler,
    SamplingParams,
    TokenRequest,
    choose,
    cut_at,
    stream,
)

VOCAB = 64


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def make_model(kind="llama", seed=0):
    torch.manual_seed(seed)
    common = {"vocab_size": VOCAB, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(n_positions=256, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=False, **common)
        )
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(max_position_embeddings=256, sliding_window=8, **shape, **common))
    else:
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=256, **shape, **common))
    with torch.no_grad():
        # Sharper than fresh weights give, so that completions end at different lengths.
        model.get_output_embeddings().weight.mul_(8)
    return model.eval()


def make_requests(count, samples=1, shared=0, seed=0):
    rng = np.random.default_rng(seed)
    head = rng.integers(2, VOCAB, size=shared).tolist()
    prompts = [tuple(head + rng.integers(2, VOCAB, size=rng.integers(1, 30)).tolist()) for _ in range(count)]
    return [TokenRequest(str(i), s, p) for i, p in enumerate(prompts) for s in range(samples)]


def sample_all(model, tokenizer, requests, params, **kwargs):
    sampler = ContinuousSampler(model, tokenizer, params, **kwargs)
    results = {(g.problem_id, g.sample): g for g in sampler.run(requests)}
    assert len(results) == len(requests)
    return results, sampler


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("shared", [0, 24])
def test_greedy_equals_generate_row_by_row(kind, shared, tokenizer):
    model = make_model(kind)
    eos = list(range(1, 9))
    model.generation_config.eos_token_id = eos
    requests = make_requests(23, shared=shared)
    got, sampler = sample_all(model, tokenizer, requests, SamplingParams(max_tokens=40), batch_size=5)
    for r in requests:
        out = model.generate(
            torch.tensor([r.prompt_ids]),
            attention_mask=torch.ones(1, len(r.prompt_ids)).long(),
            max_new_tokens=40,
            do_sample=False,
        )[0, len(r.prompt_ids) :].tolist()
        g = got[r.problem_id, 0]
        assert (g.text, g.num_tokens) == (tokenizer.decode(out, skip_special_tokens=True), len(out))
        assert g.finish_reason == ("stop" if out[-1] in eos else "length")
    lengths = {g.num_tokens for g in got.values()}
    assert len(lengths) > 5, "rows should finish at different times, or the refill is not tested"
    if shared and kind != "mistral":
        own = sum(len(r.prompt_ids) - shared for r in requests)
        assert sampler.stats["prefilled_tokens"] == shared + own


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, temperature=1.0, seed=3),
        SamplingParams(max_tokens=20, temperature=0.7, top_p=0.8, seed=3),
        SamplingParams(max_tokens=20, temperature=1.3, top_k=5, seed=3),
    ],
)
def test_a_sample_does_not_depend_on_its_batch(params, tokenizer):
    model = make_model()
    requests = make_requests(6, samples=4, shared=20)
    whole, _ = sample_all(model, tokenizer, requests, params, batch_size=8)
    alone, _ = sample_all(model, tokenizer, requests, params, batch_size=1)
    assert whole == alone
    part, _ = sample_all(model, tokenizer, requests[5:15][::-1], params, batch_size=5)
    assert all(whole[key] == g for key, g in part.items())
    texts = [whole["0", s].text for s in range(4)]
    assert len(set(texts)) == 4, "the samples of one problem must differ"
    other, _ = sample_all(model, tokenizer, requests, SamplingParams(**{**vars(params), "seed": 4}), batch_size=8)
    assert other != whole


def test_close_calls_are_decided_on_the_row_alone(tokenizer):
    """With all tokens nearly tied, rounding would decide; the margin hands those choices to a run of one row."""
    model = make_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-5)
    requests = make_requests(6)
    a, sampler = sample_all(model, tokenizer, requests, SamplingParams(max_tokens=12), batch_size=6)
    b, _ = sample_all(model, tokenizer, requests, SamplingParams(max_tokens=12), batch_size=2)
    assert sampler.stats["close_calls"] > 50
    assert a == b


def test_choose_greedy_and_margins():
    logits = torch.tensor([[0.0, 1.0, 0.9999], [3.0, 1.0, 2.0]])
    tokens, uncertain = choose(logits, [0.0, 0.0], SamplingParams())
    assert tokens.tolist() == [1, 0]
    assert uncertain.tolist() == [True, False]


def test_choose_inverts_the_distribution():
    probs = torch.tensor([[0.1, 0.2, 0.4, 0.3]])
    hot = SamplingParams(temperature=1.0)
    for u, token in ((0.05, 0), (0.25, 1), (0.5, 2), (0.95, 3), (0.0, 0), (1 - 1e-16, 3)):
        assert choose(probs.log(), [u], hot)[0].tolist() == [token]
    # An edge at 0.3 within 1e-4 is too close to call.
    assert choose(probs.log(), [0.30005], hot)[1].tolist() == [True]
    assert choose(probs.log(), [0.31], hot)[1].tolist() == [False]
    # Temperature 0.5 squares the probabilities: 0.01, 0.04, 0.16, 0.09 of 0.30.
    cold = SamplingParams(temperature=0.5)
    assert choose(probs.log(), [0.16], cold)[0].tolist() == [1]
    assert choose(probs.log(), [0.17], cold)[0].tolist() == [2]
    # Nucleus 0.65 keeps tokens 2 and 3 (0.4 + 0.3); in vocabulary order 2 takes the first 4/7.
    nucleus = SamplingParams(temperature=1.0, top_p=0.65)
    assert choose(probs.log(), [0.57], nucleus)[0].tolist() == [2]
    assert choose(probs.log(), [0.58], nucleus)[0].tolist() == [3]
    # top_k 1 is greedy.
    for u in (0.01, 0.99):
        assert choose(probs.log(), [u], SamplingParams(temperature=1.0, top_k=1))[0].tolist() == [2]


def test_sampled_frequencies_follow_the_model(tokenizer):
    model = make_model()
    prompt = (5, 9, 33)
    requests = [TokenRequest("p", s, prompt) for s in range(2000)]
    got, sampler = sample_all(
        model, tokenizer, requests, SamplingParams(max_tokens=1, temperature=1.0), batch_size=500
    )
    assert sampler.stats["prefilled_tokens"] <= 4 * len(prompt), "one run of the prompt a group of samples"
    with torch.no_grad():
        probs = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    counts = Counter(g.text for g in got.values())
    for token in probs.topk(3).indices.tolist():
        p = probs[token].item()
        text = tokenizer.decode([token], skip_special_tokens=True)
        assert counts[text] / 2000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 2000))


def test_streams_are_independent_of_order():
    a = stream(0, "7", 3).random(4).tolist()
    stream(0, "7", 2).random(100)
    assert stream(0, "7", 3).random(4).tolist() == a
    assert len({tuple(stream(s, p, i).random(2)) for s in (0, 1) for p in ("1", "11") for i in (1, 11)}) == 8


def test_stop_strings_end_and_are_cut(tokenizer):
    model = make_model()
    requests = make_requests(8)
    free, _ = sample_all(model, tokenizer, requests, SamplingParams(max_tokens=30))
    request, words = next(
        (r, free[r.problem_id, 0].text.split()) for r in requests if free[r.problem_id, 0].num_tokens > 8
    )
    stop = f"{words[4]} {words[5]}"
    got, _ = sample_all(model, tokenizer, [request], SamplingParams(max_tokens=30, stop=(stop,)))
    g = got[request.problem_id, 0]
    assert g.finish_reason == "stop"
    assert g.text == cut_at(" ".join(words), [stop])
    assert g.num_tokens <= 6


def test_context_limits(tokenizer):
    model = make_model()
    long, close = tuple([5] * 256), tuple([7] * 250)
    got, _ = sample_all(
        model,
        tokenizer,
        [TokenRequest("long", 0, long), TokenRequest("close", 0, close), TokenRequest("short", 0, (5,))],
        SamplingParams(max_tokens=20),
    )
    assert (got["long", 0].finish_reason, got["long", 0].num_tokens) == ("prompt_too_long", 0)
    assert got["close", 0].num_tokens <= 6
    assert got["short", 0].num_tokens > 0


def test_training_mode_is_restored_and_no_gradient_kept(tokenizer):
    model = make_model().train()
    sample_all(model, tokenizer, make_requests(2), SamplingParams(max_tokens=3))
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_recurrent_models_are_refused(tokenizer):
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="vllm or server"):
        ContinuousSampler(model, tokenizer, SamplingParams())


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"stop": ("",)},
    ],
)
def test_bad_parameters_are_named(bad):
    name = "stop" if "stop" in bad else next(iter(bad))
    with pytest.raises(ValueError, match=name):
        SamplingParams(**bad)
