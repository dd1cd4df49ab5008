"""Each format on a tiny random model with the real token layout, against a slow reference that goes step by step.

The references search the tag's id, cut the sequence after each step and run one sequence at a time, as the model cards
of the published models do; nothing of the package's encoding is used in them.
"""

import json
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
)

from trl_grpo_plus.reward_models.formats import FORMATS, make_format
from trl_grpo_plus.reward_models.prm import ProcessRewardModel, ScoredStep, aggregate, locate_steps

PROMPTS = [
    "Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?",
    "Was kosten 3 Brötchen zu je 2 €?",
]
STEPS = [
    ["Natalia sold 48 / 2 = 24 clips in May.", "Altogether 48 + 24 = 72 clips.", "The answer is: 72"],
    ["3 · 2 = 6 €, also 6 € 🥐", "#### 6"],
]
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_CHAT = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
)


def byte_level_tokenizer(special_tokens, chat_template=None, **kwargs):
    """Byte-level BPE as in Qwen and Llama 3, where `.\\n` and `\\n\\n` are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [*PROMPTS, *("\n".join(s) for s in STEPS), "May.\n\n", "clips.\n", "\n\n"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special_tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **kwargs)


def sentencepiece_like_tokenizer():
    """Like Mistral's: spaces are `▁`, one in front of every text, newlines and unknown characters are bytes."""
    characters = sorted(set("".join([*PROMPTS, *chain(*STEPS)])) - {" ", "\n", "🥐", "€"})
    pieces = ["▁ки", "▁+", "▁-", "▁The", "▁answer", "▁is", "▁sold", "▁clips", *characters, "▁", "к", "и"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    merges = []
    for word in ("▁ки", "▁+", "▁-", "▁The", "▁answer", "▁is", "▁sold", "▁clips"):
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            for token in (left, right, word[:end]):
                vocabulary.setdefault(token, len(vocabulary))
            if (left, right) not in merges:
                merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def run(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def close(scores, expected):
    assert [len(row) for row in scores] == [len(row) for row in expected]
    for row, reference in zip(scores, expected, strict=True):
        assert row == pytest.approx(reference, abs=1e-5)
    # A reference that gives the same number everywhere would prove nothing.
    flat = list(chain(*expected))
    assert max(flat) - min(flat) > 1e-3


def plain(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def token_classifier(tmp_path_factory):
    tokenizer = byte_level_tokenizer(
        ["<bos>", "<eos>", "<pad>"], bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    torch.manual_seed(0)
    model = LlamaForTokenClassification(LlamaConfig(vocab_size=len(tokenizer), num_labels=2, **SHAPE)).eval()
    path = tmp_path_factory.mktemp("token-classification")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path, model, tokenizer


def test_token_classification(token_classifier):
    path, model, tokenizer = token_classifier
    expected = []
    for prompt, steps in zip(PROMPTS, STEPS, strict=True):
        ids, row = [tokenizer.bos_token_id, *plain(tokenizer, prompt)], []
        for step in steps:
            ids = ids + plain(tokenizer, step) + plain(tokenizer, "\n")
            row.append(run(model, ids)[-1].softmax(-1)[1].item())
        expected.append(row)

    prm = ProcessRewardModel.from_pretrained(path, batch_size=2)
    assert prm.format.name == "token_classification"
    close(prm.score_steps(PROMPTS, STEPS), expected)
    # The line end of a sampled step gives way to the separator.
    with_ends = [[step + "\n" for step in steps[:-1]] + steps[-1:] for steps in STEPS]
    close(prm(prompts=PROMPTS, completions=None, completion_ids=None, steps=with_ends, answer=["72", "6"]), expected)
    # One at a time, in one batch, and in another order: padding changes nothing.
    one = ProcessRewardModel.from_pretrained(path, batch_size=1)
    close(one.score_steps(PROMPTS[::-1], STEPS[::-1])[::-1], expected)


def test_token_pair(token_classifier, tmp_path):
    _, _, tokenizer = token_classifier
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE)).eval()
    good, bad = plain(tokenizer, "+")[0], plain(tokenizer, "-")[0]
    expected = []
    for prompt, steps in zip(PROMPTS, STEPS, strict=True):
        ids, row = [tokenizer.bos_token_id, *plain(tokenizer, prompt)], []
        for step in steps:
            ids = ids + plain(tokenizer, step) + plain(tokenizer, "\n\n")
            row.append(run(model, ids)[-1][[good, bad]].softmax(-1)[0].item())
        expected.append(row)
    prm = ProcessRewardModel(model, tokenizer, make_format("token_pair", separator="\n\n"))
    close(prm.score_steps(PROMPTS, STEPS), expected)

    prm.save_pretrained(tmp_path)
    again = ProcessRewardModel.from_pretrained(tmp_path)
    assert again.format == prm.format
    close(again.score_steps(PROMPTS, STEPS), expected)


def test_math_shepherd(tmp_path):
    tokenizer = sentencepiece_like_tokenizer()
    torch.manual_seed(2)
    model = MistralForCausalLM(MistralConfig(vocab_size=len(tokenizer), **SHAPE)).eval()
    # As on the model card: ids of "+ -" without BOS, the tag's id searched in the ids of "question output".
    candidates = tokenizer.encode("+ -")[1:]
    tag_id = tokenizer.encode("ки")[-1]
    assert tokenizer.convert_ids_to_tokens([*candidates, tag_id]) == ["▁+", "▁-", "▁ки"]
    expected = []
    for prompt, steps in zip(PROMPTS, STEPS, strict=True):
        output = " ки\n".join(steps) + " ки"
        ids = torch.tensor(tokenizer.encode(f"{prompt} {output}"))
        probabilities = run(model, ids.tolist())[:, candidates].softmax(-1)[:, 0]
        expected.append(probabilities[ids == tag_id].tolist())

    path = tmp_path / "math-shepherd-mistral-7b-prm"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    prm = ProcessRewardModel.from_pretrained(path)
    assert prm.format.name == "math_shepherd"
    close(prm.score_steps(PROMPTS, STEPS), expected)

    numbered = ProcessRewardModel(model, tokenizer, make_format("math_shepherd", number_steps=True))
    by_hand = [[f"Step {j + 1}: {step}" for j, step in enumerate(steps)] for steps in STEPS]
    close(numbered.score_steps(PROMPTS, STEPS), prm.score_steps(PROMPTS, by_hand))
    close(numbered.score_steps(PROMPTS, by_hand), prm.score_steps(PROMPTS, by_hand))


def test_a_tag_in_the_text_of_a_step_is_not_taken_for_a_step_end():
    tokenizer = sentencepiece_like_tokenizer()
    torch.manual_seed(2)
    model = MistralForCausalLM(MistralConfig(vocab_size=len(tokenizer), **SHAPE)).eval()
    prm = ProcessRewardModel(model, tokenizer, "math_shepherd")
    steps = ["The answer ки is ки", "is 72"]
    ids = tokenizer.encode(f"{PROMPTS[0]} The answer ки is ки ки\nis 72 ки")
    tags = [i for i, token in enumerate(ids) if token == tokenizer.encode("ки")[-1]]
    assert len(tags) == 4
    probabilities = run(model, ids)[:, tokenizer.encode("+ -")[1:]].softmax(-1)[:, 0]
    assert prm.score_steps(PROMPTS[:1], [steps])[0] == pytest.approx(
        probabilities[[tags[2], tags[3]]].tolist(), abs=1e-5
    )


QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<extra_0>"]


class QwenProcessRewardModel(nn.Module):
    """What the remote code of Qwen2.5-Math-PRM does."""

    def __init__(self, body):
        super().__init__()
        self.model = body
        size = body.config.hidden_size
        self.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 2))

    def forward(self, ids):
        return type("Output", (), {"logits": self.score(self.model(ids).last_hidden_state)})


