"""Samples continuations of many prefixes of the same sequences, with each shared prefix computed once.

A prefix is a cut of a sequence: the prompt with the completion's first steps. The transformers completer runs a
sequence through the model once and keeps its keys and values; what attention computed up to a cut does not depend on
what follows, so every roll-out from every cut starts from a slice of them.

Each roll-out has a random stream of its own, named by its key. What it samples does not depend on the other roll-outs
in its batch (up to the rounding of the logits), and a job that is done again samples the same.
"""

import hashlib
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

logger = logging.getLogger(__name__)


class Rollout(NamedTuple):
    """One continuation to sample: of sequence `row`, after its first `cut` tokens, with the random stream `key`."""

    row: int
    cut: int
    key: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How continuations are sampled.

    Args:
        max_new_tokens: Most tokens of a continuation.
        temperature: 0 is greedy.
        top_p, top_k: Nucleus and top-k filters; 1.0 and 0 switch them off.
        seed: First part of every random stream's name.
    """

    max_new_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}.")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}.")


class Completer(Protocol):
    """What labelling needs of a policy."""

    tokenizer: PreTrainedTokenizerBase

    def prefill(self, sequences: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]) -> Any:
        """Prepares sequences and the lengths at which they will be cut; the result goes to `complete`."""

    def complete(self, state: Any, rollouts: Sequence[Rollout], sampling: Sampling) -> list[list[int]]:
        """The sampled token ids of each roll-out, with the end token if it was sampled."""

    def fingerprint(self) -> str:
        """Names the policy's weights, to tell a resumed job that its policy has changed."""


class _Prefilled(NamedTuple):
    sequences: list[list[int]]
    cuts: list[list[int]]
    # For each sequence the key and value of each layer, (heads, tokens, head_dim), and the logits after each cut.
    layers: list[list[tuple[torch.Tensor, torch.Tensor]]] | None
    logits: list[dict[int, torch.Tensor]]


