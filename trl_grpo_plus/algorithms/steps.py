"""Completion token ids -> spans of reasoning steps.

The spans are found on the ids that were sampled, never on text that was tokenised again, so the last token of step j
(`index(j)` of DeepSeekMath, arXiv 2402.03300 section 4.1.3) is exact for every tokenizer.

Everything here rests on one definition. Let `text` be the decoded completion, without special tokens. A token *i* has
completed `n` characters of it when decoding the tokens up to and including *i* gives a string that agrees with `text`
in its first `n` characters (an emoji whose last byte is still to come decodes to U+FFFD, so it is not yet complete).
A delimiter that ends at character `e` is completed by the first token that has completed `e` characters.

What follows from it:

- A delimiter belongs to the step that it ends; the step's end is the token that completes it. A token that straddles
  a delimiter (`"\\nab"`) belongs whole to the step that ends in it, and two delimiters completed by one token give one
  step end.
- No step is empty. A delimiter with nothing but white space between it and the tokens of the step before (or the start
  of the completion) ends no step: that stretch merges with the step that follows, as the blank lines before the first
  step do. White space and special tokens after the last delimiter, such as EOS, merge with the last step.
- Text that follows the last delimiter is a last step, so the last end is always the last token.
"""

from __future__ import annotations

import json
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary, proxy

import numpy as np

Delimiter = str | re.Pattern | Callable[[str], Iterable[int]]

# A blank line may hold white space, so "\n  \n" and "\r\n\r\n" are one run.
NAMED_DELIMITERS = {"newline": r"\n(?:\s*\n)?", "paragraph": r"\n\s*\n"}

_REPLACEMENT = "\ufffd"


def split_steps(completion_ids: Sequence[int] | Any, tokenizer: Any, delimiter: Delimiter = "newline") -> list[int]:
    """Returns the index of the last token of each step of one completion, in order.

    Args:
        completion_ids: list or 1-D tensor or array of T sampled token ids, without padding.
        tokenizer: the tokenizer of the policy (anything with `decode`; fast tokenizers take a faster, equally exact
            path).
        delimiter: `"newline"` (a run of newlines; lines of nothing but white space belong to the run), `"paragraph"`
            (a run with at least one blank line), the text of one of the tokenizer's special tokens, a regular
            expression (any other string or a compiled pattern), or a callable that takes the text and returns the
            exclusive character offsets at which a step ends.

    Returns:
        Strictly increasing inclusive end indices; the last is T - 1. Empty for an empty completion. A delimiter that
        never occurs gives one step.

    Raises:
        ValueError: the regular expression is invalid or matches the empty string; an offset of a callable lies outside
            the text; an id is negative.
        TypeError: the delimiter, an id, or an offset has a wrong type.
    """
    return _split(_as_ids(completion_ids), _aligner(tokenizer), delimiter)


def split_steps_batch(
    batch_ids: Iterable[Sequence[int] | Any], tokenizer: Any, delimiter: Delimiter = "newline"
) -> list[list[int]]:
    """Returns [`split_steps`] of each completion of a batch (B completions, each without padding)."""
    aligner = _aligner(tokenizer)
    check_delimiter(delimiter, tokenizer)
    return [_split(_as_ids(ids), aligner, delimiter) for ids in batch_ids]


def last_step_is_complete(
    completion_ids: Sequence[int] | Any, tokenizer: Any, delimiter: Delimiter = "newline"
) -> bool:
    """Whether a delimiter ends the last step (white space may follow it), so that a cut there took nothing from it."""
    ids = _as_ids(completion_ids)
    if not ids:
        return True
    text, done = _aligner(tokenizer).align(ids)
    spans = _delimiters(ids, text, done, _aligner(tokenizer), delimiter)
    return bool(spans) and not text[int(done[spans[-1][1]]) :].strip()


