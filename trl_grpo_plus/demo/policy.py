"""The demo policy: a Llama under 1M parameters with a word-level tokenizer, and its weights shipped in the package."""

import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_grpo_plus.demo.problems import GAINS, ITEMS, LOSSES, PRONOUNS

WEIGHTS_DIR = Path(__file__).parent / "weights"

# Wider than the true values (0 to 48): a trace that slipped goes on from its wrong value, below zero too.
NUMBERS = range(-20, 100)
_TOKEN = r" ?-?\d+| ?[A-Za-z]+| [-+=]|####|\n|[.?]"
_PAD, _EOS, _UNK = "<pad>", "<eos>", "<unk>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer. A token is a word, a number, a sign or a newline, with the space before it if there is
    one, as in byte-level BPE: decoding is concatenation, so it is exact for any cut of the ids."""
    text = " ".join(["has How many does have now", *PRONOUNS, *PRONOUNS.values(), *ITEMS, *GAINS, *LOSSES])
    words = dict.fromkeys(re.findall(r"[A-Za-z]+", text))
    tokens = [_PAD, _EOS, _UNK, "\n", "####", ".", "?", " +", " -", " ="]
    tokens += [f"{space}{word}" for word in (*words, *NUMBERS) for space in ("", " ")]
    vocabulary = {token: index for index, token in enumerate(tokens)}

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_TOKEN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_EOS,
        unk_token=_UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def build_policy(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """Builds the untrained policy in float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def load_demo_tokenizer(path: str | Path = WEIGHTS_DIR) -> PreTrainedTokenizerFast:
    """Loads the shipped tokenizer: word-level, numbers and the newline are tokens of their own, decoding is exact."""
    return AutoTokenizer.from_pretrained(path)


def load_demo_policy(path: str | Path = WEIGHTS_DIR) -> LlamaForCausalLM:
    """Loads the shipped warm-start policy in float32. `trl_grpo_plus.demo.warmstart` makes the weights.

    It solves nearly every held-out problem greedily and about half of them when sampled at temperature 1.
    """
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
