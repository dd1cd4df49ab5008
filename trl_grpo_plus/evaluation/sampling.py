"""Sampling from a transformers model with continuous refill, whose results do not depend on how rows were batched.

Departures from `model.generate`:

- A finished row leaves the batch at once and its place is given to the next prompt, so no step is spent on padding.
- The key-value cache is written in place into preallocated slots instead of being concatenated anew at every token.
- A beginning that all prompts share (few-shot exemplars, a chat template's system message) is run through the model
  once, and the samples of one problem share the run of their prompt.
- Every (problem, sample) has its own stream of random numbers, and a choice between tokens that is closer than what
  batching can change by rounding is decided anew on the row alone. So an evaluation that was killed and resumed, or
  cut into other batches, gives the same completions (float32; in half precision rounding is too coarse for that).
"""

from __future__ import annotations

import hashlib
import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

# Two logits, or a random number and the edge of a token's interval, this close are decided on the row alone. Rounding
# in float32 moves a logit by about 1e-5 between batches.
LOGIT_MARGIN = 1e-3
CDF_MARGIN = 1e-4


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Attributes:
        max_tokens: longest completion, in tokens.
        temperature: 0 = greedy.
        top_p, top_k: nucleus and top-k truncation; 1.0 and 0 switch them off.
        stop: strings that end a completion and are cut off.
        seed: of the whole evaluation; each (problem, sample) derives its own stream from it.
    """

    max_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, got {self.top_k}")
        if any(not s for s in self.stop):
            raise ValueError("a stop string is empty")


@dataclass(frozen=True)
class TokenRequest:
    """One sample to draw: which problem, which of its samples, and the prompt's token ids."""

    problem_id: str
    sample: int
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """One sample drawn.

    `finish_reason` is "stop" (end-of-sequence token or stop string), "length" (`max_tokens` or the model's context),
    "prompt_too_long" (nothing was generated) or "error" (a server failed; `error` says how).
    """

    problem_id: str
    sample: int
    text: str
    num_tokens: int
    finish_reason: str
    error: str | None = None