def step_texts(completion_ids: Sequence[int] | Any, step_ends: Sequence[int], tokenizer: Any) -> list[str]:
    """Returns the text of each step: the characters that its tokens complete, special tokens left out.

    The texts of a completion's steps, joined, are the decoded completion (`skip_special_tokens=True`,
    `clean_up_tokenization_spaces=False`); bytes that never become a character belong to the step that they are in.

    Args:
        completion_ids: list or 1-D tensor of T token ids, without padding.
        step_ends: inclusive, strictly increasing end indices below T; tokens after the last end are in no text.
        tokenizer: the tokenizer that [`split_steps`] had.

    Raises:
        ValueError: `step_ends` are not increasing token indices of this completion.
    """
    ids = _as_ids(completion_ids)
    ends = [operator.index(end) for end in step_ends]
    if any(b <= a for a, b in pairwise([-1, *ends])) or (ends and ends[-1] >= len(ids)):
        raise ValueError(f"step_ends must increase and lie in 0..{len(ids) - 1} for {len(ids)} tokens, got {ends}.")
    if not ends:
        return []
    text, done = _aligner(tokenizer).align(ids)
    cuts = [0, *(int(done[end]) for end in ends)]
    return [text[a:b] for a, b in pairwise(cuts)]


def check_delimiter(delimiter: Delimiter, tokenizer: Any = None) -> None:
    """Raises what [`split_steps`] would raise on this delimiter whatever the completion, to fail at construction.

    With a `tokenizer`, the text of one of its special tokens passes, although it may be no regular expression.
    """
    if isinstance(delimiter, str):
        if tokenizer is None or delimiter not in _aligner(tokenizer).special_ids:
            _compile(delimiter)
    elif isinstance(delimiter, re.Pattern):
        _check_pattern(delimiter)
    elif not callable(delimiter):
        raise TypeError(
            f"A step delimiter is 'newline', 'paragraph', a regular expression or a callable, got {delimiter!r} "
            f"of type {type(delimiter).__name__}."
        )


@lru_cache(maxsize=64)
def _compile(delimiter: str) -> re.Pattern:
    try:
        pattern = re.compile(NAMED_DELIMITERS.get(delimiter, delimiter))
    except re.error as error:
        raise ValueError(
            f"The step delimiter {delimiter!r} is neither 'newline' nor 'paragraph' nor a valid regular expression: "
            f"{error}."
        ) from error
    _check_pattern(pattern)
    return pattern


def _check_pattern(pattern: re.Pattern) -> None:
    if not isinstance(pattern.pattern, str):
        raise TypeError(f"The step delimiter {pattern.pattern!r} is a pattern of bytes; steps are split in text.")
    if pattern.search(""):
        _raise_empty_match(pattern)


def _raise_empty_match(pattern: re.Pattern) -> None:
    raise ValueError(
        f"The step delimiter {pattern.pattern!r} matches the empty string, so a step would end at every character; "
        "write a regular expression that consumes at least one character."
    )


def _as_ids(completion_ids: Sequence[int] | Any) -> list[int]:
    if hasattr(completion_ids, "tolist"):
        completion_ids = completion_ids.tolist()
    ids = list(completion_ids) if isinstance(completion_ids, Sequence) else completion_ids
    if not isinstance(ids, list) or isinstance(completion_ids, str | bytes):
        raise TypeError(f"completion_ids must be a list or a 1-D tensor of token ids, got {completion_ids!r}.")
    kinds = set(map(type, ids))
    if kinds - {int}:
        try:
            if bool in kinds:
                raise TypeError
            ids = [operator.index(i) for i in ids]
        except TypeError:
            names = sorted(kind.__name__ for kind in kinds)
            raise TypeError(f"completion_ids must hold integers of one completion, got {', '.join(names)}.") from None
    if ids and min(ids) < 0:
        raise ValueError(f"completion_ids holds the negative id {min(ids)}; strip padding and label masks first.")
    return ids