class TransformersCompleter:
    """Samples with a transformers model.

    The keys and values are shared where the model's cache is a `DynamicCache` of full-attention layers (Llama, Qwen,
    Mistral without a window, ...). For other caches that a batch can be selected from, each wave of roll-outs computes
    its prefixes anew, batched, and a warning says so.

    Args:
        model: A causal language model; left on its device.
        tokenizer: Its tokenizer.
        batch_size: Most sequences in one forward pass.

    Attributes:
        forward_tokens: Tokens that went through the model, without padding.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 64):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.forward_tokens = 0
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = set(ends if isinstance(ends, (list, tuple)) else [ends])
        self._ends = {end for end in (*ends, tokenizer.eos_token_id) if end is not None}
        self._shares_cache = True
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        # Renamed in transformers 5.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.detach().flatten()[:64].float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    @torch.no_grad()
    def prefill(self, sequences: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]) -> _Prefilled:
        sequences, cuts = [list(s) for s in sequences], [list(c) for c in cuts]
        layers: list[Any] = [None] * len(sequences)
        logits: list[dict[int, torch.Tensor]] = [{} for _ in sequences]
        rows = [i for i, c in enumerate(cuts) if c]
        for start in range(0, len(rows) if self._shares_cache else 0, self.batch_size):
            batch = rows[start : start + self.batch_size]
            # Nothing behind the last cut is needed.
            ids = [sequences[i][: max(cuts[i])] for i in batch]
            read = sorted({cut - 1 for i in batch for cut in cuts[i]})
            output = self._forward(*_pad(ids, "right"), read)
            self.forward_tokens += sum(map(len, ids))
            cache = getattr(output, self._cache_name)
            if not _is_plain(cache):
                self._shares_cache = False
                logger.warning(
                    f"{type(self.model).__name__} has a {type(cache).__name__} whose prefixes cannot "
                    "be cut off, so each wave of roll-outs computes its prefixes anew."
                )
                break
            column = {position: n for n, position in enumerate(read)}
            for n, i in enumerate(batch):
                layers[i] = [
                    (layer.keys[n, :, : len(ids[n])], layer.values[n, :, : len(ids[n])]) for layer in cache.layers
                ]
                logits[i] = {cut: output.logits[n, column[cut - 1]].clone() for cut in cuts[i]}
        return _Prefilled(sequences, cuts, layers if self._shares_cache else None, logits)

    @torch.no_grad()
    def complete(self, state: _Prefilled, rollouts: Sequence[Rollout], sampling: Sampling) -> list[list[int]]:
        results: list[list[int]] = [[] for _ in rollouts]
        # Prefixes of like length side by side need little padding.
        order = sorted(range(len(rollouts)), key=lambda n: rollouts[n].cut)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for n, ids in zip(batch, self._complete(state, [rollouts[n] for n in batch], sampling), strict=True):
                results[n] = ids
        return results

    def _complete(self, state: _Prefilled, rollouts: list[Rollout], sampling: Sampling) -> list[list[int]]:
        device = self.model.device
        length = max(rollout.cut for rollout in rollouts)
        if state.layers is not None:
            cache = _gather_cache([state.layers[r.row] for r in rollouts], [r.cut for r in rollouts], length)
            logits = torch.stack([state.logits[r.row][r.cut] for r in rollouts])
            mask = torch.zeros(len(rollouts), length, dtype=torch.long, device=device)
            for n, rollout in enumerate(rollouts):
                mask[n, length - rollout.cut :] = 1
        else:
            input_ids, mask = _pad([state.sequences[r.row][: r.cut] for r in rollouts], "left")
            mask = mask.to(device)
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            output = self._forward(input_ids, mask, [length - 1], position_ids=positions)
            self.forward_tokens += int(mask.sum())
            cache, logits = getattr(output, self._cache_name), output.logits[:, -1]
            if not isinstance(cache, DynamicCache):
                raise ValueError(
                    f"{type(self.model).__name__} keeps its past in a {type(cache).__name__}, which roll-outs cannot "
                    "be taken out of as they end. Label with vLLM."
                )
        warp = _warpers(sampling)
        uniforms = np.stack([_stream(sampling.seed, r.key).random(sampling.max_new_tokens) for r in rollouts])
        uniforms = torch.from_numpy(uniforms).to(device)
        results: list[list[int]] = [[] for _ in rollouts]
        active = list(range(len(rollouts)))
        position = torch.tensor([r.cut for r in rollouts], device=device)
        for t in range(sampling.max_new_tokens):
            tokens = _draw(logits, uniforms[active, t], warp).tolist()
            for n, token in zip(active, tokens, strict=True):
                results[n].append(token)
            keep = [k for k, token in enumerate(tokens) if token not in self._ends]
            if not keep or t + 1 == sampling.max_new_tokens:
                break
            if len(keep) < len(active):
                index = torch.tensor(keep, device=device)
                cache.batch_select_indices(index)
                mask, position = mask[index], position[index]
                active = [active[k] for k in keep]
            mask = torch.cat([mask, mask.new_ones(len(keep), 1)], dim=1)
            step = torch.tensor([[tokens[k]] for k in keep], device=device)
            past = {self._cache_name: cache}
            output = self._forward(step, mask, [0], position_ids=position[:, None] + t, **past)
            self.forward_tokens += len(keep)
            cache, logits = getattr(output, self._cache_name), output.logits[:, -1]
        return results

    def _forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, read: list[int], **kwargs: Any) -> Any:
        """One forward pass; of the logits only the positions `read` are kept, (B, len(read), V)."""
        device = self.model.device
        if self._keeps_logits:
            kwargs["logits_to_keep"] = torch.tensor(read, device=device)
        was_training = self.model.training
        self.model.eval()
        try:
            output = self.model(
                input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), use_cache=True, **kwargs
            )
        finally:
            self.model.train(was_training)
        if not self._keeps_logits:
            output.logits = output.logits[:, read]
        return output


class VLLMCompleter:
    """Samples with vLLM, whose prefix caching computes a shared prefix once.

    Args:
        llm: A `vllm.LLM`, made with `enable_prefix_caching=True`.
        tokenizer: Its tokenizer. None: the engine's.
    """

    def __init__(self, llm: Any, tokenizer: PreTrainedTokenizerBase | None = None):
        self.llm = llm
        self.tokenizer = tokenizer or llm.get_tokenizer()

    def fingerprint(self) -> str:
        return str(self.llm.llm_engine.model_config.model)

    def prefill(self, sequences: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(sequence) for sequence in sequences]

    def complete(self, state: list[list[int]], rollouts: Sequence[Rollout], sampling: Sampling) -> list[list[int]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                n=1,
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                seed=int(_stream(sampling.seed, rollout.key).integers(2**31)),
            )
            for rollout in rollouts
        ]
        prompts = [{"prompt_token_ids": state[rollout.row][: rollout.cut]} for rollout in rollouts]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def _stream(seed: int, key: tuple[int, ...]) -> np.random.Generator:
    return np.random.default_rng([seed, *key])


def _warpers(sampling: Sampling) -> LogitsProcessorList | None:
    """None for greedy decoding."""
    if sampling.temperature == 0:
        return None
    warp = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warp.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warp.append(TopPLogitsWarper(sampling.top_p))
    return warp


def _draw(logits: torch.Tensor, uniforms: torch.Tensor, warp: LogitsProcessorList | None) -> torch.Tensor:
    """One token a row of logits (n, V) by inverse transform: the first whose cumulated probability is above u."""
    if warp is None:
        return logits.argmax(dim=-1)
    cumulated = warp(None, logits.float()).softmax(dim=-1).double().cumsum(dim=-1)
    u = (uniforms * cumulated[:, -1]).unsqueeze(1)
    # `right` passes over tokens of probability 0.
    return torch.searchsorted(cumulated, u, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)


def _pad(sequences: Sequence[Sequence[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, sequences))
    input_ids = torch.zeros(len(sequences), length, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for n, ids in enumerate(sequences):
        where = slice(0, len(ids)) if side == "right" else slice(length - len(ids), length)
        input_ids[n, where] = torch.tensor(ids)
        mask[n, where] = 1
    return input_ids, mask


def _is_plain(cache: Any) -> bool:
    """Whether keys and values up to any token can be sliced off the cache."""
    return isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers)


def _gather_cache(layers: list[list[tuple[torch.Tensor, torch.Tensor]]], cuts: list[int], length: int) -> DynamicCache:
    """A cache of n prefixes, padded at the left to `length`; keys carry their positions, so padding may shift them."""
    cache = DynamicCache()
    for layer in range(len(layers[0])):
        pair = []
        for which in (0, 1):
            first = layers[0][layer][which]
            states = first.new_zeros(len(layers), first.shape[0], length, first.shape[-1])
            for n, cut in enumerate(cuts):
                states[n, :, length - cut :] = layers[n][layer][which][:, :cut]
            pair.append(states)
        cache.update(*pair, layer)
    return cache
