"""Step spans against decoding prefix by prefix, on three kinds of tokenizer trained here."""

import gc
import json
import re
import weakref
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trl_grpo_plus.algorithms import steps
from trl_grpo_plus.algorithms.steps import (
    check_delimiter,
    last_step_is_complete,
    split_steps,
    split_steps_batch,
    step_texts,
)

CORPUS = [
    "Step 1: she sold 48/2 = 24 clips in May.\nStep 2: 48 + 24 = 72 clips.\n\nSo the answer is 72.\n#### 72",
    "First,  a blank line.\n\n\nThen  \n  \nwhite space.\r\n\r\nA Windows line.\t\n",
    "café naïve Ünïcode 数学 число ☃ 👩‍👩‍👧 e\u0301",
] * 20


def _wrap(backend, **special):
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def _byte_level(pre_tokenize=True):
    backend = tokenizers.Tokenizer(models.BPE())
    if pre_tokenize:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        # Without the splitting expression, merges run across newlines: tokens that straddle a delimiter.
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<eos>", "<|step|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["</think>", "\n\nAnswer"])
    return _wrap(backend, eos_token="<eos>", additional_special_tokens=["<|step|>"])


def _llama_like():
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(
        [line.replace("\n", " ") for line in CORPUS[:2]],
        trainers.BpeTrainer(vocab_size=180, show_progress=False),
    )
    merges = [tuple(pair) for pair in _model_state(trained)["merges"]]
    pieces = ["<unk>", "<s>", "</s>", "<|step|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(trained.get_vocab(), key=trained.get_vocab().get)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(dict.fromkeys(pieces))},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|step|>"])


def _model_state(backend):
    return json.loads(backend.to_str())["model"]


def _metaspace():
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    alphabet = sorted({char for text in CORPUS for char in text if char != " "} | {"▁"})
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<eos>", "<|step|>"],
        unk_token="<unk>",
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend, unk_token="<unk>", eos_token="<eos>", additional_special_tokens=["<|step|>"])


def _word_level(decoder=None):
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\r?\n"), "isolated"),
            pre_tokenizers.Split(tokenizers.Regex(r"[ \t]+"), "removed"),
        ]
    )
    if decoder:
        backend.decoder = decoder
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<eos>", "<|step|>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend, unk_token="<unk>", eos_token="<eos>", additional_special_tokens=["<|step|>"])


TOKENIZERS = {
    "byte_level": _byte_level(),
    "byte_level_unsplit": _byte_level(pre_tokenize=False),
    "llama_like": _llama_like(),
    "metaspace": _metaspace(),
    "word_level": _word_level(),
    # Tokens that lose their newline behind a known word: no shortcut is valid, prefixes must decide.
    "unknown_decoder": _word_level(decoders.CTC(pad_token="<pad>", word_delimiter_token="|", cleanup=False)),
    "wordpiece": _word_level(decoders.WordPiece(cleanup=True)),
}
EVERY_TOKENIZER = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


# --- An independent reference: no regular expression, no table, no shortcut ---


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def newline_runs(text, at_least):
    """(first character, end) of each maximal stretch of white space from a newline to its last newline."""
    runs, i = [], 0
    while i < len(text):
        if text[i] != "\n":
            i += 1
            continue
        end, count, j = i + 1, 1, i + 1
        while j < len(text) and re.match(r"\s", text[j]):
            if text[j] == "\n":
                end, count = j + 1, count + 1
            j += 1
        if count >= at_least:
            runs.append((i, end))
        i = end
    return runs


def reference_split(ids, tokenizer, find):
    text = decode(tokenizer, ids)
    prefixes = [decode(tokenizer, ids[: n + 1]) for n in range(len(ids))]

    def completing(e):
        return next(n for n, prefix in enumerate(prefixes) if prefix[:e] == text[:e] and len(prefix) >= e)

    def characters_of(last):
        return max(e for e in range(len(text) + 1) if e == 0 or completing(e) <= last)

    ends, taken = [], 0
    for begin, end in find(text):
        if text[taken:begin].strip():
            ends.append(completing(end))
            taken = characters_of(ends[-1])
    if not ids:
        return []
    if ends and not text[taken:].strip():
        ends.pop()
    return sorted({*ends, len(ids) - 1})


def _check_spans(ids, ends, tokenizer):
    if not ids:
        assert ends == []
        return
    assert ends[-1] == len(ids) - 1
    assert ends[0] >= 0 and all(a < b for a, b in pairwise(ends))
    texts = step_texts(ids, ends, tokenizer)
    assert len(texts) == len(ends)
    assert "".join(texts) == decode(tokenizer, ids)
    if len(ends) > 1:
        assert all(text.strip() for text in texts)