def qwen_checkpoint(path, sharded=False):
    tokenizer = byte_level_tokenizer(QWEN_SPECIAL, CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    torch.manual_seed(3)
    model = QwenProcessRewardModel(Qwen2Model(Qwen2Config(vocab_size=len(tokenizer), **SHAPE))).eval()
    for layer in (model.score[0], model.score[2]):
        nn.init.normal_(layer.weight, std=0.6)
    path.mkdir(exist_ok=True)
    model.model.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["Qwen2ForProcessRewardModel"]
    # The published config names remote code; no file of it is here, so running it would fail.
    config["auto_map"] = {
        "AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig",
        "AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel",
    }
    (path / "config.json").write_text(json.dumps(config))
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if sharded:
        head = {name: state.pop(name) for name in list(state) if name.startswith("score.")}
        save_file(state, path / "model-00001-of-00002.safetensors", {"format": "pt"})
        save_file(head, path / "model-00002-of-00002.safetensors", {"format": "pt"})
        shard = dict.fromkeys(state, "model-00001-of-00002.safetensors")
        shard |= dict.fromkeys(head, "model-00002-of-00002.safetensors")
        index = {"metadata": {"total_size": 0}, "weight_map": shard}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(state, path / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(path)
    return model, tokenizer


@pytest.mark.parametrize("sharded", [False, True])
def test_qwen(tmp_path, sharded):
    model, tokenizer = qwen_checkpoint(tmp_path, sharded)
    expected = []
    for prompt, steps in zip(PROMPTS, STEPS, strict=True):
        text = (
            "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
            f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{'<extra_0>'.join(steps)}<extra_0><|im_end|>\n"
        )
        ids = torch.tensor(plain(tokenizer, text))
        probabilities = run(model, ids.tolist()).softmax(-1)[:, 1]
        expected.append(probabilities[ids == tokenizer.convert_tokens_to_ids("<extra_0>")].tolist())

    prm = ProcessRewardModel.from_pretrained(tmp_path)
    assert prm.format.name == "qwen"
    close(prm.score_steps(PROMPTS, STEPS), expected)
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    close(prm.score_steps(messages, [[step + "\n\n" for step in steps] for steps in STEPS]), expected)


def test_skywork(tmp_path):
    tokenizer = byte_level_tokenizer(
        ["<|endoftext|>", "<|im_end|>"], eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    torch.manual_seed(4)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **SHAPE)).eval()
    head = nn.Linear(16, 1)
    nn.init.normal_(head.weight, std=1.0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # The published checkpoint is the language model's with the value head's tensors added.
    state = load_file(tmp_path / "model.safetensors")
    state |= {"v_head.summary.weight": head.weight.data, "v_head.summary.bias": head.bias.data}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForPrmModel"]}))

    newline = plain(tokenizer, "\n")[-1]
    expected = []
    for prompt, steps in zip(PROMPTS, STEPS, strict=True):
        ids, row = plain(tokenizer, prompt + "\n"), []
        for step in steps:
            ids = [*ids, *plain(tokenizer, step), newline]
            with torch.no_grad():
                hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
                row.append(head(hidden[0, -1]).sigmoid().item())
        expected.append(row)
    prm = ProcessRewardModel.from_pretrained(tmp_path)
    assert prm.format.name == "skywork"
    close(prm.score_steps(PROMPTS, STEPS), expected)


def test_rlhflow(tmp_path):
    special = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = byte_level_tokenizer(
        special, LLAMA_CHAT, bos_token=special[0], eos_token=special[1], pad_token=special[1]
    )
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE)).eval()
    candidates = [tokenizer.encode("+")[-1], tokenizer.encode("-")[-1]]
    expected = []
    for prompt, steps in zip(PROMPTS, STEPS, strict=True):
        conversation, row = [], []
        for j, step in enumerate(steps):
            conversation += [
                {"role": "user", "content": f"{prompt} {step}" if j == 0 else step},
                {"role": "assistant", "content": "+"},
            ]
            # Its authors read the third logits from the end: the reply is the last token but one.
            ids = plain(tokenizer, tokenizer.apply_chat_template(conversation, tokenize=False))
            row.append(run(model, ids)[-3, candidates].softmax(-1)[0].item())
        expected.append(row)
    path = tmp_path / "RLHFlow" / "Llama3.1-8B-PRM-Deepseek-Data"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    prm = ProcessRewardModel.from_pretrained(path)
    assert prm.format.name == "rlhflow"
    close(prm.score_steps(PROMPTS, STEPS), expected)
    plus = [["1 + 1 = 2 +", "+"]]
    assert len(prm.score_steps(PROMPTS[:1], plus)[0]) == 2