def _split(ids: list[int], aligner: _Aligner, delimiter: Delimiter) -> list[int]:
    if not ids:
        return []
    text, done = aligner.align(ids)
    ends: list[int] = []
    start = 0  # first character that no step has yet
    for content_end, end in _delimiters(ids, text, done, aligner, delimiter):
        if text[start:content_end].strip():
            ends.append(end)
            start = int(done[end])
    if ends and not text[start:].strip():
        ends[-1] = len(ids) - 1
    elif not ends or ends[-1] != len(ids) - 1:
        ends.append(len(ids) - 1)
    return ends


def _delimiters(
    ids: list[int], text: str, done: np.ndarray, aligner: _Aligner, delimiter: Delimiter
) -> list[tuple[int, int]]:
    """Returns (character at which the delimiter begins, token that completes it) of each delimiter, in order."""
    if isinstance(delimiter, str) and delimiter in aligner.special_ids:
        special = aligner.special_ids[delimiter]
        return [(int(done[i]), i) for i, token_id in enumerate(ids) if token_id == special]
    if isinstance(delimiter, str | re.Pattern):
        check_delimiter(delimiter)
        pattern = delimiter if isinstance(delimiter, re.Pattern) else _compile(delimiter)
        spans = [match.span() for match in pattern.finditer(text)]
        if any(a == b for a, b in spans):
            _raise_empty_match(pattern)
    else:
        check_delimiter(delimiter)
        offsets = _checked_offsets(delimiter(text), text, delimiter)
        spans = [(offset, offset) for offset in offsets]
    if not spans:
        return []
    tokens = np.searchsorted(done, [b for _, b in spans], side="left").tolist()
    return [(a, token) for (a, _), token in zip(spans, tokens, strict=True)]


def _checked_offsets(offsets: Iterable[int], text: str, delimiter: Callable) -> list[int]:
    name = getattr(delimiter, "__name__", repr(delimiter))
    try:
        offsets = list(offsets)
    except TypeError:
        raise TypeError(
            f"The step delimiter {name} must return an iterable of character offsets, got {offsets!r}."
        ) from None
    checked = []
    for offset in offsets:
        try:
            if isinstance(offset, bool):
                raise TypeError
            checked.append(operator.index(offset))
        except TypeError:
            raise TypeError(f"The step delimiter {name} returned {offset!r}; offsets are integers.") from None
        if not 0 <= checked[-1] <= len(text):
            raise ValueError(
                f"The step delimiter {name} returned the offset {offset}, outside the completion's text of "
                f"{len(text)} characters: a step longer than the completion."
            )
    return sorted(set(checked))


# --- Alignment of characters with tokens -----------------------------------------------------------------------------


class _Aligner:
    """Decodes completions prefix by prefix: right for every tokenizer, quadratic in the completion's length."""

    def __init__(self, tokenizer: Any, special_ids: dict[str, int]):
        self._tokenizer = tokenizer
        self.special_ids = special_ids

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def align(self, ids: list[int]) -> tuple[str, np.ndarray]:
        """Returns the text and, for each of the T tokens, how many of its characters are completed by then: (T,)."""
        text = self._decode(ids)
        agreed = (_common_prefix(self._decode(ids[: i + 1]), text) for i in range(len(ids)))
        return text, np.fromiter(accumulate(agreed, max), dtype=np.int64, count=len(ids))


class _ByteLevelAligner(_Aligner):
    """For a byte-level decoder, whose text is the UTF-8 reading of the tokens' bytes, one after the other."""

    def __init__(self, tokenizer: Any, special_ids: dict[str, int]):
        super().__init__(tokenizer, special_ids)
        self._bytes = _ByteTable(tokenizer, self._decode)

    def align(self, ids: list[int]) -> tuple[str, np.ndarray]:
        table = self._bytes
        pieces = [table[i] for i in ids]
        if table.irregular:
            return super().align(ids)
        data = b"".join(pieces)
        ends = np.cumsum(np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)))
        if data.isascii():
            return data.decode("ascii"), ends
        text, complete_at = _utf8_characters(data)
        return text, np.searchsorted(complete_at, ends, side="right")