text_strategy = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "\n",
                "\n\n",
                "\r\n",
                " ",
                "  ",
                "\t",
                "a",
                "café",
                "e\u0301",
                "👩‍👩‍👧",
                "🏳️‍🌈",
                "数学",
                ".\n\n",
                "=",
                "\u2028",
                "▁",
            ]
        ),
        st.sampled_from(["Step 1: 48/2 = 24 clips.", "\u00a0", "\u3000\n", "So the answer", "�", "😀\n", "\ud7ff"]),
        st.text(st.characters(exclude_categories=("Cs",)), max_size=6),
    ),
    max_size=14,
).map("".join)

PROPERTY = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@EVERY_TOKENIZER
@PROPERTY
@given(text=text_strategy, eos=st.booleans())
@example(text="\n\n\nStep 1\n\nStep 2\n", eos=True)
@example(text="a\r\n\r\nb\n \nc", eos=False)
def test_encoded_text_agrees_with_prefix_decoding(tokenizer, text, eos):
    ids = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * eos
    for name, at_least in (("newline", 1), ("paragraph", 2)):
        ends = split_steps(ids, tokenizer, name)
        assert ends == reference_split(ids, tokenizer, lambda t, n=at_least: newline_runs(t, n))
        _check_spans(ids, ends, tokenizer)


@EVERY_TOKENIZER
@PROPERTY
@given(data=st.data())
def test_arbitrary_ids_agree_with_prefix_decoding(tokenizer, data):
    """What a policy samples need not be what a tokenizer would write: half characters, lone bytes, ids beyond."""
    newlines = [i for i in range(len(tokenizer)) if "\n" in decode(tokenizer, [tokenizer.eos_token_id, i])]
    token = st.one_of(st.integers(0, len(tokenizer) + 3), st.sampled_from(newlines), st.integers(0, 260))
    ids = data.draw(st.lists(token.filter(lambda i: i < len(tokenizer) + 3), max_size=24))
    for name, at_least in (("newline", 1), ("paragraph", 2)):
        ends = split_steps(ids, tokenizer, name)
        assert ends == reference_split(ids, tokenizer, lambda t, n=at_least: newline_runs(t, n))
        _check_spans(ids, ends, tokenizer)


@EVERY_TOKENIZER
@PROPERTY
@given(data=st.data())
def test_callable_offsets_agree_with_prefix_decoding(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=16))
    text = decode(tokenizer, ids)
    offsets = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    ends = split_steps(ids, tokenizer, lambda t: offsets)
    assert ends == reference_split(ids, tokenizer, lambda t: [(e, e) for e in offsets])
    _check_spans(ids, ends, tokenizer)


