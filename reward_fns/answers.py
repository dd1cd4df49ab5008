"""Reads an answer's structure: numbers with units, lists, sets, intervals, tuples, matrices, relations, words.

`read_answer` never computes anything and never calls sympy; see `compare` for what follows.
"""

import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache

from .clean import TEXT_CLOSE, TEXT_OPEN, canonical, clean, matching_brace
from .clean import words as _words
from .exact import Refused, Unsupported, const_value, equal, normal_form, numeric
from .latex import MAX_LENGTH, parse_expression

__all__ = ["Answer", "read_answer"]

MAX_ITEMS = 60
# Longer answers are no quantities, and the searches for units need not be linear.
MAX_WITH_UNIT = 300


@dataclass(eq=False)
class Answer:
    """One reading of an answer.

    kind is one of
        "number"    anything that is one value: `text`, `unit`, `percent`; `tree` parses it on demand
        "list"      items without brackets; order does not count
        "set"       items in braces
        "tuple"     items in `opener` and `closer`; with two items maybe an interval
        "union"     pieces joined by ∪ ("setminus" with two items: the second taken from the first)
        "matrix"    rows of items
        "relation"  `items` with `ops` between them
        "ratio"     a : b (: c)
        "time"      (hours, minutes, seconds, "am" | "pm" | "")
        "date"      (month, day or None, year or None)
        "base"      digits, base
        "choice"    a capital letter
        "word"      anything in words
        "false"     a statement that contradicts itself, such as 1 = 7
    """

    kind: str
    text: str
    items: tuple = ()
    ops: tuple = ()
    opener: str = ""
    closer: str = ""
    unit: str = ""
    percent: bool = False
    doubtful: bool = False  # the unit is one letter, which could be a variable: it needs a unit on the other side
    value: tuple = ()
    name: str = ""  # left side of an assignment
    alternatives: list["Answer"] = field(default_factory=list)
    source: str = ""

    @cached_property
    def key(self) -> str:
        return canonical(self.text)

    @cached_property
    def tree(self) -> tuple | None:
        """The expression tree of a number, or None when it is outside of what `latex` reads. Raises Refused."""
        try:
            return parse_expression(self.text)
        except Unsupported:
            return None

    @cached_property
    def form(self) -> tuple | None:
        """The exact normal form, or None. Raises Refused."""
        if self.tree is None:
            return None
        try:
            return normal_form(self.tree)
        except (Unsupported, ZeroDivisionError):
            return None

    @cached_property
    def undefined(self) -> bool:
        """True for a division by zero."""
        if self.tree is None:
            return False
        try:
            normal_form(self.tree)
        except ZeroDivisionError:
            return True
        except (Unsupported, Refused):
            return False
        return False

    @cached_property
    def decimals(self) -> int | None:
        """Digits after the point of a plain decimal, 0 of an integer, None of anything else."""
        match = re.fullmatch(r"[+-]?\s*(\d*)(?:\.(\d*))?", self.text)
        if not match or not (match[1] or match[2]):
            return None
        return len(match[2] or "")

    @cached_property
    def significant(self) -> int:
        """Significant digits of a plain decimal."""
        return len(re.sub(r"\D", "", self.text).lstrip("0"))


# --- splitting -------------------------------------------------------------------------------------------------------

_SCAN = re.compile(
    r"\\begin\s*\{[^{}]*\}|\\end\s*\{[^{}]*\}|\\[{}]|\\[a-zA-Z]+|\\.|"
    + TEXT_OPEN
    + "[^"
    + TEXT_CLOSE
    + "]*"
    + TEXT_CLOSE
    + r"|[()\[\]{}]|<>|[,;=<>:]|[^\\()\[\]{},;=<>:"
    + TEXT_OPEN
    + "]+|.",
    re.DOTALL,
)
_OPEN = {"(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil"}
_CLOSE = {")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil"}


def _split(text: str, separators: frozenset[str]) -> tuple[list[str], list[str]]:
    """Splits at separators outside of all brackets. Returns the parts and the separators between them."""
    parts, found = [], []
    depth, start = 0, 0
    for match in _SCAN.finditer(text):
        piece = match[0]
        if piece in _OPEN or piece.startswith("\\begin"):
            depth += 1
        elif piece in _CLOSE or piece.startswith("\\end"):
            depth = max(0, depth - 1)
        elif depth == 0 and piece in separators:
            parts.append(text[start : match.start()])
            found.append(piece)
            start = match.end()
    parts.append(text[start:])
    return parts, found


_RELATIONS = frozenset(["=", "<", ">", "\\le", "\\ge", "\\ne", "\\approx", "\\equiv", "\\in", "\\sim", "\\cong"])
_LIST = frozenset([",", ";"])
_ARROW = frozenset(["\\to"])
_UNION = frozenset(["\\cup"])
_MINUS = frozenset(["\\setminus"])


def _wrapped(text: str) -> tuple[str, str, str] | None:
    """(opener, inside, closer) when one pair of brackets encloses the whole text."""
    pieces = [(m[0], m.start(), m.end()) for m in _SCAN.finditer(text)]
    if len(pieces) < 2 or pieces[0][0] not in _OPEN or pieces[-1][0] not in _CLOSE:
        return None
    depth = 0
    for i, (piece, _, _) in enumerate(pieces):
        if piece in _OPEN or piece.startswith("\\begin"):
            depth += 1
        elif piece in _CLOSE or piece.startswith("\\end"):
            depth -= 1
            if depth == 0 and i < len(pieces) - 1:
                return None
    if depth:
        return None
    return pieces[0][0], text[pieces[0][2] : pieces[-1][1]], pieces[-1][0]


# --- units -----------------------------------------------------------------------------------------------------------

# name -> (dimension, factor). Two units of one dimension convert; others are equal only when they are the same word.
UNITS: dict[str, tuple[str, Fraction]] = {}