class _PieceAligner(_Aligner):
    """For decoders in which a token, except the first, reads the same everywhere (SentencePiece-like, word-level).

    Each token's piece is read off behind a known token. The joined pieces are compared with the decoded text: they may
    differ in leading white space, which these decoders strip; where they differ otherwise, prefixes decide.
    """

    def __init__(self, tokenizer: Any, special_ids: dict[str, int], byte_fallback: bool):
        super().__init__(tokenizer, special_ids)
        self._pieces = _PieceTable(tokenizer, self._decode, byte_fallback)

    def align(self, ids: list[int]) -> tuple[str, np.ndarray]:
        table = self._pieces
        if table.anchor is None:
            return super().align(ids)
        pieces = [table[i] for i in ids]
        if table.irregular:
            return super().align(ids)
        if int in set(map(type, pieces)):
            joined, counts = self._join_bytes(pieces)
        else:
            joined = "".join(pieces)
            counts = np.cumsum(np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)))
        text = self._decode(ids)
        stripped = len(joined) - len(text)
        if stripped < 0 or joined[stripped:] != text or joined[:stripped].strip():
            return super().align(ids)
        return text, np.maximum(counts - stripped, 0)

    def _join_bytes(self, pieces: list[str | int]) -> tuple[str, np.ndarray]:
        """Byte-fallback tokens in a row read as UTF-8 if they are valid together, otherwise as U+FFFD each."""
        parts: list[str] = []
        counts: list[int] = []
        total, i = 0, 0
        while i < len(pieces):
            piece = pieces[i]
            if type(piece) is str:
                parts.append(piece)
                total += len(piece)
                counts.append(total)
                i += 1
                continue
            run = bytearray()
            lengths = []
            # Special tokens are dropped before the decoder sees them, so they do not end a run.
            while i < len(pieces) and (type(pieces[i]) is int or not pieces[i]):
                if type(pieces[i]) is int:
                    run.append(pieces[i])
                lengths.append(len(run))
                i += 1
            part = _decode_byte_run(run)
            counts += [total + agreed for agreed in _completed_in_run(run, part, lengths)]
            parts.append(part)
            total += len(part)
        return "".join(parts), np.array(counts, dtype=np.int64)


class _ByteTable(dict):
    """Token id -> its bytes, filled on demand. `irregular` once an id does not decode to what its bytes say."""

    def __init__(self, tokenizer: Any, decode: Callable[[list[int]], str]):
        super().__init__()
        self._tokenizer, self._decode = tokenizer, decode
        self.irregular = False

    def __missing__(self, token_id: int) -> bytes:
        alone = self._decode([token_id])
        token = self._tokenizer.convert_ids_to_tokens(token_id) if alone else ""
        try:
            data = bytes(_CHAR_TO_BYTE[char] for char in token)
        except KeyError:
            data = token.encode()
        if data.decode("utf-8", "replace") != alone:
            self.irregular = True
        self[token_id] = data
        return data


class _PieceTable(dict):
    """Token id -> its text behind another token, or its value if it is a byte-fallback token; filled on demand."""

    def __init__(self, tokenizer: Any, decode: Callable[[list[int]], str], byte_fallback: bool):
        super().__init__()
        self._tokenizer, self._decode, self._byte_fallback = tokenizer, decode, byte_fallback
        self.irregular = False
        self.anchor = next((i for i in range(len(tokenizer)) if decode([i]).strip().isalnum()), None)
        self._prefix = decode([self.anchor]) if self.anchor is not None else ""

    def __missing__(self, token_id: int) -> str | int:
        piece: str | int
        token = self._tokenizer.convert_ids_to_tokens(token_id) if self._byte_fallback else None
        match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token or "")
        if match and self._decode([token_id]):
            piece = int(match.group(1), 16)
        else:
            both = self._decode([self.anchor, token_id])
            piece = both[len(self._prefix) :]
            # A replacement character in a piece could be confused with the one of an incomplete byte run.
            if not both.startswith(self._prefix) or _REPLACEMENT in piece:
                self.irregular = True
        self[token_id] = piece
        return piece


