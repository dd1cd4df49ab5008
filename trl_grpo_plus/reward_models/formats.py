"""The layouts in which published process reward models read a solution, and the heads they score it with.

A format turns a prompt and its steps into token ids and the positions whose outputs are the steps' scores. All scores
of a completion come from one forward pass, since every published layout is causal: what follows a step cannot change
its score. The layouts:

| name                   | the model reads                                   | score of a step                        |
|------------------------|---------------------------------------------------|----------------------------------------|
| `token_classification` | prompt, step, separator, step, separator, ...     | softmax of 2 classes at the separator  |
| `token_pair`           | the same                                          | softmax of 2 vocabulary tokens there   |
| `math_shepherd`        | `prompt step ки⏎step ки`                          | softmax of `+`, `-` at `ки`            |
| `qwen`                 | chat, assistant turn `step<extra_0>step<extra_0>` | softmax of 2 classes at `<extra_0>`    |
| `rlhflow`              | chat, each step a user turn answered by `+`       | softmax of `+`, `-` just before `+`    |
| `skywork`              | `prompt⏎step⏎step⏎`                               | sigmoid of the value at the newline    |
"""

import uuid
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict[str, Any]]


class EncodedCompletion(NamedTuple):
    """Token ids of a prompt with its steps, and for each step the index of the output that is its score."""

    input_ids: list[int]
    positions: list[int]


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text alone, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def without_line_end(step: str) -> str:
    """A step's delimiter belongs to the step when it is sampled; the layouts put their own separator in its place."""
    return step.rstrip("\r\n")


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, with one BOS token if the tokenizer has one. Messages go through the chat template."""
    if isinstance(prompt, str):
        ids = tokenize(tokenizer, prompt)
    else:
        ids = tokenize(tokenizer, tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
        if ids and ids[0] == tokenizer.bos_token_id:
            return ids
    return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]


def question_text(prompt: Prompt) -> str:
    """The question alone, for layouts without roles: a text as it is, of messages the last user turn."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt):
        if message["role"] == "user":
            return message["content"]
    raise ValueError("A conversational prompt needs a message with the role 'user' to be scored; this one has none.")