def _unit(dimension: str, factor, *names: str) -> None:
    for name in names:
        UNITS[name] = (dimension, Fraction(factor))


_unit("length", 1, "m", "meter", "metre")
_unit("length", "1/1000", "mm", "millimeter", "millimetre")
_unit("length", "1/100", "cm", "centimeter", "centimetre")
_unit("length", 1000, "km", "kilometer", "kilometre")
_unit("length", "0.0254", "inch", "in")
_unit("length", "0.3048", "ft", "foot", "feet")
_unit("length", "0.9144", "yd", "yard")
_unit("length", "1609.344", "mi", "mile")
_unit("mass", "1/1000", "g", "gm", "gram", "gramme")
_unit("mass", 1, "kg", "kilogram")
_unit("mass", "1/1000000", "mg", "milligram")
_unit("mass", "0.45359237", "lb", "pound")
_unit("mass", "0.028349523125", "oz", "ounce")
_unit("time", 1, "s", "sec", "second")
_unit("time", 60, "min", "minute")
_unit("time", 3600, "h", "hr", "hour")
_unit("time", 86400, "day")
_unit("time", 604800, "wk", "week")
_unit("volume", 1, "l", "liter", "litre")
_unit("volume", "1/1000", "ml", "milliliter", "millilitre")
_unit("money", 1, "dollar", "usd", "buck")
_unit("money", "1/100", "cent")
_unit("euro", 1, "euro", "eur")
_unit("gbp", 1, "gbp", "pound sterling")
_unit("yen", 1, "yen")
_unit("rupee", 1, "rupee")
_unit("angle", 1, "degree", "deg", "°", "degree celsius", "degree fahrenheit", "celsius", "fahrenheit")
_unit("speed", 1, "mph", "mile per hour", "mile/hour", "mi/h")
_unit("speed km", 1, "kph", "km/h", "kilometer per hour", "km per hour", "kmh")
_UNIT_WORDS = frozenset(
    [name for name in UNITS if len(name) > 1 and name != "in"]
    + _words("unit square sq cubic cu euro yuan rupee pound sterling percent point people person student acre gallon")
)
# Words that say something about a number and so are not a unit of it.
_NOT_UNITS = frozenset(
    _words(
        "not no wrong incorrect false never or and if when where for but except without else otherwise "
        "because then so is are was were be equals equal plus minus times divided over mod modulo base than "
        "least most about approximately greater less more fewer between undefined infinity infinitely maybe "
        "perhaps either neither none half third quarter thirds fourths hundred thousand million billion "
        "trillion dozen squared cubed factorial pi with to from unless instead correct answer"
    )
)


def _unit_name(words: str) -> str | None:
    """The unit's usual name: `square centimeters` and `cm^2` are both "cm^2". None when the words are no unit."""
    words = words.strip().lower().strip(".,;:!()").replace("\\", " ").strip()
    words = re.sub(r"\s+", " ", words)
    power = ""
    match = re.search(r"\s*\^\s*\{?\s*([23])\s*\}?$", words)
    if match:
        power, words = match[1], words[: match.start()]
    elif re.fullmatch(r"(?:[kcm]?m|ft|in|yd|mi)[23]", words):
        power, words = words[-1], words[:-1]
    match = re.match(r"(square|sq\.?|cubic|cu\.?)\s+(?=\S)", words)
    if match:
        power, words = "2" if match[1][0] == "s" else "3", words[match.end() :]
    match = re.search(r"\s+(squared|cubed)$", words)
    if match:
        power, words = "2" if match[1] == "squared" else "3", words[: match.start()]
    words = words.strip(" .")
    if not words:
        return ""
    if any(word.strip(".,") in _NOT_UNITS for word in words.split()):
        return None
    if not re.fullmatch(r"[a-z°][a-z°\s./·'-]*", words):
        return None
    base = _singular(words)
    if base in UNITS:
        dimension, factor = UNITS[base]
        base = min((n for n, v in UNITS.items() if v == (dimension, factor)), key=len)
    return f"{base}^{power}" if power else base


def _singular(words: str) -> str:
    head, space, last = words.rpartition(" ")
    head = re.sub(r"\b(kilometer|mile|meter|degree)s\b", r"\1", head).replace("feet", "foot")
    if last in UNITS or head + space + last in UNITS:
        return head + space + last
    for ending, new in (("ches", "ch"), ("feet", "foot"), ("ies", "y"), ("s.", ""), ("s", "")):
        if last.endswith(ending) and len(last) > len(ending):
            last = last[: -len(ending)] + new
            break
    return head + space + last


def unit_scale(unit: str) -> tuple[str, Fraction] | None:
    """(dimension, factor) of a unit's name, with its power; None when it is not a known unit."""
    base, _, power = unit.partition("^")
    if base not in UNITS:
        return None
    dimension, factor = UNITS[base]
    n = int(power) if power else 1
    return f"{dimension}^{n}", factor**n


_PERCENT = re.compile(
    r"\s*(?:\\?%|"
    + TEXT_OPEN
    + r"?\s*(?<![a-z])(?:percent(?:age)?(?: points?)?|per cent|pct)\.?\s*"
    + TEXT_CLOSE
    + r"?)\s*$",
    re.IGNORECASE,
)
_MARKED_UNIT = re.compile(r"((?:\x02[^\x02\x03]*\x03(?:\s*\^\s*(?:\{\s*[23]\s*\}|[23]))?[\s/.]*)+)$")
_PLAIN_UNIT = re.compile(
    r"(?<=[\d)}])\s*((?<=[\s\d)}])[A-Za-z][A-Za-z.]*(?:[\s/]+[A-Za-z][A-Za-z.]*){0,4}(?:\s*\^\s*\{?[23]\}?)?)$"
)
# Words in other scripts right after a number.
_FOREIGN_UNIT = re.compile(
    r"(?<=[\d}])\s*[\u0400-\u04ff\u0600-\u06ff\u0900-\u097f\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]{1,8}$"
)
_DEGREE = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:[CF](?![A-Za-z]))?$")
_CURRENCY = re.compile(r"(?:\\?\$|\\?[€£¥₹₽₩]|\\text(?:dollar|euro)|(?:US|USD|EUR|Rs\.?)\s*(?=\\?\$|\d))\s*")