_aligners: WeakKeyDictionary = WeakKeyDictionary()


def _aligner(tokenizer: Any) -> _Aligner:
    """Returns the tokenizer's aligner; its tables are kept until the decoder or the added tokens change."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "get_added_tokens_decoder"):
        tokens = getattr(tokenizer, "all_special_tokens", [])
        return _Aligner(tokenizer, dict(zip(tokens, getattr(tokenizer, "all_special_ids", []), strict=False)))
    decoder = backend.decoder
    state = decoder.__getstate__() if decoder is not None else b"null"
    added = backend.get_added_tokens_decoder()
    key = (state, tuple((i, token.content, token.special) for i, token in added.items()))
    cached = _aligners.get(tokenizer)
    if cached is None or cached[0] != key:
        special_ids = {token.content: i for i, token in added.items() if token.special}
        # A proxy, since a value that holds its key would keep the entry alive for ever.
        cached = (key, _build_aligner(proxy(tokenizer), json.loads(state), special_ids))
        _aligners[tokenizer] = cached
    return cached[1]


def _build_aligner(tokenizer: Any, decoder: dict | None, special_ids: dict[str, int]) -> _Aligner:
    parts = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] if part else None for part in parts]
    if kinds == ["ByteLevel"]:
        return _ByteLevelAligner(tokenizer, special_ids)
    if kinds == [None] or kinds == ["WordPiece"] or set(kinds) <= _PIECEWISE_DECODERS:
        return _PieceAligner(tokenizer, special_ids, byte_fallback="ByteFallback" in kinds)
    return _Aligner(tokenizer, special_ids)


_PIECEWISE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def _common_prefix(a: str, b: str) -> int:
    """Returns the length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _decode_byte_run(run: bytes | bytearray) -> str:
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return _REPLACEMENT * len(run)


def _completed_in_run(run: bytearray, text: str, lengths: list[int]) -> list[int]:
    """How many characters of a byte-fallback run's text its first bytes complete, for each number of bytes."""
    if _REPLACEMENT not in text:
        ends = list(accumulate(len(char.encode()) for char in text))
        return [bisect_right(ends, length) for length in lengths]
    return list(accumulate((_common_prefix(_decode_byte_run(run[:n]), text) for n in lengths), max))


def _utf8_characters(data: bytes) -> tuple[str, np.ndarray]:
    """Decodes as `errors="replace"` does; returns the text and how many bytes complete each character: (len(text),).

    U+FFFD counts as complete with its first byte, since the prefix of a sequence reads as U+FFFD too.
    """
    parts, starts = [], []
    position = 0
    while position < len(data):
        try:
            good, bad = data[position:].decode("utf-8"), 0
        except UnicodeDecodeError as error:
            good, bad = data[position : position + error.start].decode("utf-8"), error.end - error.start
        size = len(data) - position if not bad else len(good.encode("utf-8"))
        leads = np.frombuffer(data, dtype=np.uint8, count=size, offset=position)
        starts.append(np.flatnonzero((leads & 0xC0) != 0x80) + position)
        parts.append(good)
        position += size
        if bad:
            parts.append(_REPLACEMENT)
            starts.append(np.array([position]))
            position += bad
    text = "".join(parts)
    first = np.concatenate([*starts, [len(data)]]) if starts else np.array([len(data)])
    complete = first[1:].copy()
    replaced = np.array([char == _REPLACEMENT for char in text], dtype=bool) if _REPLACEMENT in text else None
    if replaced is not None:
        complete[replaced] = first[:-1][replaced] + 1
    return text, complete


def _byte_alphabet() -> dict[str, int]:
    """Returns the printable characters by which byte-level vocabularies write the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_CHAR_TO_BYTE = _byte_alphabet()