def clean_step_ids(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """Sampled token ids of a step without its line end and without special tokens at its end.

    A token that holds other text before the line end (`".\\n\\n"`) is replaced by the tokens of that text.
    """
    ids, special = list(ids), set(tokenizer.all_special_ids)
    while ids:
        text = tokenizer.decode([ids[-1]], clean_up_tokenization_spaces=False)
        kept = without_line_end(text)
        if ids[-1] in special or not kept:
            ids.pop()
        elif kept == text:
            return ids
        else:
            return ids[:-1] + tokenize(tokenizer, kept)
    return ids


def single_token_id(tokenizer: PreTrainedTokenizerBase, text: str, what: str) -> int:
    """The id of a text that must be one token.

    Raises:
        ValueError: the tokenizer cuts it into several tokens or knows it not at all.
    """
    ids = tokenize(tokenizer, text)
    # SentencePiece puts a space of its own in front of a text.
    if len(ids) == 2 and not tokenizer.decode(ids[:1]).strip():
        ids = ids[1:]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ValueError(
            f"{what} {text!r} must be one token of the reward model's tokenizer, which gives {ids} for it. "
            "Name the right one in the format's options, or choose another format."
        )
    return ids[0]


def encode_with_marks(
    tokenizer: PreTrainedTokenizerBase, pieces: Sequence[str], add_special_tokens: bool
) -> tuple[list[int], list[int]]:
    """Tokenises the joined pieces as one text; returns the ids and, for each piece, the token of its last character.

    Token indices come from the tokenizer's character offsets, so a mark that also occurs in the text of a step is
    never mistaken for one that was put there.

    Raises:
        ValueError: the tokenizer gives no offsets.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"This reward model's format needs a tokenizer with character offsets; {type(tokenizer).__name__} is a "
            "slow one. Load the fast one (AutoTokenizer does by default)."
        )
    batch = tokenizer("".join(pieces), add_special_tokens=add_special_tokens, return_offsets_mapping=True)
    starts, tokens = [], []
    for index, (start, end) in enumerate(batch["offset_mapping"]):
        if end > start:
            starts.append(start)
            tokens.append(index)
    last, length = [], 0
    for piece in pieces:
        length += len(piece)
        last.append(tokens[bisect_right(starts, length - 1) - 1])
    return list(batch["input_ids"]), last


@dataclass(frozen=True)
class PRMFormat(ABC):
    """A layout and its head. Options are the dataclass fields, saved beside a trained model in `prm_format.json`."""

    name: ClassVar[str]
    head: ClassVar[Literal["classes", "tokens", "value"]]
    # Whether sampled token ids can stand in the layout as they are, without a way through text.
    supports_token_ids: ClassVar[bool] = True

    @abstractmethod
    def encode(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Prompt,
        steps: Sequence[str],
        step_ids: Sequence[Sequence[int]] | None = None,
    ) -> EncodedCompletion:
        """Lays a prompt and its steps out.

        Args:
            tokenizer: The reward model's tokenizer.
            prompt: Text or chat messages.
            steps: Text of each step, with or without its line end.
            step_ids: The sampled token ids of each step, with its delimiter, in the reward model's own vocabulary.
                Taken instead of the texts where given.

        Returns:
            The token ids and one position for each step.
        """

    def token_pair(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
        """Ids of the good and the bad token, for formats with the head `"tokens"`."""
        raise TypeError(f"The format {self.name!r} does not score with vocabulary tokens.")

    def probability(self, logits: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
        """Probability that the step is right, (...), from the model's outputs, (..., K), in float32."""
        logits = logits.float()
        if self.head == "tokens":
            return logits[..., list(self.token_pair(tokenizer))].softmax(dim=-1)[..., 0]
        if self.head == "value" or logits.shape[-1] == 1:
            return logits[..., 0].sigmoid()
        if logits.shape[-1] != 2:
            raise ValueError(
                f"The format {self.name!r} reads two classes (wrong, right); the model gives {logits.shape[-1]}. "
                "Was it loaded with num_labels=2?"
            )
        return logits.softmax(dim=-1)[..., 1]

    def options(self) -> dict[str, Any]:
        """The format's options as plain data."""
        return asdict(self)

    def _interleave(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prefix: list[int],
        steps: Sequence[str],
        step_ids: Sequence[Sequence[int]] | None,
        mark: list[int],
    ) -> EncodedCompletion:
        """prefix, step, mark, step, mark, ...; each step tokenised on its own, its score at the mark's last token."""
        ids, positions = list(prefix), []
        for j, step in enumerate(steps):
            if step_ids is None:
                ids += tokenize(tokenizer, without_line_end(step))
            else:
                ids += clean_step_ids(tokenizer, step_ids[j])
            ids += mark
            positions.append(len(ids) - 1)
        return EncodedCompletion(ids, positions)


@dataclass(frozen=True)
class TokenClassificationFormat(PRMFormat):
    """What TRL's PRMTrainer made and this package's makes: the label stands on the separator's last token."""

    name: ClassVar[str] = "token_classification"
    head: ClassVar = "classes"

    separator: str = "\n"

    def encode(self, tokenizer, prompt, steps, step_ids=None) -> EncodedCompletion:
        mark = tokenizer.encode(self.separator, add_special_tokens=False)
        return self._interleave(tokenizer, prompt_ids(tokenizer, prompt), steps, step_ids, mark)


@dataclass(frozen=True)
class TokenPairFormat(TokenClassificationFormat):
    """The same layout on a language model's own head: two vocabulary tokens compete at the separator."""

    name: ClassVar[str] = "token_pair"
    head: ClassVar = "tokens"

    good_token: str = "+"
    bad_token: str = "-"

    def token_pair(self, tokenizer) -> tuple[int, int]:
        return (
            single_token_id(tokenizer, self.good_token, "good_token"),
            single_token_id(tokenizer, self.bad_token, "bad_token"),
        )


@dataclass(frozen=True)
class MathShepherdFormat(PRMFormat):
    """peiyi9979/math-shepherd-mistral-7b-prm (arXiv 2312.08935): `question step ки⏎step ки`, tokenised as one text.

    The model was trained on steps that begin with `Step 1: `, `Step 2: `, ...; `number_steps` writes that in front of
    steps that do not.
    """

    name: ClassVar[str] = "math_shepherd"
    head: ClassVar = "tokens"
    supports_token_ids: ClassVar[bool] = False

    step_tag: str = "ки"
    good_token: str = "+"
    bad_token: str = "-"
    number_steps: bool = False

    def token_pair(self, tokenizer) -> tuple[int, int]:
        return (
            single_token_id(tokenizer, self.good_token, "good_token"),
            single_token_id(tokenizer, self.bad_token, "bad_token"),
        )

    def encode(self, tokenizer, prompt, steps, step_ids=None) -> EncodedCompletion:
        pieces = [question_text(prompt)]
        for j, step in enumerate(steps):
            text = without_line_end(step)
            if self.number_steps and not text.lstrip().startswith(f"Step {j + 1}:"):
                text = f"Step {j + 1}: {text}"
            pieces += [("\n" if j else " ") + text, f" {self.step_tag}"]
        ids, last = encode_with_marks(tokenizer, pieces, add_special_tokens=True)
        positions = last[2::2]
        tag_id = single_token_id(tokenizer, self.step_tag, "step_tag")
        for j, position in enumerate(positions):
            if ids[position] != tag_id:
                raise ValueError(
                    f"The tokenizer merged the step tag {self.step_tag!r} after step {j} with the text beside it: "
                    f"token {tokenizer.convert_ids_to_tokens(ids[position])!r}. It is not this format's tokenizer."
                )
        return EncodedCompletion(ids, positions)


@dataclass(frozen=True)
class QwenFormat(PRMFormat):
    """Qwen/Qwen2.5-Math-PRM-7B and -72B (arXiv 2501.07301): one assistant turn, a mark behind each step."""

    name: ClassVar[str] = "qwen"
    head: ClassVar = "classes"

    step_tag: str = "<extra_0>"
    system_prompt: str = "Please reason step by step, and put your final answer within \\boxed{}."

    def encode(self, tokenizer, prompt, steps, step_ids=None) -> EncodedCompletion:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # A special token cuts the text before it is tokenised, so step by step gives the ids of the whole turn.
        tag_id = single_token_id(tokenizer, self.step_tag, "step_tag")
        return self._interleave(tokenizer, tokenize(tokenizer, text), steps, step_ids, [tag_id])


@dataclass(frozen=True)
class RLHFlowFormat(PRMFormat):
    """RLHFlow/Llama3.1-8B-PRM-Deepseek-Data and -Mistral-Data: each step a user turn, `+` the assistant's reply."""

    name: ClassVar[str] = "rlhflow"
    head: ClassVar = "tokens"
    supports_token_ids: ClassVar[bool] = False

    good_token: str = "+"
    bad_token: str = "-"

    def token_pair(self, tokenizer) -> tuple[int, int]:
        return (
            single_token_id(tokenizer, self.good_token, "good_token"),
            single_token_id(tokenizer, self.bad_token, "bad_token"),
        )

    def encode(self, tokenizer, prompt, steps, step_ids=None) -> EncodedCompletion:
        good_id, _ = self.token_pair(tokenizer)
        # The template is rendered once with a reply that occurs nowhere else, which shows where the replies stand.
        mark = uuid.uuid4().hex
        messages = []
        for j, step in enumerate(steps):
            text = step.strip()
            messages += [
                {"role": "user", "content": f"{question_text(prompt)} {text}" if j == 0 else text},
                {"role": "assistant", "content": mark},
            ]
        turns = tokenizer.apply_chat_template(messages, tokenize=False).split(mark)
        if len(turns) != len(steps) + 1:
            raise ValueError(
                f"The tokenizer's chat template shows {len(turns) - 1} of {len(steps)} assistant turns; the format "
                "'rlhflow' needs one that shows all of them."
            )
        pieces = [piece for turn in turns[:-1] for piece in (turn, self.good_token)]
        ids, last = encode_with_marks(tokenizer, pieces, add_special_tokens=False)
        replies = last[1::2]
        for j, reply in enumerate(replies):
            if ids[reply] != good_id:
                raise ValueError(
                    f"The tokenizer merged the reply {self.good_token!r} to step {j} with the text beside it: token "
                    f"{tokenizer.convert_ids_to_tokens(ids[reply])!r}. It is not the tokenizer of this format."
                )
        return EncodedCompletion(ids, [reply - 1 for reply in replies])


@dataclass(frozen=True)
class SkyworkFormat(PRMFormat):
    """Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B and -7B: a value head read at the newline behind each step."""

    name: ClassVar[str] = "skywork"
    head: ClassVar = "value"

    step_token: str = "\n"

    def encode(self, tokenizer, prompt, steps, step_ids=None) -> EncodedCompletion:
        prefix = tokenize(tokenizer, f"{tokenizer.bos_token or ''}{question_text(prompt)}\n")
        mark = tokenize(tokenizer, self.step_token)[-1:]
        return self._interleave(tokenizer, prefix, steps, step_ids, mark)


FORMATS: dict[str, type[PRMFormat]] = {
    cls.name: cls
    for cls in (
        TokenClassificationFormat,
        TokenPairFormat,
        MathShepherdFormat,
        QwenFormat,
        RLHFlowFormat,
        SkyworkFormat,
    )
}


def make_format(name: str, **options: Any) -> PRMFormat:
    """The format of this name.

    Raises:
        ValueError: no such format, or an option that it does not have.
    """
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {name!r}.")
    known = set(FORMATS[name].__dataclass_fields__)
    if unknown := set(options) - known:
        raise ValueError(
            f"The format {name!r} has no option {', '.join(map(repr, sorted(unknown)))}; it has {sorted(known)}."
        )
    return FORMATS[name](**options)