# --- Sampled token ids ---------------------------------------------------------------------------------------------


def test_sampled_ids_are_scored_as_they_were_sampled(token_classifier):
    path, model, tokenizer = token_classifier
    prm = ProcessRewardModel.from_pretrained(path)
    # Sampled character by character: another way to write the same text than the tokenizer's own.
    steps = ["48 / 2 = 24 clips in May.\n", "Altogether 72"]
    sampled = [[i for char in step for i in plain(tokenizer, char)] for step in steps]
    completion = [*chain(*sampled), tokenizer.eos_token_id]
    prefix = [tokenizer.bos_token_id, *plain(tokenizer, PROMPTS[0])]
    newline = plain(tokenizer, "\n")
    first = prefix + sampled[0][:-1] + newline
    second = first + sampled[1] + newline
    expected = [run(model, ids)[-1].softmax(-1)[1].item() for ids in (first, second)]
    (scores,) = prm(prompts=PROMPTS[:1], completions=None, completion_ids=[completion], steps=[steps])
    assert scores == pytest.approx(expected, abs=1e-5)
    from_text = prm.score_steps(PROMPTS[:1], [steps])[0]
    assert scores != pytest.approx(from_text, abs=1e-4)

    never = ProcessRewardModel.from_pretrained(path, token_ids=False)
    assert never(prompts=PROMPTS[:1], completions=None, completion_ids=[completion], steps=[steps])[0] == from_text