_MODULUS = re.compile(
    r"\s*(?:\\pmod\s*(?:\{\s*(\w+)\s*\}|(?=\w))|\(\s*(?:\\bmod|\\mod|\x02?mod\x03?)\s*(?=\w+\s*\)$))(\w+)?\s*\)?$"
)


def _strip_unit(text: str) -> tuple[str, str, bool]:
    """(rest, unit, percent)."""
    if len(text) > MAX_WITH_UNIT:
        return text, "", False
    match = _PERCENT.search(text)
    if match and match.start() > 0:
        return text[: match.start()].strip(), "", True
    match = _MODULUS.search(text)
    if match and match.start() > 0:
        return text[: match.start()].strip(), f"mod {match[1] or match[2]}", False
    unit = ""
    match = _CURRENCY.match(text) or re.match(r"-\s*(?=\\?\$)", text)
    if match and text[match.end() :].strip():
        sign = "-" if text[0] == "-" else ""
        rest = text[match.end() :]
        if sign:
            rest = _CURRENCY.sub("", rest, count=1)
        body, more, _ = _strip_unit(rest.strip())
        return sign + body, _currency_name(text) if not more or more.startswith("per ") else more, False
    match = re.search(r"(?<=[\d}])\s*\\?([€£¥₹$])$", text)
    if match:
        return text[: match.start()].strip(), _currency_name(match[1]), False
    match = _FOREIGN_UNIT.search(text)
    if match:
        return text[: match.start()].strip(), "", False
    match = _MARKED_UNIT.search(text)
    if match and match.start() > 0:
        words = re.sub(f"[{TEXT_OPEN}{TEXT_CLOSE}]", " ", match[1])
        name = _unit_name(words)
        if name is not None:
            rest, inner, percent = _strip_unit(text[: match.start()].strip())
            return rest, name if name else inner, percent
        return text, "", False
    match = _PLAIN_UNIT.search(text)
    if match and _is_plain_unit(match[1]):
        name = _unit_name(match[1])
        if name:
            rest = text[: match.start()].strip()
            rest = _CURRENCY.sub("", rest, count=1) if _CURRENCY.match(rest) else rest
            return rest, name, False
    match = _DEGREE.search(text)
    if match and match.start() > 0 and "\\" not in re.sub(r"\\(?:frac|sqrt|pi|pm|mp)\b", "", text[: match.start()]):
        body = text[: match.start()].strip()
        if not re.search(r"[a-zA-Z]|\^\s*(?:\{\s*\\circ|\\circ)", re.sub(r"\\[a-zA-Z]+", "", body)):
            return body, "°", False
    return text, unit, False


def _currency_name(text: str) -> str:
    for sign, name in (("€", "euro"), ("£", "gbp"), ("¥", "yen"), ("₹", "rupee"), ("$", UNIT_DOLLAR)):
        if sign in text:
            return name
    return UNIT_DOLLAR


UNIT_DOLLAR = min((n for n, v in UNITS.items() if v == UNITS["dollar"]), key=len)


def _is_plain_unit(words: str) -> bool:
    """Whether words without `\\text` are a unit. A single letter is a variable."""
    parts = re.findall(r"[A-Za-z]+", words)
    if any(part.lower() in _NOT_UNITS for part in parts) or "log" in parts or "sin" in parts:
        return False
    if re.fullmatch(
        r"(?:[kcm]?m|ft|mi|miles?|meters?|feet)\s*/\s*(?:s|h|hr|sec|min|hour|second)s?", words.split("^")[0].strip()
    ):
        return True
    first = parts[0].lower()
    if first == "per" and len(parts) > 1:
        return True
    if _singular(first) in _UNIT_WORDS or first in _UNIT_WORDS:
        return True
    return len(parts[0]) >= 4 and parts[0].islower() and first not in ("sqrt", "frac", "cdot", "ceil", "floor")


# --- words, times, dates ---------------------------------------------------------------------------------------------

_MONTHS = {
    name[:3]: i
    for i, name in enumerate(
        _words("january february march april may june july august september october november december"), 1
    )
}
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?:,?\s*(?P<year>\d{4}))?"
_DATES = [
    re.compile(rf"(?:the\s+)?{_MONTH}\s*(?:the\s+)?{_DAY}{_YEAR}"),
    re.compile(rf"(?:the\s+)?{_DAY}\s*(?:of\s+)?{_MONTH}{_YEAR}"),
]
_WEEKDAY = re.compile(r"(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s+")
_TIME = re.compile(
    r"(?P<h>\d{1,2})(?:\s*:\s*(?P<m>\d{2}))?(?:\s*:\s*(?P<s>\d{2}))?\s*(?:(?P<half>[ap])\s?\.?\s?m\.?)?\s*(?:o'?clock)?"
)
_NUMBER_WORDS = {
    word: i
    for i, word in enumerate(
        _words(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
            "sixteen seventeen eighteen nineteen"
        )
    )
}
_TENS = {
    w: 10 * i for i, w in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)
}
_SYNONYMS = {
    "yes": "true",
    "no": "false",
    "t": "true",
    "f": "false",
    "correct": "true",
    "incorrect": "false",
    "dne": "doesnotexist",
    "nosolutions": "nosolution",
    "nosolutionexists": "nosolution",
    "nosolutionsexist": "nosolution",
    "norealsolution": "norealsolutions",
    "emptyset": "nosolution",
    "theemptyset": "nosolution",
    "empty": "nosolution",
    "none": "nosolution",
    "allrealnumbers": "realnumbers",
    "allreals": "realnumbers",
    "reals": "realnumbers",
    "thereals": "realnumbers",
    "therealnumbers": "realnumbers",
    "infinite": "infinity",
    "infinitelymany": "infinity",
}