def stream(seed: int, problem_id: str, sample: int) -> np.random.Generator:
    """Random numbers of one (problem, sample), independent of all others and of the order of drawing."""
    digest = hashlib.sha256(f"{seed}\x00{problem_id}\x00{sample}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64)))


def request_seed(seed: int, problem_id: str, sample: int) -> int:
    """31-bit seed of one (problem, sample), for backends that take a number."""
    digest = hashlib.sha256(f"{seed}\x00{problem_id}\x00{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


def choose(
    logits: torch.Tensor,
    uniforms: Sequence[float],
    params: SamplingParams,
    logit_margin: float = LOGIT_MARGIN,
    cdf_margin: float = CDF_MARGIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next token of each row, and whether the choice was too close to call.

    Greedy takes the largest logit. Sampling inverts the cumulative distribution over the vocabulary, after
    temperature, top-k and top-p in this order, at the row's uniform random number.

    Args:
        logits: (A, V) of the last position.
        uniforms: (A,) in [0, 1); not read when greedy.
        params: temperature, top_p, top_k.
        logit_margin, cdf_margin: closeness below which a choice counts as uncertain; 0 = never.

    Returns:
        (A,) int64 tokens, (A,) bool uncertain.
    """
    logits = logits.float()
    if params.temperature == 0:
        top = logits.topk(min(2, logits.shape[-1]), dim=-1)
        gap = top.values[:, 0] - top.values[:, -1]
        # topk does not promise the first of equal logits; argmax does not either, but is at least one fixed choice.
        return logits.argmax(dim=-1), (gap < logit_margin) & (logits.shape[-1] > 1)
    logits = logits / params.temperature
    uncertain = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    if 0 < params.top_k < logits.shape[-1]:
        top = logits.topk(params.top_k + 1, dim=-1).values
        uncertain |= (top[:, -2] - top[:, -1]) < logit_margin
        logits = logits.masked_fill(logits < top[:, -2:-1], float("-inf"))
    probs = torch.softmax(logits.double(), dim=-1)
    if params.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        uncertain |= ((before - params.top_p).abs() < cdf_margin).any(dim=-1)
        kept = torch.zeros_like(probs, dtype=torch.bool).scatter(1, order, before < params.top_p)
        probs = probs.masked_fill(~kept, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    cdf = probs.cumsum(dim=-1)
    u = torch.as_tensor(list(uniforms), dtype=cdf.dtype, device=cdf.device)[:, None]
    # Scaling by the last entry keeps u below it whatever cumsum rounded to.
    u = u * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, u, right=True).clamp(max=logits.shape[-1] - 1)
    upper = cdf.gather(1, tokens)
    lower = upper - probs.gather(1, tokens)
    edge = torch.minimum(upper - u, u - lower).squeeze(1)
    return tokens.squeeze(1), uncertain | (edge < cdf_margin)


class _SlotLayer(DynamicLayer):
    """Keys and values of one layer for all slots, written in place; attention sees rows [0, rows), columns [0, t + q).

    Every row's tokens end at the same column, so the rows of a decode step all write column `t`.
    """

    def __init__(self, store: _Slots):
        super().__init__()
        self.store = store

    def update(self, key_states, value_states, *args, **kwargs):
        rows, t = self.store.rows, self.store.t
        end = t + key_states.shape[-2]
        self.keys[:rows, :, t:end] = key_states
        self.values[:rows, :, t:end] = value_states
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def get_seq_length(self, *args) -> int:
        return self.store.t

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        # transformers before 5 passes the query's positions, later ones its length.
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.store.t + length, 0


class _Slots:
    """The batch's key-value cache: active rows are slots [0, rows), row i's tokens are columns [t - lengths[i], t)."""

    def __init__(self, size: int):
        self.size = size
        self.rows = 0
        self.t = 0
        self.lengths: list[int] = []
        self.cache: Cache | None = None

    @property
    def capacity(self) -> int:
        return 0 if self.cache is None else self.cache.layers[0].keys.shape[-2]

    def mask(self, extra: int, device) -> torch.Tensor:
        """(rows, t + extra) 1 at the rows' own tokens, the `extra` new ones included."""
        columns = torch.arange(self.t + extra, device=device)
        starts = torch.tensor([self.t - n for n in self.lengths], device=device)
        return (columns[None, :] >= starts[:, None]).long()

    def add(self, prompt_cache: DynamicCache, sources: list[int], lengths: list[int], prefix: int, width: int) -> None:
        """Copies prompts into new slots.

        Args:
            prompt_cache: keys (U, H, prefix + width, D) of U prompts: a common prefix, then the rest, left-padded.
            sources: row of `prompt_cache` of each new slot.
            lengths: whole length (prefix and own part) of each new slot's prompt.
            prefix, width: columns of the two parts.
        """
        longest = max([*self.lengths, *lengths])
        self._allocate(prompt_cache)
        if longest > self.t or self.t > longest + max(64, longest // 4):
            self._shift(longest)
        self._reserve(self.t + 64)
        new = slice(self.rows, self.rows + len(sources))
        index = torch.tensor(sources)
        for layer, source in zip(self.cache.layers, prompt_cache.layers, strict=True):
            for ours, theirs in ((layer.keys, source.keys), (layer.values, source.values)):
                # Columns left of a row's start are masked, but a NaN or infinity there would still spoil the product.
                ours[new, :, : self.t] = 0
                ours[new, :, self.t - width : self.t] = theirs[index.to(theirs.device), :, prefix:]
                for slot, row, length in zip(range(new.start, new.stop), sources, lengths, strict=True):
                    start = self.t - length
                    ours[slot, :, start : start + prefix] = theirs[row, :, :prefix]
        self.rows += len(sources)
        self.lengths += lengths

    def advance(self) -> None:
        """After a decode step: every row is one token longer."""
        self.t += 1
        self.lengths = [n + 1 for n in self.lengths]

    def reserve_step(self) -> None:
        """Makes room for one more column."""
        if self.t + 1 > self.capacity:
            longest = max(self.lengths)
            if self.t > longest + 32:
                self._shift(longest)
            else:
                self._reserve(self.t + 128)

    def drop(self, row: int) -> None:
        """Frees a row's slot; the last active row moves into it."""
        last = self.rows - 1
        if row != last:
            start = self.t - self.lengths[last]
            for layer in self.cache.layers:
                for buffer in (layer.keys, layer.values):
                    buffer[row, :, :start] = 0
                    buffer[row, :, start : self.t] = buffer[last, :, start : self.t]
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self.rows = last

    def _allocate(self, like: DynamicCache) -> None:
        if self.cache is not None:
            return
        layers = []
        for source in like.layers:
            layer = _SlotLayer(self)
            _, heads, _, _ = source.keys.shape
            layer.keys = source.keys.new_zeros(self.size, heads, 0, source.keys.shape[-1])
            layer.values = source.values.new_zeros(self.size, heads, 0, source.values.shape[-1])
            layer.device, layer.dtype = source.keys.device, source.keys.dtype
            layer.is_initialized = True
            layers.append(layer)
        self.cache = Cache(layers=layers)

    def _reserve(self, columns: int) -> None:
        if columns <= self.capacity:
            return
        columns = -(-columns // 64) * 64
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_zeros(*old.shape[:2], columns, old.shape[-1])
                new[: self.rows, :, : self.t] = old[: self.rows, :, : self.t]
                setattr(layer, name, new)

    def _shift(self, t: int) -> None:
        """Moves the rows so that they end at column t."""
        self._reserve(t)
        longest = max(self.lengths, default=0)
        if self.rows and longest:
            for layer in self.cache.layers:
                for buffer in (layer.keys, layer.values):
                    block = buffer[: self.rows, :, self.t - longest : self.t].clone()
                    buffer[: self.rows, :, :t] = 0
                    buffer[: self.rows, :, t - longest : t] = block
        self.t = t


@dataclass
class _Row:
    request: TokenRequest
    ids: list[int]
    budget: int
    rng: np.random.Generator
    cut_by_context: bool


class ContinuousSampler:
    """Draws samples from a decoder-only transformers model (PEFT adapters included) on its own device.

    Args:
        model: in eval mode while it runs; its mode before is restored after.
        tokenizer: of the model.
        params: how to sample.
        batch_size: number of rows that decode together.
        max_prefill_tokens: prompts are run through the model in groups of at most so many padded tokens.
        invariant: decide close calls on the row alone, so that no batch can change a result. None = in float32 only.

    Raises:
        ValueError: a model whose cache is not plain keys and values (state-space, linear attention, encoder-decoder):
            these need another backend.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        batch_size: int = 32,
        max_prefill_tokens: int = 8192,
        invariant: bool | None = None,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        config = model.config.get_text_config(decoder=True)
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"{type(model).__name__} is an encoder-decoder; use the vllm or server backend")
        layers = DynamicCache(config=config).layers
        odd = {type(x).__name__ for x in layers if type(x) not in (DynamicLayer, DynamicSlidingWindowLayer)}
        if odd or getattr(model, "_is_stateful", False):
            raise ValueError(
                f"{type(model).__name__} keeps more than keys and values between tokens "
                f"({', '.join(sorted(odd)) or 'a state'}), which cannot be refilled row by row; "
                "use the vllm or server backend"
            )
        self.model, self.tokenizer, self.params = model, tokenizer, params
        self.batch_size, self.max_prefill_tokens = batch_size, max_prefill_tokens
        self.invariant = (model.dtype == torch.float32) if invariant is None else invariant
        self.context = getattr(config, "max_position_embeddings", None)
        # A sliding window is a distance between columns, so padding between prefix and rest would shorten it.
        self._share_prefix = not any(type(x) is DynamicSlidingWindowLayer for x in layers)
        self._eos = _eos_ids(model, tokenizer)
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(self._eos), 0)
        # Enough of a row's end to hold the longest stop string, whatever a token is.
        self._tail = max((len(s.encode()) for s in params.stop), default=0) + 8
        self._cache_keyword, self._last_only = _forward_keywords(model)
        self.stats = {"steps": 0, "generated_tokens": 0, "prefilled_tokens": 0, "prompt_tokens": 0, "close_calls": 0}

    def run(self, requests: Iterable[TokenRequest]) -> Iterator[Generation]:
        """Yields each sample as soon as it is finished, in no particular order."""
        requests = list(requests)
        ready: list[TokenRequest] = []
        for request in requests:
            if not request.prompt_ids:
                raise ValueError(f"the prompt of problem {request.problem_id!r} has no tokens")
            if self.context is not None and len(request.prompt_ids) >= self.context:
                yield Generation(request.problem_id, request.sample, "", 0, "prompt_too_long")
            else:
                ready.append(request)
        # Long prompts first: padding stays small, and too large a batch shows at the start.
        ready.sort(key=lambda r: (-len(r.prompt_ids), r.prompt_ids, r.problem_id, r.sample))
        was_training = self.model.training
        self.model.eval()
        try:
            yield from self._run(deque(ready))
        finally:
            self.model.train(was_training)

    def _run(self, pending: deque[TokenRequest]) -> Iterator[Generation]:
        slots, rows = _Slots(self.batch_size), []
        prefix_ids = self._common_prefix(pending)
        prefix_cache = self._forward_prefix(prefix_ids) if prefix_ids else None
        refill = max(1, self.batch_size // 8)
        while pending or rows:
            free = self.batch_size - len(rows)
            while pending and free and (free >= refill or free >= len(pending) or not rows):
                group = self._take(pending, free, len(prefix_ids))
                logits = self._prefill(slots, group, prefix_ids, prefix_cache)
                rows += [self._row(request) for request in group]
                yield from self._extend(slots, rows, logits, first=len(rows) - len(group))
                free = self.batch_size - len(rows)
            if rows:
                logits = self._decode(slots, rows)
                yield from self._extend(slots, rows, logits, first=0)

    def _row(self, request: TokenRequest) -> _Row:
        budget = self.params.max_tokens
        if self.context is not None:
            budget = min(budget, self.context - len(request.prompt_ids))
        rng = stream(self.params.seed, request.problem_id, request.sample)
        return _Row(request, list(request.prompt_ids), budget, rng, budget < self.params.max_tokens)

    def _common_prefix(self, requests: Sequence[TokenRequest]) -> tuple[int, ...]:
        """Tokens that all prompts begin with, one token left to each at least; () where too short to be worth it."""
        prompts = {r.prompt_ids for r in requests}
        if len(prompts) < 2 or not self._share_prefix:
            return ()
        first, last = min(prompts), max(prompts)
        n = 0
        while n < min(map(len, prompts)) - 1 and first[n] == last[n]:
            n += 1
        return first[:n] if n >= 16 else ()

    def _take(self, pending: deque[TokenRequest], free: int, prefix: int) -> list[TokenRequest]:
        group: list[TokenRequest] = []
        prompts: set[tuple[int, ...]] = set()
        while pending and len(group) < free:
            request = pending[0]
            grown = prompts | {request.prompt_ids}
            if group and len(grown) * (max(map(len, grown)) - prefix) > self.max_prefill_tokens:
                break
            prompts = grown
            group.append(pending.popleft())
        return group

    def _forward(self, cache: Cache | None, **inputs: torch.Tensor) -> torch.Tensor:
        """(rows, V) logits of the last position."""
        if cache is not None:
            inputs[self._cache_keyword] = cache
        return self.model(**inputs, **self._last_only, use_cache=cache is not None).logits[:, -1]

    @torch.no_grad()
    def _forward_prefix(self, ids: tuple[int, ...]) -> DynamicCache:
        cache = DynamicCache()
        device = self.model.device
        self._forward(
            cache,
            input_ids=torch.tensor([ids], device=device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
            position_ids=torch.arange(len(ids), device=device)[None],
        )
        self.stats["prefilled_tokens"] += len(ids)
        return cache

    @torch.no_grad()
    def _prefill(self, slots: _Slots, group: list[TokenRequest], prefix_ids, prefix_cache) -> torch.Tensor:
        """Runs the group's distinct prompts and puts them into slots; (len(group), V) logits of their last tokens."""
        device, p = self.model.device, len(prefix_ids)
        prompts = list(dict.fromkeys(r.prompt_ids for r in group))
        width = max(map(len, prompts)) - p
        ids = torch.full((len(prompts), width), self._pad)
        own = torch.zeros(len(prompts), width, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            n = len(prompt) - p
            ids[i, width - n :] = torch.tensor(prompt[p:])
            own[i, width - n :] = 1
        cache = DynamicCache()
        if p:
            for i, layer in enumerate(prefix_cache.layers):
                cache.update(
                    layer.keys.expand(len(prompts), -1, -1, -1), layer.values.expand(len(prompts), -1, -1, -1), i
                )
        logits = self._forward(
            cache,
            input_ids=ids.to(device),
            attention_mask=torch.cat([torch.ones(len(prompts), p, dtype=torch.long), own], dim=1).to(device),
            position_ids=(p + (own.cumsum(1) - 1).clamp(min=0)).to(device),
        )
        sources = [prompts.index(r.prompt_ids) for r in group]
        slots.add(cache, sources, [len(r.prompt_ids) for r in group], p, width)
        self.stats["prefilled_tokens"] += int(own.sum())
        self.stats["prompt_tokens"] += sum(len(r.prompt_ids) for r in group)
        return logits[sources]

    @torch.no_grad()
    def _decode(self, slots: _Slots, rows: list[_Row]) -> torch.Tensor:
        slots.reserve_step()
        device = self.model.device
        logits = self._forward(
            slots.cache,
            input_ids=torch.tensor([[row.ids[-1]] for row in rows], device=device),
            attention_mask=slots.mask(1, device),
            position_ids=torch.tensor([[n] for n in slots.lengths], device=device),
        )
        slots.advance()
        self.stats["steps"] += 1
        return logits

    def _extend(self, slots: _Slots, rows: list[_Row], logits: torch.Tensor, first: int) -> Iterator[Generation]:
        """Appends a token to rows[first:]; yields and drops those that are finished."""
        chosen = rows[first:]
        uniforms = [row.rng.random() for row in chosen] if self.params.temperature else [0.0] * len(chosen)
        margins = (LOGIT_MARGIN, CDF_MARGIN) if self.invariant else (0.0, 0.0)
        tokens, uncertain = choose(logits, uniforms, self.params, *margins)
        tokens, uncertain = tokens.tolist(), uncertain.tolist()
        self.stats["generated_tokens"] += len(chosen)
        done: list[tuple[int, Generation]] = []
        for offset, row in enumerate(chosen):
            token = tokens[offset]
            if uncertain[offset]:
                token = self._alone(row, uniforms[offset])
            row.ids.append(token)
            generation = self._finished(row)
            if generation is not None:
                done.append((first + offset, generation))
        for index, _ in reversed(done):
            slots.drop(index)
            rows[index] = rows[-1]
            rows.pop()
        for _, generation in done:
            yield generation

    @torch.no_grad()
    def _alone(self, row: _Row, uniform: float) -> int:
        """The row's next token from a run of its whole sequence by itself, which no batch can change."""
        self.stats["close_calls"] += 1
        ids = torch.tensor([row.ids], device=self.model.device)
        logits = self._forward(None, input_ids=ids, attention_mask=torch.ones_like(ids))
        return int(choose(logits, [uniform], self.params, 0.0, 0.0)[0])

    def _finished(self, row: _Row) -> Generation | None:
        new = row.ids[len(row.request.prompt_ids) :]
        count = len(new)
        if new[-1] in self._eos:
            return self._generation(row, new, count, "stop")
        if self.params.stop:
            tail = self.tokenizer.decode(new[-self._tail :], skip_special_tokens=False)
            if any(s in tail for s in self.params.stop):
                return self._generation(row, new, count, "stop")
        if count >= row.budget:
            return self._generation(row, new, count, "length")
        return None

    def _generation(self, row: _Row, new: list[int], count: int, reason: str) -> Generation:
        text = self.tokenizer.decode(new, skip_special_tokens=not self.params.stop)
        text = cut_at(text, self.params.stop)
        if self.params.stop:
            for special in self.tokenizer.all_special_tokens:
                text = text.replace(special, "")
        return Generation(row.request.problem_id, row.request.sample, text, count, reason)


def cut_at(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [i for i in (text.find(s) for s in stop) if i >= 0]
    return text[: min(ends)] if ends else text


def _forward_keywords(model: PreTrainedModel) -> tuple[str, dict[str, int]]:
    """What the model's forward calls its cache, and how it is asked for the logits of the last position only."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = inspect.signature(inner.forward).parameters
    if "position_ids" not in names:
        raise ValueError(
            f"{type(inner).__name__} takes no position_ids, so its rows cannot end at one column; "
            "use the vllm or server backend"
        )
    return "cache" if "cache" in names else "past_key_values", {
        "logits_to_keep": 1
    } if "logits_to_keep" in names else {}


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    ids: set[int] = set()
    for source in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        ids.update(source if isinstance(source, (list, tuple)) else [source] if source is not None else [])
    return ids