def test_a_line_end_that_shares_its_token_with_text(token_classifier):
    path, model, tokenizer = token_classifier
    fused = next(i for token, i in tokenizer.get_vocab().items() if tokenizer.decode([i]) == ".\n")
    ids = [*plain(tokenizer, "Natalia sold"), fused, *plain(tokenizer, "72")]
    prm = ProcessRewardModel.from_pretrained(path, token_ids=True)
    (scores,) = prm(prompts=["Q"], completions=None, completion_ids=[ids], steps=[["Natalia sold.\n", "72"]])
    prefix = [tokenizer.bos_token_id, *plain(tokenizer, "Q")]
    first = prefix + ids[:2] + plain(tokenizer, ".") + plain(tokenizer, "\n")
    assert tokenizer.decode(ids[:2]) == "Natalia sold"
    assert scores[0] == pytest.approx(run(model, first)[-1].softmax(-1)[1].item(), abs=1e-5)


def test_ids_of_another_tokenizer_go_through_the_text(token_classifier):
    path, _, tokenizer = token_classifier
    foreign = [[5, 6, 7, 8]]
    steps = [["48 / 2 = 24\n", "72"]]
    assert locate_steps(foreign[0], steps[0], tokenizer) is None
    prm = ProcessRewardModel.from_pretrained(path)
    assert prm(prompts=["Q"], completions=None, completion_ids=foreign, steps=steps) == prm.score_steps(["Q"], steps)
    strict = ProcessRewardModel.from_pretrained(path, token_ids=True)
    with pytest.raises(ValueError, match="do not decode to its steps"):
        strict(prompts=["Q"], completions=None, completion_ids=foreign, steps=steps)


def test_locate_steps_with_bytes_of_one_character_apart(token_classifier):
    tokenizer = token_classifier[2]
    steps = ["6 € 🥐\n", "\u00fc"]
    ids = plain(tokenizer, steps[0]) + plain(tokenizer, steps[1]) + [tokenizer.eos_token_id]
    ends = locate_steps(ids, steps, tokenizer)
    assert ends == [len(plain(tokenizer, steps[0])) - 1, len(ids) - 1]


# --- Behaviour of the model object ---------------------------------------------------------------------------------


def test_score_splits_and_pairs(token_classifier):
    prm = ProcessRewardModel.from_pretrained(token_classifier[0])
    text = "First.\n\nSecond line\nthird"
    (steps,) = prm.score(["Q"], [text])
    assert [type(step) for step in steps] == [ScoredStep] * 3
    assert "".join(step.text for step in steps) == text
    assert [step.text for step in steps] == ["First.\n\n", "Second line\n", "third"]
    assert [s.score for s in steps] == prm.score_steps(["Q"], [["First.", "Second line", "third"]])[0]
    (paragraphs,) = prm.score(["Q"], [text], delimiter="paragraph")
    assert [step.text for step in paragraphs] == ["First.\n\n", "Second line\nthird"]
    assert prm.score(["Q"], [[{"role": "assistant", "content": text}]])[0] == steps
    assert prm.score(["Q"], [["First.", "Second line", "third"]])[0][2].score == steps[2].score
    assert prm.score(["Q", "Q"], ["", text])[0] == []