def _plain_words(text: str) -> str:
    text = re.sub(f"[{TEXT_OPEN}{TEXT_CLOSE}$]", " ", text)
    return re.sub(r"\s+", " ", text).strip().strip(".,;:!").strip()


def _number_word(words: str) -> int | None:
    parts = words.lower().replace("-", " ").split()
    if len(parts) == 1:
        return _NUMBER_WORDS.get(parts[0], _TENS.get(parts[0]))
    if len(parts) >= 2 and parts[1] == "hundred" and 0 < _NUMBER_WORDS.get(parts[0], 0) < 10:
        rest = _number_word(" ".join(p for p in parts[2:] if p != "and")) if parts[2:] else 0
        return None if rest is None or rest > 99 else 100 * _NUMBER_WORDS[parts[0]] + rest
    if len(parts) == 2 and parts[0] in _TENS and 0 < _NUMBER_WORDS.get(parts[1], 0) < 10:
        return _TENS[parts[0]] + _NUMBER_WORDS[parts[1]]
    return None


def _date_or_time(words: str) -> Answer | None:
    if len(words) > 60 or not re.search(r"\d", words):
        return None
    low = words.lower()
    if not re.search(r"[a-z]", low) and ":" not in low:
        return None
    bare = _WEEKDAY.sub("", low)
    for pattern in _DATES:
        match = pattern.fullmatch(bare)
        if match:
            year = int(match["year"]) if match["year"] else None
            return Answer("date", words, value=(_MONTHS[match["month"][:3]], int(match["day"]), year))
    match = _TIME.fullmatch(low)
    if match and (match["m"] or match["half"]) and int(match["h"]) < 25 and int(match["m"] or 0) < 60:
        value = (
            int(match["h"]),
            int(match["m"] or 0),
            int(match["s"] or 0),
            (match["half"] or "") and match["half"] + "m",
        )
        answer = Answer("time", words, value=value)
        if not match["half"] and match["m"]:
            items = tuple(_number(part) for part in low.replace(" ", "").split(":"))
            answer.alternatives.append(Answer("ratio", words, items=items))
        return answer
    return None


_CHOICE = re.compile(r"(?:(?:option|choice|answer)\s*:?\s*)?\(?\s*([A-Za-z])\s*\)?[.:]?", re.IGNORECASE)
_CHOICE_WITH_TEXT = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?(?:\(\s*([A-Z])\s*\)|([A-Z])\s*[).:](?!\S)|([A-Z])\s*[.)]\s*(?=\S))\s*(.+)",
    re.DOTALL,
)


def _choice(text: str, marked: bool, depth: int) -> Answer | None:
    """`C`, `(C)`, `\\text{C}`, `C. x = 42`, `(C) 42`. A bare small letter is a variable."""
    words = _plain_words(text)
    match = _CHOICE.fullmatch(words)
    if match and (match[1].isupper() or "(" in words or (marked and len(words) > 1)):
        answer = Answer("choice", words, value=(match[1].upper(),))
        if not marked and "(" not in words:
            answer.alternatives.append(_number(words))
        return answer
    match = _CHOICE_WITH_TEXT.fullmatch(words)
    if match:
        answer = Answer("choice", words, value=(match[1] or match[2] or match[3],))
        written = text.replace(TEXT_OPEN, " ").replace(TEXT_CLOSE, " ").strip()
        rest = _CHOICE_WITH_TEXT.fullmatch(written)
        if rest and depth < 3:
            answer.alternatives.append(_read(rest[4], depth + 8))
        return answer
    return None


_PROSE_ANSWER = re.compile(
    r"(?:answer|result|value|solution|total|sum|product)[^.]{0,40}?\s(?:is|are|=)[:\s]+(.+)", re.I
)


# --- reading ---------------------------------------------------------------------------------------------------------


def _number(text: str, unit: str = "", percent: bool = False) -> Answer:
    return Answer("number", text.strip(), unit=unit, percent=percent)


_BASE = re.compile(
    r"(?P<sign>-?)\s*\(?\s*(?P<digits>(?:[0-9A-Z]|(?<=\d)\.(?=\d)|\x02[0-9A-Za-z]+\x03|[ ,](?=[0-9A-Z]))+)\s*\)?\s*"
    r"(?:_\s*\{?\s*(?P<base>\d{1,2}|\x02\s*[a-z]+\s*\x03)\s*\}?"
    r"|[\x02\s]*(?:\(?\s*(?:in\s+)?base[\s\x03-]*)(?P<word>\d{1,2}|[a-z]+)\)?\s*\x03?)"
)
_SIGNS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")
_ENVIRONMENT = re.compile(
    r"\\begin\s*\{(?P<name>[pbBvV]?matrix|smallmatrix|array|psmallmatrix|bsmallmatrix)\*?\}(?P<body>.*?)\\end\s*\{(?P=name)\*?\}",
    re.DOTALL,
)


@lru_cache(maxsize=20_000)
def read_answer(text: str) -> Answer:
    """Reads an answer, in LaTeX or plain. Raises Refused when it is too long or too large."""
    if len(text) > 4 * MAX_LENGTH:
        raise Refused("too long")
    source = clean(text)
    if len(source) > MAX_LENGTH:
        raise Refused("too long")
    try:
        answer = _read(_unwrapped(source), 0)
    except RecursionError:
        raise Refused("nested too deeply") from None
    answer.source = source
    return answer