@EVERY_TOKENIZER
@PROPERTY
@given(text=text_strategy)
def test_end_is_the_token_that_completes_the_delimiter(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = decode(tokenizer, ids)
    for end in split_steps(ids, tokenizer)[:-1]:
        before, after = decode(tokenizer, ids[:end]), decode(tokenizer, ids[: end + 1])
        if "�" not in after and whole.startswith(after) and whole.startswith(before):
            assert "\n" in after[len(before) :]


@pytest.mark.parametrize("name", ["byte_level", "byte_level_unsplit", "llama_like", "metaspace", "word_level"])
def test_known_decoders_need_no_prefix_decoding(name, monkeypatch):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(CORPUS[0] + "\n☃ 👩‍👩‍👧\n" + CORPUS[2], add_special_tokens=False)
    expected = reference_split(ids, tokenizer, lambda t: newline_runs(t, 1))

    def quadratic(self, ids):
        raise AssertionError("decoded prefix by prefix")

    monkeypatch.setattr(steps._Aligner, "align", quadratic)
    assert split_steps(ids, tokenizer) == expected
    assert len(expected) > 2


# --- Worked cases ---


def test_one_token_a_byte():
    """Every character is one to four tokens, so the ends are byte positions that can be counted by hand."""
    alphabet = tokenizers.Tokenizer(
        models.BPE(vocab={char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    alphabet.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet.decoder = decoders.ByteLevel()
    tokenizer = _wrap(alphabet)

    def ends(text, delimiter="newline"):
        return split_steps(tokenizer.encode(text), tokenizer, delimiter)

    assert ends("") == []
    assert ends("ab") == [1]
    assert ends("ab\ncd") == [2, 4]
    assert ends("ab\ncd\n") == [2, 5]
    assert ends("ab\n\n\ncd") == [4, 6]
    assert ends("\n\nab\ncd") == [4, 6]
    assert ends("\n\n") == [1]
    assert ends("a\r\n\r\nb") == [4, 5]
    assert ends("a\n \nb") == [3, 4]
    assert ends("a\n  b\n  ") == [1, 7]
    assert ends("a\n\u3000\nb") == [5, 6]
    assert ends("😀\n数") == [4, 7]
    assert ends("a\nb\n\nc\n\t\nd", "paragraph") == [4, 8, 9]
    assert ends("a。b。c", "。") == [3, 7, 8]
    assert ends("a. b. . c", r"\. ") == [2, 5, 8]
    assert ends("no delimiter", r"\d") == [11]
    assert ends("a1b22c", re.compile(r"\d+")) == [1, 4, 5]
    assert ends("abcdef", lambda text: range(2, len(text), 2)) == [1, 3, 5]
    assert ends("😀😀", lambda text: [1]) == [3, 7]
    truncated = tokenizer.encode("a\n😀")[:-1]
    assert split_steps(truncated, tokenizer) == [1, 4]
    assert step_texts(truncated, [1, 4], tokenizer) == ["a\n", "�"]


def test_tokens_that_straddle_or_hold_several_delimiters():
    pieces = ["\n", "ab", "\nab", "\n}\n", ".\n\n", "\n\n", "x\ny", "c"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    written = {chr(byte): chr(byte) for byte in range(33, 127)} | {"\n": "Ċ"}
    assert set(written.values()) <= set(alphabet)
    vocab = {"".join(written[char] for char in piece): i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = _wrap(backend)
    newline, ab, newline_ab, brace, stop, two, x_y, c = range(len(pieces))

    assert split_steps([ab, stop, c], tokenizer) == [1, 2]
    assert split_steps([ab, newline_ab, c], tokenizer) == [1, 2]
    assert step_texts([ab, newline_ab, c], [1, 2], tokenizer) == ["ab\nab", "c"]
    assert split_steps([ab, brace, c], tokenizer) == [1, 2], "two delimiters completed inside one token"
    assert split_steps([ab, newline, two, stop, c], tokenizer) == [2, 3, 4]
    assert split_steps([newline, newline_ab, c, newline, c], tokenizer) == [3, 4], "leading newlines end no step"
    assert split_steps([x_y, newline, c], tokenizer) == [0, 2], "a token span of white space merges with the next step"
    assert split_steps([x_y, newline], tokenizer) == [1], "... or with the last one when nothing follows"


@EVERY_TOKENIZER
def test_special_tokens_belong_to_the_step_they_follow(tokenizer):
    eos, step = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|step|>")
    first = tokenizer.encode("Step 1:\n", add_special_tokens=False)
    second = tokenizer.encode("she sold\n", add_special_tokens=False)
    ids = [*first, *second, eos, eos]
    expected = reference_split(ids, tokenizer, lambda t: newline_runs(t, 1))
    assert split_steps(ids, tokenizer) == expected
    assert expected[-1] == len(ids) - 1 and len(expected) == len(split_steps(ids[:-2], tokenizer))
    assert split_steps([eos], tokenizer) == [0]
    assert split_steps([eos, eos], tokenizer) == [1]
    assert step_texts([eos], [0], tokenizer) == [""]
    # The text of a special token names that token, not a regular expression.
    marked = [*first, step, *second, step, eos]
    assert split_steps(marked, tokenizer, "<|step|>") == [len(first), len(marked) - 1]


def test_byte_fallback_runs_are_read_together():
    tokenizer = TOKENIZERS["llama_like"]
    byte = {value: tokenizer.convert_tokens_to_ids(f"<0x{value:02X}>") for value in range(256)}
    letter = tokenizer.encode("a", add_special_tokens=False)

    def ends(*values):
        return split_steps([*letter, *(byte[v] for v in values), *letter], tokenizer)

    n = len(letter)
    assert ends(0x0A) == [n, 2 * n]
    assert ends(0x0A, 0xE2, 0x82, 0xAC) == [n, 2 * n + 3], "a newline in a valid run of bytes is a newline"
    assert ends(0x0A, 0xFF) == [2 * n + 1], "one invalid byte turns its whole run into U+FFFD: no newline is left"
    assert ends(0xE2, 0x0A) == [2 * n + 1]


def test_real_text_of_three_steps_keeps_its_delimiters():
    tokenizer = TOKENIZERS["byte_level"]
    text = "Step 1: she sold 24 clips.\n\nStep 2: 48 + 24 = 72\nSo the answer is 72."
    ids = tokenizer.encode(text)
    ends = split_steps(ids, tokenizer)
    assert step_texts(ids, ends, tokenizer) == [
        "Step 1: she sold 24 clips.\n\n",
        "Step 2: 48 + 24 = 72\n",
        "So the answer is 72.",
    ]
    assert step_texts(ids, ends[:2], tokenizer) == ["Step 1: she sold 24 clips.\n\n", "Step 2: 48 + 24 = 72\n"]


def test_input_types_and_batches():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a\nb\nc")
    expected = split_steps(ids, tokenizer)
    for kind in (torch.tensor, np.array, tuple):
        assert split_steps(kind(ids), tokenizer) == expected
    assert split_steps([np.int64(i) for i in ids], tokenizer) == expected
    assert split_steps_batch([ids, torch.tensor(ids[:2]), []], tokenizer) == [expected, [1], []]
    assert all(type(end) is int for end in expected)


def test_cache_follows_tokens_that_are_added_or_made_special():
    tokenizer = _byte_level()
    beyond = len(tokenizer)
    assert split_steps([beyond, *tokenizer.encode("a")], tokenizer) == [1]
    tokenizer.add_tokens(["x\n"])
    assert tokenizer.convert_tokens_to_ids("x\n") == beyond
    assert split_steps([beyond, *tokenizer.encode("a")], tokenizer) == [0, 1]
    tokenizer.add_special_tokens({"pad_token": "x\n"})
    assert split_steps([beyond, *tokenizer.encode("a")], tokenizer) == [1]


def test_cache_does_not_keep_a_tokenizer_alive():
    tokenizer = _byte_level()
    split_steps(tokenizer.encode("a\nb"), tokenizer)
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_a_tokenizer_without_a_rust_backend():
    class Letters:
        all_special_tokens, all_special_ids = ["<e>"], [0]

        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
            assert skip_special_tokens and not clean_up_tokenization_spaces
            return "".join(chr(i) for i in ids if i)

    ids = [*map(ord, "ab\ncd"), 0]
    assert split_steps(ids, Letters()) == [2, 5]
    assert split_steps([97, 0, 98, 0], Letters(), "<e>") == [1, 3]


def test_last_step_is_complete_only_after_a_delimiter():
    tokenizer = TOKENIZERS["byte_level"]

    def complete(text, delimiter="newline"):
        return last_step_is_complete(tokenizer.encode(text), tokenizer, delimiter)

    assert complete("a\nb\n")
    assert complete("a\nb\n ")
    assert not complete("a\nb")
    assert not complete("a")
    assert not complete("a\nb\n", "paragraph")
    assert complete("a. ", r"\. ")


# --- Bad input ---


@pytest.mark.parametrize(
    ("delimiter", "error", "message"),
    [
        ("", ValueError, "matches the empty string"),
        ("a*", ValueError, "matches the empty string"),
        (r"(?=b)", ValueError, "matches the empty string"),
        ("(", ValueError, "nor a valid regular expression"),
        (7, TypeError, "got 7 of type int"),
        (None, TypeError, "got None of type NoneType"),
        (re.compile(b"\n"), TypeError, "pattern of bytes"),
        (lambda text: [2, len(text) + 1], ValueError, "a step longer than the completion"),
        (lambda text: [-1], ValueError, "offset -1"),
        (lambda text: ["1"], TypeError, "offsets are integers"),
        (lambda text: [True], TypeError, "offsets are integers"),
        (lambda text: None, TypeError, "iterable of character offsets"),
    ],
)
def test_bad_delimiters(delimiter, error, message):
    tokenizer = TOKENIZERS["byte_level"]
    with pytest.raises(error, match=re.escape(message)):
        split_steps(tokenizer.encode("a\nb"), tokenizer, delimiter)


@pytest.mark.parametrize("delimiter", ["(", "", 3])
def test_bad_delimiters_fail_before_any_completion(delimiter):
    with pytest.raises((TypeError, ValueError), match="delimiter"):
        check_delimiter(delimiter)
    with pytest.raises((TypeError, ValueError), match="delimiter"):
        split_steps_batch([], TOKENIZERS["byte_level"], delimiter)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([[1, 2], [3]], TypeError, "got list"),
        (torch.tensor([[1, 2]]), TypeError, "got list"),
        (torch.tensor(3), TypeError, "1-D tensor"),
        ([1.0, 2.0], TypeError, "got float"),
        ([True], TypeError, "got bool"),
        ("ab", TypeError, "list or a 1-D tensor"),
        ([1, -100], ValueError, "negative id -100"),
    ],
)
def test_bad_ids(ids, error, message):
    with pytest.raises(error, match=re.escape(message)):
        split_steps(ids, TOKENIZERS["byte_level"])


@pytest.mark.parametrize("ends", [[1, 1], [2, 1], [-1], [0, 9]])
def test_step_texts_refuses_ends_that_are_no_spans(ends):
    with pytest.raises(ValueError, match="step_ends must increase"):
        step_texts([5, 6, 7], ends, TOKENIZERS["byte_level"])
