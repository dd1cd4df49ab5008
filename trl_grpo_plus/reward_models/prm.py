"""Process reward models: one score for each step of a completion, in one forward pass a micro-batch."""

import inspect
import json
import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from trl_grpo_plus.algorithms.steps import split_steps, step_texts
from trl_grpo_plus.reward_models.formats import (
    FORMATS,
    EncodedCompletion,
    PRMFormat,
    Prompt,
    make_format,
)

logger = logging.getLogger(__name__)

FORMAT_FILE = "prm_format.json"

Completion = str | list[str] | list[dict[str, Any]]


class ScoredStep(NamedTuple):
    """A step's text and its score: the probability that the step is right, or None where it was not scored."""

    text: str
    score: float | None


class ProcessRewardModel:
    """A process reward model with its tokenizer and its format, called as a process reward or alone.

    Use it in training (`process_reward_funcs=[prm]`, or the path), or by hand:

    ```python
    prm = ProcessRewardModel.from_pretrained("Qwen/Qwen2.5-Math-PRM-7B", dtype="bfloat16", device="cuda")
    for step in prm.score(["How many legs have 3 cats?"], ["A cat has 4.\\n\\n3 * 4 = 12"])[0]:
        print(step.score, step.text)
    ```

    Args:
        model: Gives logits of shape (B, T, K) for `input_ids` and `attention_mask` of shape (B, T). K is what the
            format's head reads: two classes, one value, or a vocabulary.
        tokenizer: The model's tokenizer.
        format: Name of a format (see `trl_grpo_plus.reward_models.formats`), or one with its options set.
        batch_size: Completions in one forward pass.
        max_length: Longest sequence in tokens, prompt included. None: `max_position_embeddings` of the model's config.
        too_long: What happens to a completion of more tokens. `"error"`: a `ValueError` that names it. `"skip"`: steps
            whose score lies beyond `max_length` get None (not scored), with a warning that counts them; the earlier
            steps keep the scores that they have in the whole sequence.
        token_ids: Whether the sampled ids are scored as they are. `"auto"`: where they decode, with the reward model's
            tokenizer, to exactly the texts of the steps (so policy and reward model share a tokenizer) and the format
            can take them. `False`: always from the texts. `True`: always from the ids, an error where it cannot be.
        delimiter: How `score` splits a completion that is one text; as in `trl_grpo_plus.algorithms.steps`.
        name: Name in logs. None: last part of the model's path.

    Raises:
        ValueError: a field has an unknown value, or `token_ids=True` with a format that has to lay out text.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        format: str | PRMFormat = "token_classification",
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        too_long: Literal["error", "skip"] = "error",
        token_ids: bool | Literal["auto"] = "auto",
        delimiter: str | Callable[[str], Sequence[int]] = "newline",
        name: str | None = None,
    ):
        self.format = make_format(format) if isinstance(format, str) else format
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        if too_long not in ("error", "skip"):
            raise ValueError(f'too_long must be "error" or "skip", got {too_long!r}.')
        if token_ids not in (True, False, "auto"):
            raise ValueError(f'token_ids must be "auto", True or False, got {token_ids!r}.')
        if token_ids is True and not self.format.supports_token_ids:
            raise ValueError(
                f"token_ids=True: the format {self.format.name!r} tokenises the whole text at once and cannot take "
                "sampled ids. Use token_ids='auto' or False."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.too_long = too_long
        self.token_ids = token_ids
        self.delimiter = delimiter
        config = getattr(model, "config", None)
        self.max_length = max_length or getattr(config, "max_position_embeddings", None)
        path = name or getattr(config, "_name_or_path", "") or "process_reward_model"
        # TRL and the logs name a reward by its `__name__`.
        self.__name__ = path.rstrip("/").split("/")[-1]
        self._keeps_logits = self.format.head == "tokens" and "logits_to_keep" in _forward_parameters(model)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        format: str | None = None,
        format_options: dict[str, Any] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Loads a process reward model from a directory or the hub.

        The format is the one named, else the one in `prm_format.json` (written by `PRMTrainer`), else what the
        architecture or the name tells: see `detect_format`. The heads of Qwen2.5-Math-PRM and Skywork-o1-Open-PRM are
        built from their weights on the plain body, so their remote code is not run.

        Args:
            path: Directory or hub id. A PEFT adapter is merged into its base model.
            format: A format's name. None: found from the files.
            format_options: Options of the format, such as `{"separator": "\\n\\n"}`.
            dtype: As in `from_pretrained` of transformers; `"auto"` is the checkpoint's.
            device: Where to put the model. None: it stays where it was loaded, and the trainer moves it.
            trust_remote_code: Passed on; needed only for bodies that transformers does not know.
            revision: Passed on.
            model_kwargs: Further arguments of the model's `from_pretrained`, such as `attn_implementation`.
            kwargs: Arguments of `ProcessRewardModel`.

        Raises:
            ValueError: the format cannot be told from the files, or is unknown.
        """
        path = str(path)
        hub = {"revision": revision, "trust_remote_code": trust_remote_code}
        saved = _read_json(path, FORMAT_FILE, revision) or {}
        adapter = _read_json(path, "adapter_config.json", revision)
        base_path = adapter["base_model_name_or_path"] if adapter else path
        base_hub = {**hub, "revision": adapter.get("revision")} if adapter else hub
        tokenizer = AutoTokenizer.from_pretrained(path, **hub)
        if format is None and "name" in saved:
            format_options = {**saved.get("options", {}), **(format_options or {})}
            format = saved["name"]
        elif format is None:
            config = AutoConfig.from_pretrained(base_path, **base_hub)
            format = detect_format(path, config)
        prm_format = make_format(format, **(format_options or {}))

        load = {"dtype": dtype, **base_hub, **(model_kwargs or {})}
        if prm_format.head == "tokens":
            model = AutoModelForCausalLM.from_pretrained(base_path, **load)
        elif format == "qwen":
            model = BodyWithHead.from_pretrained(base_path, ("score.0", "score.2"), **load)
        elif prm_format.head == "value":
            model = BodyWithHead.from_pretrained(base_path, ("v_head.summary",), **load)
        else:
            labels = {"num_labels": 2} if adapter else {}
            model = AutoModelForTokenClassification.from_pretrained(base_path, **labels, **load)
        if adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, path, revision=revision).merge_and_unload()
        kwargs.setdefault("name", path)
        prm = cls(model.eval(), tokenizer, prm_format, **kwargs)
        return prm if device is None else prm.to(device)

    def save_pretrained(self, path: str | Path) -> None:
        """Writes model, tokenizer and format, so that `from_pretrained(path)` needs no more arguments.

        Raises:
            TypeError: the model is no transformers model (a head on a plain body: keep the original checkpoint).
        """
        if not hasattr(self.model, "save_pretrained"):
            raise TypeError(f"A {type(self.model).__name__} cannot be saved; keep the checkpoint that it came from.")
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        save_format(self.format, path)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def to(self, device: str | torch.device) -> Self:
        """Moves the model; returns itself."""
        self.model.to(device)
        return self

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], delimiter: Any = None
    ) -> list[list[ScoredStep]]:
        """Scores completions by hand.

        Args:
            prompts: One for each completion: text or chat messages.
            completions: Each a text (split at the delimiter), a list of steps, or assistant messages.
            delimiter: Overrides the model's.

        Returns:
            For each completion its steps with their scores in [0, 1]. The texts, joined, are the completion.
        """
        steps = [self._split(completion, delimiter or self.delimiter) for completion in completions]
        scores = self.score_steps(prompts, steps)
        return [list(map(ScoredStep, *pair)) for pair in zip(steps, scores, strict=True)]

    def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        steps: Sequence[Sequence[str]] | None = None,
        **columns: Any,
    ) -> list[list[float | None]]:
        """Called as a process reward: one score in [0, 1], or None, for each step. Data set columns are not looked at.

        Without `steps` the completions are split as in `score`.
        """
        if steps is None:
            steps, completion_ids = [self._split(completion, self.delimiter) for completion in completions], None
        return self.score_steps(prompts, steps, completion_ids)

    def score_steps(
        self,
        prompts: Sequence[Prompt],
        steps: Sequence[Sequence[str]],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[list[float | None]]:
        """Scores completions that are split already.

        Args:
            prompts: B prompts.
            steps: The texts of each completion's steps.
            completion_ids: The sampled token ids of each completion, for `token_ids`.

        Returns:
            B lists with one probability a step that it is right.

        Raises:
            ValueError: the lengths differ, a sequence is too long (with `too_long="error"`), or with `token_ids=True`
                ids that are not the steps' text.
        """
        if len(prompts) != len(steps) or (completion_ids is not None and len(completion_ids) != len(steps)):
            counts = f"{len(prompts)} prompts, {len(steps)} lists of steps"
            raise ValueError(
                f"Prompts, steps and completion_ids must be as many: got {counts}"
                + (f", {len(completion_ids)} completion_ids." if completion_ids is not None else ".")
            )
        encoded = []
        for i, (prompt, texts) in enumerate(zip(prompts, steps, strict=True)):
            ids = None if completion_ids is None else self._step_ids(i, completion_ids[i], texts)
            encoded.append(self.format.encode(self.tokenizer, prompt, texts, ids) if texts else None)
        return self._score_encoded(encoded)

    def _split(self, completion: Completion, delimiter: Any) -> list[str]:
        if isinstance(completion, str):
            ids = _CharacterIds(completion)
            return step_texts(ids.ids, split_steps(ids.ids, ids, delimiter), ids)
        if completion and isinstance(completion[0], dict):
            return self._split("".join(message["content"] for message in completion), delimiter)
        return list(completion)

    def _step_ids(self, index: int, ids: Sequence[int], texts: Sequence[str]) -> list[list[int]] | None:
        if self.token_ids is False or not self.format.supports_token_ids:
            if self.token_ids is True:
                raise ValueError(f"token_ids=True: the format {self.format.name!r} cannot take sampled ids.")
            return None
        ends = locate_steps(ids, texts, self.tokenizer)
        if ends is None:
            if self.token_ids is True:
                raise ValueError(
                    f"token_ids=True: the sampled ids of completion {index} do not decode to its steps with the "
                    "reward model's tokenizer: the policy has another one. Use token_ids='auto'."
                )
            return None
        return [list(ids[a + 1 : b + 1]) for a, b in zip([-1, *ends], ends, strict=False)]

    def _score_encoded(self, encoded: Sequence[EncodedCompletion | None]) -> list[list[float | None]]:
        scores: list[list[float | None]] = [[] for _ in encoded]
        kept: list[tuple[int, list[int], list[int]]] = []
        skipped = too_long = 0
        for i, item in enumerate(encoded):
            if item is None:
                continue
            ids, positions = item
            scores[i] = [None] * len(positions)
            if self.max_length is not None and len(ids) > self.max_length:
                if self.too_long == "error":
                    raise ValueError(
                        f"Completion {i} with its prompt has {len(ids)} tokens in the format {self.format.name!r}, "
                        f"more than max_length={self.max_length}. Shorten it, raise max_length, or "
                        "set too_long='skip' to leave its last steps unscored."
                    )
                ids = ids[: self.max_length]
                skipped += sum(p >= len(ids) for p in positions)
                too_long += 1
                positions = [p for p in positions if p < len(ids)]
            if positions:
                kept.append((i, ids, positions))
        if too_long:
            logger.warning(
                f"{self.__name__}: {too_long} of {len(encoded)} completions are longer than max_length="
                f"{self.max_length}; {skipped} of their steps are not scored."
            )
        # Sorted by length there is little padding; each result goes back to its place.
        kept.sort(key=lambda item: len(item[1]))
        was_training = self.model.training
        self.model.eval()
        try:
            for start in range(0, len(kept), self.batch_size):
                batch = kept[start : start + self.batch_size]
                for (i, _, positions), row in zip(batch, self._forward(batch), strict=True):
                    scores[i][: len(positions)] = row
        finally:
            self.model.train(was_training)
        return scores

    @torch.no_grad()
    def _forward(self, batch: list[tuple[int, list[int], list[int]]]) -> list[list[float]]:
        """One forward pass: for each completion of the micro-batch, the probabilities at its positions."""
        length = max(len(ids) for _, ids, _ in batch)
        # Padding stands on the right behind the last position, where causal attention never looks.
        input_ids = torch.zeros(len(batch), length, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, (_, ids, _) in enumerate(batch):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            attention_mask[row, : len(ids)] = 1
        device = self.device
        read = sorted({p for _, _, positions in batch for p in positions})
        # A language model's head is applied only where a score stands, not to (B, T, V).
        keep = {"logits_to_keep": torch.tensor(read, device=device)} if self._keeps_logits else {}
        output = self.model(input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), **keep)
        column = {p: n for n, p in enumerate(read)}
        logits = output.logits if keep else output.logits[:, read]
        probability = self.format.probability(logits, self.tokenizer).cpu()
        return [[probability[row, column[p]].item() for p in ps] for row, (_, _, ps) in enumerate(batch)]


class BodyWithHead(nn.Module):
    """A transformers body with a small head on every token, for checkpoints whose head lives in remote code.

    Two linear layers with a ReLU between them (Qwen2.5-Math-PRM: `score.0`, `score.2`) or one (Skywork-o1-Open-PRM:
    `v_head.summary`), with the sizes that the weights have.
    """

    def __init__(self, body: PreTrainedModel, head: nn.Module):
        super().__init__()
        self.body, self.head = body, head
        self.config = body.config

    @classmethod
    def from_pretrained(cls, path: str, layers: Sequence[str], **kwargs: Any) -> Self:
        """Loads the body with `AutoModel` and the head from the tensors of its linear layers.

        Args:
            path: Directory or hub id.
            layers: Names of the head's linear layers in the checkpoint, first to last.
            kwargs: Arguments of the body's `from_pretrained`.

        Raises:
            ValueError: the checkpoint has no such tensors.
        """
        body = AutoModel.from_pretrained(path, **kwargs)
        head: list[nn.Module] = []
        for name in layers:
            tensors = read_tensors(path, f"{name}.", kwargs.get("revision"))
            weight, bias = tensors["weight"], tensors.get("bias")
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
            linear.weight.data.copy_(weight)
            if bias is not None:
                linear.bias.data.copy_(bias)
            head += [nn.ReLU(), linear] if head else [linear]
        return cls(body, nn.Sequential(*head).to(body.device, body.dtype))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return SimpleNamespace(logits=self.head(hidden))


def detect_format(path: str, config: Any) -> str:
    """The format's name, told from the architecture in the config, or from the name of a published model.

    Raises:
        ValueError: a causal language model under a name that tells nothing, or an architecture that no format reads.
    """
    architecture = (getattr(config, "architectures", None) or [""])[0]
    if architecture.endswith("ForTokenClassification"):
        return "token_classification"
    if architecture.endswith("ForProcessRewardModel"):
        return "qwen"
    if architecture.endswith("ForPrmModel"):
        return "skywork"
    # Two published layouts live on a plain language model; only the name tells them apart.
    for marker, name in (("math-shepherd", "math_shepherd"), ("rlhflow", "rlhflow"), ("skywork", "skywork")):
        if any(marker in str(text).lower() for text in (path, getattr(config, "_name_or_path", ""))):
            return name
    raise ValueError(
        f"{path}: the files do not tell the format of this process reward model (architecture {architecture!r}). Name "
        f"it with format=, one of {', '.join(map(repr, FORMATS))}. A language model trained on other data than steps "
        "is no process reward model."
    )


def locate_steps(
    completion_ids: Sequence[int], steps: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[int] | None:
    """The inclusive end index of each step in the completion's ids, or None where the ids do not decode to the steps.

    A None tells that the ids belong to another tokenizer, or that a step ends inside a token.
    """
    if not len(completion_ids) or not steps or max(completion_ids) >= len(tokenizer):
        return None
    offsets = list(accumulate(map(len, steps)))
    text = tokenizer.decode(completion_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if text != "".join(steps):
        return None
    ends = split_steps(completion_ids, tokenizer, lambda _: offsets[:-1])
    return ends if step_texts(completion_ids, ends, tokenizer) == list(steps) else None


def aggregate(scores: Sequence[float | None], how: Literal["min", "product", "mean", "last"] = "min") -> float | None:
    """One number for a completion, to rank completions by: unscored steps are left out, None if none is scored."""
    known = [score for score in scores if score is not None]
    if how not in ("min", "product", "mean", "last"):
        raise ValueError(f'how must be "min", "product", "mean" or "last", got {how!r}.')
    if not known:
        return None
    if how == "min":
        return min(known)
    if how == "mean":
        return sum(known) / len(known)
    return known[-1] if how == "last" else torch.tensor(known, dtype=torch.float64).prod().item()


def save_format(prm_format: PRMFormat, path: str | Path) -> None:
    """Writes the format beside a model's files."""
    text = json.dumps({"name": prm_format.name, "options": prm_format.options()}, indent=2, ensure_ascii=False)
    (Path(path) / FORMAT_FILE).write_text(text + "\n", encoding="utf-8")


def read_tensors(path: str, prefix: str, revision: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names begin with `prefix`, without it; sharded or not, safetensors or torch.

    Raises:
        ValueError: there are none.
    """
    index = _read_json(path, "model.safetensors.index.json", revision)
    index = index or _read_json(path, "pytorch_model.bin.index.json", revision)
    if index:
        files = sorted({file for name, file in index["weight_map"].items() if name.startswith(prefix)})
    else:
        files = [f for f in ("model.safetensors", "pytorch_model.bin") if _file(path, f, revision)][:1]
    tensors = {}
    for file in files:
        local = _file(path, file, revision)
        if file.endswith(".safetensors"):
            from safetensors import safe_open

            with safe_open(local, framework="pt") as handle:
                names = [name for name in handle.keys() if name.startswith(prefix)]  # noqa: SIM118
                tensors |= {name[len(prefix) :]: handle.get_tensor(name) for name in names}
        else:
            state = torch.load(local, map_location="cpu", weights_only=True)
            tensors |= {n[len(prefix) :]: t for n, t in state.items() if n.startswith(prefix)}
    if not tensors:
        raise ValueError(f"{path}: the checkpoint has no tensor under {prefix!r}, so it is no model of this format.")
    return tensors


class _CharacterIds:
    """A text as ids of its characters, so that the one definition of a step serves texts that nobody sampled."""

    all_special_ids: tuple[int, ...] = ()

    def __init__(self, text: str):
        self._text = text
        self.ids = list(range(len(text)))

    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        return self._text[ids[0] : ids[-1] + 1] if ids else ""


def _forward_parameters(model: nn.Module) -> Any:
    return inspect.signature(model.forward).parameters


def _file(path: str, name: str, revision: str | None) -> str | None:
    return cached_file(
        path,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def _read_json(path: str, name: str, revision: str | None) -> dict | None:
    local = _file(path, name, revision)
    return json.loads(Path(local).read_text(encoding="utf-8")) if local else None