def test_too_long(token_classifier, caplog):
    path = token_classifier[0]
    prm = ProcessRewardModel.from_pretrained(path)
    assert prm.max_length == 512
    full = prm.score_steps(PROMPTS, STEPS)
    (encoded,) = [prm.format.encode(prm.tokenizer, PROMPTS[0], STEPS[0])]
    limit = encoded.positions[1] + 1
    short = ProcessRewardModel.from_pretrained(path, max_length=limit)
    with pytest.raises(ValueError, match=rf"Completion 0 .* {len(encoded.input_ids)} tokens .* max_length={limit}"):
        short.score_steps(PROMPTS, STEPS)
    skip = ProcessRewardModel.from_pretrained(path, max_length=limit, too_long="skip")
    scores = skip.score_steps(PROMPTS[:1], STEPS[:1])
    assert scores[0][:2] == pytest.approx(full[0][:2], abs=1e-6)
    assert scores[0][2] is None
    assert "1 of their steps are not scored" in caplog.text


def test_mistakes_are_named(token_classifier, tmp_path):
    path, _, tokenizer = token_classifier
    with pytest.raises(ValueError, match="format must be one of 'token_classification'"):
        ProcessRewardModel.from_pretrained(path, format="shepherd")
    with pytest.raises(ValueError, match="has no option 'separatr'"):
        ProcessRewardModel.from_pretrained(path, format="token_classification", format_options={"separatr": ""})
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        ProcessRewardModel.from_pretrained(path, batch_size=0)
    with pytest.raises(ValueError, match="too_long must be"):
        ProcessRewardModel.from_pretrained(path, too_long="cut")
    with pytest.raises(ValueError, match="cannot take sampled ids"):
        ProcessRewardModel.from_pretrained(path, format="math_shepherd", token_ids=True)
    prm = ProcessRewardModel.from_pretrained(path)
    with pytest.raises(ValueError, match="2 prompts, 1 lists of steps"):
        prm.score_steps(PROMPTS, STEPS[:1])
    # A plain language model under a name that says nothing.
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"do not tell the format.*LlamaForCausalLM"):
        ProcessRewardModel.from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"no tensor under 'score\.0\."):
        ProcessRewardModel.from_pretrained(tmp_path / "model", format="qwen")
    with pytest.raises(ValueError, match="step_tag '<extra_0>' must be one token"):
        make_format("math_shepherd", step_tag="<extra_0>").encode(tokenizer, "Q", ["step"])


def test_slow_tokenizers_are_refused_where_offsets_are_needed():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="character offsets; Slow is a slow one"):
        make_format("math_shepherd").encode(Slow(), "Q", ["step"])


def test_device_name_and_training_mode(token_classifier):
    prm = ProcessRewardModel.from_pretrained(token_classifier[0])
    assert prm.__name__ == token_classifier[0].name
    assert prm.to("cpu") is prm
    assert prm.device == torch.device("cpu")
    prm.model.train()
    prm.score_steps(PROMPTS, STEPS)
    assert prm.model.training
    half = ProcessRewardModel.from_pretrained(token_classifier[0], dtype=torch.bfloat16)
    assert next(half.model.parameters()).dtype == torch.bfloat16
    assert half.score_steps(PROMPTS, STEPS)[0] == pytest.approx(prm.score_steps(PROMPTS, STEPS)[0], abs=0.05)


def test_language_model_head_is_applied_only_where_scores_stand(token_classifier):
    tokenizer = token_classifier[2]
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE)).eval()
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[1]))
    prm = ProcessRewardModel(model, tokenizer, "token_pair", batch_size=4)
    prm.score_steps(PROMPTS, STEPS)
    assert rows == [5]


def test_aggregate():
    assert aggregate([0.5, None, 0.2]) == 0.2
    assert aggregate([0.5, 0.2], "product") == pytest.approx(0.1)
    assert aggregate([0.5, 0.2], "mean") == pytest.approx(0.35)
    assert aggregate([0.5, 0.2], "last") == 0.2
    assert aggregate([None]) is None
    with pytest.raises(ValueError, match="how must be"):
        aggregate([0.5], "max")


def test_every_format_has_a_test():
    assert set(FORMATS) == {"token_classification", "token_pair", "math_shepherd", "qwen", "rlhflow", "skywork"}