def _unwrapped(text: str) -> str:
    """Without math delimiters, an outer box, bold marks, quotes and final punctuation."""
    while True:
        before = text
        text = text.strip().strip('"').strip()
        text = re.sub(r"(?<![.\d])\.$|(?<=\d)\.$|(?<=[)\]}\x03])\.$", "", text).strip()
        text = re.sub(r"(?:\\\\|[,;:]|\\(?:newline|blacksquare|square|qed)(?![a-zA-Z]))$", "", text).strip()
        for opener, closer in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`")):
            inside = text[len(opener) : len(text) - len(closer)]
            if (
                len(text) > len(opener) + len(closer)
                and text.startswith(opener)
                and text.endswith(closer)
                and opener not in inside
            ):
                text = inside
        match = re.match(r"\\(?:boxed|fbox|mathbf|boldsymbol|bm|text|mathrm)\s*(?=\{)", text)
        if match and matching_brace(text, match.end()) == len(text) - 1:
            text = text[match.end() + 1 : -1]
        if text == before:
            return text


def _read(text: str, depth: int) -> Answer:
    if depth > 12:
        raise Refused("nested too deeply")
    text = _unwrapped(text)
    words = _plain_words(text)
    marked = text.startswith(TEXT_OPEN) and text.endswith(TEXT_CLOSE)
    simple = re.fullmatch(r"-?\d+(?:\.\d+)?", text)
    if simple:
        return _number(text)
    if not text:
        return Answer("word", "", value=("",))
    if text == "\\emptyset" or text == "\\{\\}" or text == "\\{ \\}":
        return Answer("set", text, alternatives=[Answer("word", text, value=("nosolution",))])
    if re.fullmatch(r"\\mathbb\s*\{?R\}?", text):
        return Answer("union", text, items=(_reals(),), alternatives=[Answer("word", text, value=("realnumbers",))])
    found = _choice(text, marked, depth) or _date_or_time(words)
    if found:
        return found
    number = _number_word(words)
    if number is not None:
        return _number(str(number))
    if marked and text.count(TEXT_OPEN) == 1:
        return _read_words(text[1:-1], depth)
    if _only_words(text):
        return _read_words(words, depth)
    found = _read_base(text)
    if found:
        return found
    text = _LEAD_IN.sub("", text)
    text = _MEMBER.sub("", text)
    text = _ASIDE.sub("", text)
    text = _DOMAIN.sub("", text)
    to = _TO_RATIO.fullmatch(text)
    if to:
        return Answer("ratio", text, items=(_number(to[1]), _number(to[2])))
    large = _LARGE.fullmatch(text)
    return _read_math(_spelled_out(large) if large else text, depth)


def _reals() -> Answer:
    return Answer(
        "tuple", "(-\\infty,\\infty)", items=(_number("-\\infty"), _number("\\infty")), opener="(", closer=")"
    )


def _only_words(text: str) -> bool:
    """Prose or a word: letters only, and at least one word that cannot be a product of variables."""
    plain = re.sub(f"[{TEXT_OPEN}{TEXT_CLOSE}]", " ", text)
    if re.search(r"[\d\\=<>+*/^_{}\[\]|]", plain):
        return False
    plain = plain.strip()
    names = re.findall(r"[A-Za-z]+", plain)
    if not names:
        return True
    if re.search(r"[,;()]", plain) and max(map(len, names)) <= 3:
        return False
    if any(name in ("or", "and") for name in names):
        return False
    return max(map(len, names)) > 4 or (plain.isalpha() and plain.isupper() and len(plain) > 1) or TEXT_OPEN in text


def _read_words(words: str, depth: int) -> Answer:
    words = words.strip().strip(".,;:")
    prose = _PROSE_ANSWER.search(words)
    if prose:
        return _read(prose[1], depth + 1)
    inner = _date_or_time(words) or _choice(words, True, depth)
    if inner:
        return inner
    parts = [p for p in re.split(r"\s*(?:,|;|\band\b|\bor\b)\s*", words) if p]
    if len(parts) > 1 and all(len(part.split()) <= 2 for part in parts):
        return Answer("list", words, items=tuple(_read(part, depth + 1) for part in parts))
    word = Answer("word", words, value=(_word_key(words),))
    if re.search(r"\d", words):
        math = _read_math(words, depth + 1)
        if math.kind != "number" or math.tree is not None:
            math.alternatives.append(word)
            return math
    return word


def _word_key(words: str) -> str:
    key = re.sub(r"[^a-z0-9]+", "", re.sub(r"^\s*(?:the|an|a)\s+(?=[a-z]{2})", "", words.lower()))
    return _SYNONYMS.get(key, key)


def _read_base(text: str) -> Answer | None:
    match = _BASE.fullmatch(text)
    if not match:
        return None
    base = re.sub(r"\W", "", match["base"] or match["word"])
    value = int(base) if base.isdigit() else _NUMBER_WORDS.get(base)
    digits = re.sub(r"[^0-9A-Za-z.]", "", match["digits"]).upper()
    if value is None or not 2 <= value <= 36 or not re.search(r"\d", digits):
        return None
    if any(int(d, 36) >= value for d in digits if d != "."):
        return None
    return Answer("base", text, value=(match["sign"] + (digits.lstrip("0") or "0"), value))


_CONNECTOR = re.compile(
    r"(?<![a-zA-Z\\])\s*,?\s*(?:and|or)\s*,?\s*(?![a-zA-Z]{2})|(?<=[\d)}\]])\s*,?\s*(?:and|or)\s*,?\s*(?=[\\A-Za-z(\d-])"
    r"|(?<=[a-z])\s+,?\s*(?:and|or)\s+,?\s*(?=[a-z\\(\d-])"
)


_FRENCH = re.compile(r"([\[\]])([^\[\],;]+)[,;]([^\[\],;]+)([\[\]])")
_LARGE = re.compile(
    r"(\\?\$\s*)?(-?\d{1,15}(?:\.\d{1,15})?)\s*[\x02\s]*(thousand|million|billion|trillion)(?![a-z])\s*(.*)",
    re.IGNORECASE,
)
# `\\text{Thus, }5`
_LEAD_IN = re.compile(
    r"^\x02\s*(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is)?|thus|therefore|hence|so)\s*[,:]?\s*\x03\s*[:,]?\s*(?=\S)",
    re.IGNORECASE,
)
_MEMBER = re.compile(r"^[a-z]\s+in\s+(?=[\[({\\])")
# `18 (eighteen)`
_ASIDE = re.compile(r"(?<=[\d}])\s*\(\s*(?!mod\b|base\b)[A-Za-z]{3,}(?:[\s-][A-Za-z]+){0,4}\s*\)$")
# `2k\\pi, k \\in \\mathbb{Z}`
_DOMAIN = re.compile(
    r"(?<=\S)\s*[,;(]?\s*(?:where|for|with)?\s*[a-z]\s*\\in\s*\\mathbb\s*\{?\s*[ZNQRC]\s*\}?(?:\s*[\^_]\s*\{?[+*]\}?)?\s*\)?$"
)
_TO_RATIO = re.compile(r"(\d{1,9})\s+to\s+(\d{1,9})")
_LARGE_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def _spelled_out(match: re.Match) -> str:
    """`1.5 million` as 1500000."""
    whole, _, decimals = match[2].partition(".")
    power = _LARGE_POWERS[match[3].lower()]
    number = whole + decimals.ljust(power, "0")[:power]
    if len(decimals) > power:
        number += "." + decimals[power:]
    rest = match[4].replace(TEXT_OPEN, "").replace(TEXT_CLOSE, "").strip()
    return (match[1] or "") + number + (f"{TEXT_OPEN}{rest}{TEXT_CLOSE}" if rest else "")


def _read_math(text: str, depth: int) -> Answer:
    # `12 $ and $13`: delimiters inside an answer.
    if "$" in text:
        text = re.sub(r"(?<!\\)\$(?=\s*(?:,|and|or|\x02|$))|(?<=,|d|r|\x03)(\s*)(?<!\\)\$", " ", text).strip()
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text).strip()
    french = _FRENCH.fullmatch(text)
    if french and (french[1] == "]" or french[4] == "["):
        ends = tuple(_read(part, depth + 1) for part in (french[2], french[3]))
        opener, closer = ("(" if french[1] == "]" else "["), (")" if french[4] == "[" else "]")
        return Answer("tuple", text, items=ends, opener=opener, closer=closer)
    text = _CONNECTOR.sub(" , ", text)
    text = re.sub(r",(?:\s*,)+", ",", text).strip().strip(",;").strip()
    steps, _ = _split(text, _ARROW)
    if len(steps) > 1 and steps[-1].strip():
        text = steps[-1].strip()
    if re.search(r"\\(?:boxed|fbox)\s*\{", text):
        text = _inner_boxes(text)
    bare_set = re.fullmatch(r"\{(.+)\}", text, re.DOTALL)
    if bare_set and matching_brace(text, 0) == len(text) - 1:
        parts, _ = _split(bare_set[1], _LIST)
        if len(parts) > 1:
            return _items("set", text, parts, depth, "\\{", "\\}")
        return _read(bare_set[1], depth + 1)
    whole, cents = _thousands(text)
    if whole is not None:
        rest, unit, percent = _strip_unit(whole)
        if rest != whole or re.fullmatch(r"-?[\d.]+", rest):
            answer = _number(rest, unit, percent)
            answer.alternatives += cents
            return answer
        text = whole
    parts, _ = _split(text, _LIST)
    if len(parts) > 1:
        parts = [part for part in parts if part.strip()]
        if len(parts) > 1:
            answer = _items("list", text, parts, depth)
            answer.alternatives += _decimal_comma(text)
            return answer
        text = parts[0] if parts else text
    answer = _read_relation(text, depth)
    return answer or _read_value(text, depth)


def _inner_boxes(text: str) -> str:
    """`x \\in \\boxed{A}` inside an answer: the box is what counts, several of them are a list."""
    found, at = [], 0
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        if match.start() < at:
            continue
        end = matching_brace(text, match.end() - 1)
        if end < 0:
            break
        found.append(text[match.end() : end])
        at = end
    return ",".join(found) if found else re.sub(r"\\(?:boxed|fbox)\s*\{", "", text)


def _items(kind: str, text: str, parts: list[str], depth: int, opener: str = "", closer: str = "") -> Answer:
    if len(parts) > MAX_ITEMS:
        raise Refused("too many items")
    answer = Answer(kind, text, items=tuple(_read(part, depth + 1) for part in parts), opener=opener, closer=closer)
    units = {item.unit for item in answer.items if item.kind == "number" and item.unit}
    if len(units) == 1 and answer.items[-1].unit:
        # "6, 8 and 10 cm": the unit belongs to all.
        for item in answer.items:
            if item.kind == "number" and not item.unit and not item.percent:
                item.unit = answer.items[-1].unit
    return answer


_COMMA_THOUSANDS = re.compile(r"(?<![\d.,])([1-9]\d{0,2}(?:,\d{3})+)(?![\d]|,\d)")


def _thousands(text: str) -> tuple[str | None, list[Answer]]:
    """`1,234` outside of brackets as 1234. Returns the text without such commas and the other readings."""
    if "," not in text:
        return None, []
    depth_zero = _split(text, frozenset())[0][0]
    if not _COMMA_THOUSANDS.search(depth_zero):
        return None, []
    joined = _COMMA_THOUSANDS.sub(lambda m: m[1].replace(",", "") if _depth_at(text, m.start()) == 0 else m[0], text)
    if joined == text:
        return None, []
    others = []
    match = re.fullmatch(r"\d{1,3}(?:,\d{3})+", text)
    if match:
        parts = text.split(",")
        others.append(Answer("list", text, items=tuple(_number(part) for part in parts)))
    return joined, others


def _depth_at(text: str, position: int) -> int:
    before = re.sub(r"\\[{}]", lambda m: {"\\{": "(", "\\}": ")"}[m[0]], text[:position])
    before = re.sub(r"\\[a-zA-Z]+\s*|[{}]", "", before)
    return sum(before.count(c) for c in "([") - sum(before.count(c) for c in ")]")


def _decimal_comma(text: str) -> list[Answer]:
    """`2,74` as 2.74: no space, and two or more digits after the comma."""
    rest, unit, percent = _strip_unit(text)
    match = re.fullmatch(r"(-?\d+),(\d+)", rest)
    if match and len(match[2]) >= 2:
        return [_number(f"{match[1]}.{match[2]}", unit, percent)]
    return []


_NAME = re.compile(
    r"(?:\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\\?[A-Za-z]+|\([^()]*\))|\\frac\s*\{d[^{}]*\}\s*\{d[^{}]*\}|\\?[a-zA-Z]+(?:\s*\([^()]*\))?'*(?:_\{?[\w\s,']+\}?)?'*(?:\s*\([^()]*\))?|\\(?:overline|vec|mathbf|angle|triangle)\s*"
    r"(?:\{[^{}]*\}|[A-Za-z]+)|"
    + TEXT_OPEN
    + "[^"
    + TEXT_CLOSE
    + "]*"
    + TEXT_CLOSE
    + r"(?:_\{?\w+\}?)?|f\s*\^\{?-1\}?\s*\([a-z]\))"
)


def _read_relation(text: str, depth: int) -> Answer | None:
    parts, ops = _split(text, _RELATIONS)
    if not ops:
        return None
    if ops[0] == "\\approx" and not parts[0].strip() and len(parts) == 2:
        return _read_value(parts[1], depth)
    parts = [part.strip() for part in parts]
    if not all(parts):
        if not parts[0] and ops[0] == "=" and len(parts) == 2:
            return _read(parts[1], depth + 1)
        return _number(text)
    # What follows ≈ only says again, less exactly, what stands before it.
    if "\\approx" in ops:
        at = ops.index("\\approx")
        if at == 0 and _NAME.fullmatch(parts[0]):
            ops = ["=", *ops[1:]]
        else:
            rounded = parts[at + 1]
            parts, ops = parts[: at + 1], ops[:at]
            if not _NAME.fullmatch(parts[0]) and _far_apart(parts[-1], rounded):
                return Answer("false", text)
            if not ops:
                return _read_value(parts[0], depth)
    ops = ["=" if op == "\\equiv" else op for op in ops]
    if ops[-1] == "\\in" and not parts[0].startswith("-"):
        return _read(parts[-1], depth + 1)
    if any(op in ("\\in", "\\sim", "\\cong") for op in ops):
        return _number(text)
    if all(op == "=" for op in ops):
        return _read_equation(text, parts, depth)
    items = tuple(_read_value(part, depth + 1) for part in parts)
    return Answer("relation", text, items=items, ops=tuple(ops))


def _far_apart(exact: str, rounded: str) -> bool:
    """Whether the two sides of ≈ are numbers that differ by more than a tenth."""
    try:
        values = [numeric(parse_expression(side), {"?": _no_variable})[0] for side in (exact, rounded)]
    except (Unsupported, Refused, ZeroDivisionError, OverflowError, ValueError):
        return False
    return abs(values[0] - values[1]) > 0.1 * max(abs(values[0]), abs(values[1]))


def _no_variable() -> float:
    raise Unsupported("variable")


def _read_equation(text: str, parts: list[str], depth: int) -> Answer:
    items = tuple(_read_value(part, depth + 1) for part in parts)
    name = ""
    if _NAME.fullmatch(parts[0]) and not re.fullmatch(r"\\(?:pi|infty|emptyset)|[ei]", parts[0]):
        name = canonical(re.sub(f"[{TEXT_OPEN}{TEXT_CLOSE}]", "", parts[0]))
    answer = Answer("relation", text, items=items, ops=("=",) * (len(items) - 1), name=name)
    if not name and all(item.kind == "number" for item in items):
        values = [item.form for item in items]
        if all(value is not None and not _has_variable(value) for value in values):
            if any(equal(values[0], value) is False for value in values[1:]) and not _percent_chain(items):
                return Answer("false", text)
            return items[-1]
    return answer


def _percent_chain(items: tuple) -> bool:
    """`0.56 = 56\\%`."""
    return all(item.form is not None for item in items) and len({_value_with_percent(item) for item in items}) == 1


def _value_with_percent(item: Answer):
    value = const_value(item.form)
    return value / 100 if item.percent and value is not None else value


def _has_variable(form: tuple) -> bool:
    return any(atom[0] in ("v", "f") for poly in form for monomial in poly for atom, _ in monomial)


_TRANSPOSED = re.compile(r"(.*[)\]}])\s*\^\s*\{?\s*(?:T|\\top|\\intercal|\\mathsf\s*\{\s*T\s*\})\s*\}?")
_COMPOUND = re.compile(
    r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)\.?\s*,?\s*(?:and)?\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\.?", re.IGNORECASE
)


def _compound(text: str) -> Answer | None:
    """`2 hours 30 minutes`, `5 ft 6 in`: one quantity in the smaller unit."""
    match = _COMPOUND.fullmatch(re.sub(f"[{TEXT_OPEN}{TEXT_CLOSE}]", " ", text).strip())
    if not match:
        return None
    units = [_unit_name(match[2]), _unit_name(match[4])]
    scales = [unit_scale(unit) if unit else None for unit in units]
    if None in scales or scales[0][0] != scales[1][0] or scales[0][1] <= scales[1][1]:
        return None
    total = Fraction(match[1]) * scales[0][1] / scales[1][1] + Fraction(match[3])
    return _number(str(total), units[1])


_ONE_LETTER_UNIT = re.compile(r"([\d./]+|\\frac\{\d+\}\{\d+\})\s*((?:m|g|s|h|l|L)(?:\s*\^\s*\{?[23]\}?)?)")


def _read_value(text: str, depth: int) -> Answer:
    """Anything without a relation or list at the top."""
    if depth > 12:
        raise Refused("nested too deeply")
    text = text.strip()
    found = _read_matrix(text, depth)
    if found:
        return found
    for separators, kind in ((_UNION, "union"), (_MINUS, "setminus")):
        parts, ops = _split(text, separators)
        if ops and all(part.strip() for part in parts) and len(parts) <= MAX_ITEMS:
            return Answer(kind, text, items=tuple(_read(part, depth + 1) for part in parts))
    wrapped = _wrapped(text)
    if wrapped:
        opener, inside, closer = wrapped
        if opener == "\\langle":
            opener, closer = "(", ")"
        parts, _ = _split(inside, _LIST)
        if opener == "\\{":
            if re.search(r"\\mid|\||:", inside) and not re.search(r"^\s*-?\d", inside):
                return _set_builder(text, inside, depth)
            inner = [part for part in parts if part.strip()]
            return _items("set", text, inner, depth, opener, closer)
        if opener in "([" and len(parts) > 1 and all(part.strip() for part in parts):
            answer = _items("tuple", text, parts, depth, opener, closer)
            rows = [item.items for item in answer.items if item.kind == "tuple" and item.opener == item.text[0] == "["]
            if opener == "[" and len(rows) == len(parts) and len({len(row) for row in rows}) == 1:
                # A matrix as Python writes it.
                return Answer("matrix", text, items=tuple(rows))
            return answer
        if opener == "(" and closer == ")" and depth < 11:
            inner = _read(inside, depth + 1)
            if inner.kind != "number":
                return inner
    transposed = _TRANSPOSED.fullmatch(text)
    if transposed:
        inner = _read_value(transposed[1], depth + 1)
        if inner.kind == "tuple":
            return Answer("matrix", text, items=tuple((item,) for item in inner.items))
        if inner.kind == "matrix":
            return Answer("matrix", text, items=tuple(zip(*inner.items, strict=True)))
    compound = _compound(text)
    if compound:
        return compound
    signs = _SIGNS.findall(text)
    if signs and len(signs) <= 3:
        variants = _plus_minus(text)
        return Answer("list", text, items=tuple(_read_value(v, depth + 1) for v in variants))
    parts, ops = _split(text, frozenset([":"]))
    if ops and len(parts) <= 6 and all(re.search(r"[\da-z]", part) for part in parts):
        return Answer("ratio", text, items=tuple(_number(part) for part in parts))
    rest, unit, percent = _strip_unit(text)
    if rest != text:
        inner = _read_value(rest, depth + 1)
        if inner.kind in ("number", "base"):
            inner.unit = inner.unit or unit
            inner.percent = inner.percent or percent
        elif inner.kind in ("list", "tuple", "set", "ratio"):
            for item in inner.items:
                if item.kind == "number" and not item.unit:
                    item.unit, item.percent = unit, percent
        return inner
    base = _read_base(text)
    if base:
        return base
    letter = _ONE_LETTER_UNIT.fullmatch(text)
    if letter:
        answer = _number(text)
        unit = _unit_name(letter[2])
        answer.alternatives.append(Answer("number", letter[1], unit=unit, doubtful=True))
        return answer
    if TEXT_OPEN in text:
        words = _plain_words(text)
        return Answer("word", text, value=(_word_key(words),))
    return _number(_without_dollar(text))


def _without_dollar(text: str) -> str:
    return re.sub(r"\\?\$", "", text).strip() if re.search(r"\\?\$\s*\d", text) else text


def _set_builder(text: str, inside: str, depth: int) -> Answer:
    """`\\{x \\mid x < 3\\}`: the condition."""
    condition = re.split(r"\\mid(?![a-zA-Z])|\||:", inside, maxsplit=1)
    if len(condition) == 2 and condition[1].strip():
        answer = _read(condition[1].strip(), depth + 1)
        if answer.kind == "relation":
            return answer
    return _number(text)


def _plus_minus(text: str) -> list[str]:
    signs = [match[1] for match in _SIGNS.finditer(text)]
    pieces = _SIGNS.split(text)[::2]
    out = []
    if "mp" in signs:
        choices = [[s == "pm" for s in signs], [s != "pm" for s in signs]]
    else:
        choices = [[bool(n >> i & 1) for i in range(len(signs))] for n in range(2 ** len(signs))]
    for choice in choices:
        variant = pieces[0]
        for plus, piece in zip(choice, pieces[1:], strict=True):
            variant += ("+" if plus else "-") + piece
        out.append(re.sub(r"^\s*\+", "", variant))
    return out


def _read_matrix(text: str, depth: int) -> Answer | None:
    match = _ENVIRONMENT.fullmatch(text)
    if not match:
        loose = re.fullmatch(r"\\begin\s*\{array\}(?P<body>.*?)\\end\s*\{array\}", text, re.DOTALL)
        if not loose:
            return None
        match = loose
    name = match.groupdict().get("name") or "array"
    if name in ("vmatrix", "Vmatrix"):
        return None
    body = match["body"]
    if name == "array":
        body = re.sub(r"^\s*\{[^{}]*\}", "", body)
    if "\\begin" in body:
        return None
    rows = [row for row in re.split(r"\\\\(?:\s*\[[^\]]*\])?", body) if row.strip()]
    cells = [re.split(r"(?<!\\)&", row) for row in rows]
    if not cells or len(cells) * max(map(len, cells)) > 150 or len({len(row) for row in cells}) != 1:
        return None
    items = tuple(tuple(_read(cell, depth + 1) for cell in row) for row in cells)
    return Answer("matrix", text, items=items)
