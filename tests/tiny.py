"""Tiny policies and tokenizers made on the spot, for tests that must not download anything."""

import string

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def char_tokenizer(alphabet: str = string.digits + "+-*/=?:. \n" + string.ascii_lowercase) -> PreTrainedTokenizerFast:
    """One token per character, a pad and an EOS token, and a chat template."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    for char in alphabet:
        vocabulary[char] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def llama(vocab_size: int, seed: int = 0, hidden_size: int = 16, layers: int = 1) -> LlamaForCausalLM:
    """A random Llama of a few thousand parameters; EOS is token 1 and padding token 0."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def save_policy(directory, seed: int = 0) -> str:
    """Saves a tiny policy with its tokenizer; returns the directory."""
    tokenizer = char_tokenizer()
    llama(len(tokenizer), seed).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
