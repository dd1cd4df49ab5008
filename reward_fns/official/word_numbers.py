"""Numbers in English words, as the package word2number 1.1 reads them, which the Qwen2.5-Math grader calls."""

_WORDS = (
    "zero one two three four five six seven eight nine "
    "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety hundred"
_UNITS = _WORDS.split()[:10]
_VALUES = {word: value for value, word in enumerate(_WORDS.split())}
_VALUES |= {word: 10 * value for value, word in enumerate(_TENS.split(), start=2)}
_SCALES = {"billion": 10**9, "million": 10**6, "thousand": 10**3}
_POINT = "point"
_KNOWN = {*_VALUES, *_SCALES, _POINT}


def _value(word: str) -> int:
    return _VALUES[word] if word in _VALUES else _SCALES[word]


def _below_thousand(words: list[str]) -> int:
    """The rules of word2number: two words multiply only when one is "hundred", and five or more count as the first."""
    values = [_value(word) for word in words]
    match values:
        case [a, b]:
            return a * b if 100 in values else a + b
        case [a, b, c]:
            return a * b + c
        case [a, b, c, d]:
            return a * b + c + d
        case [first, *_]:
            return first
    raise ValueError("no words")


def word_to_num(text: str) -> int | float:
    """The number that the words of a text say, words that are no numbers skipped.

    Raises:
        ValueError: No number word, or an order of words that word2number does not read.
    """
    text = text.replace("-", " ").lower()
    if text.isdigit():
        return int(text)
    words = [word for word in text.split() if word in _KNOWN]
    if not words:
        raise ValueError("no number words")
    if any(words.count(word) > 1 for word in (_POINT, *_SCALES)):
        raise ValueError("a scale or the point twice")
    decimals: list[str] = []
    if _POINT in words:
        at = words.index(_POINT)
        words, decimals = words[:at], words[at + 1 :]
    total = _whole(words)
    if decimals and all(word in _UNITS for word in decimals):
        return total + float("0." + "".join(str(_UNITS.index(word)) for word in decimals))
    return total


def _whole(words: list[str]) -> int:
    if not words:
        return 0
    if len(words) == 1:
        return _value(words[0])
    scales = [(words.index(word), value) for word, value in _SCALES.items() if word in words]
    if [at for at, _ in scales] != sorted(at for at, _ in scales):
        raise ValueError("scales out of order")
    total, begin = 0, 0
    for at, value in scales:
        total += _below_thousand(words[begin:at]) * value
        begin = at + 1
    # The smallest scale that does not end the text begins the rest. So "two million three thousand" is 2,004,003:
    # the thousands are counted again after "million". That is how word2number adds.
    for at, _ in reversed(scales):
        if at != len(words) - 1:
            return total + _below_thousand(words[at + 1 :])
    return total if scales else _below_thousand(words)
