"""The text of a step -> tokens: numbers with their precision, operators in signs or words, units, and breaks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 40  # in one number
MAX_BRACES = 6  # LaTeX commands inside each other

CALCULATOR_MARK = re.compile(r"<<([^<>\n]{1,400})>>")
_BULLET = re.compile(r"^\s*[*•+]\s+")  # a dash may also be a sign
_LABEL = re.compile(r"^\s*(?:-\s+)?(?:\**(?:step|part)\s*\d+\s*\**\s*[:.)-]\**|\(?\d{1,2}[.):](?=\s))\s*", re.I)
_LATEX_SPACE = re.compile(r"\\(?:[,;: ]|quad\b|qquad\b|displaystyle\b|[()\[\]])|[&~]|\\?\{,\}(?!\d)")
_LATEX_NOTHING = re.compile(r"\\(?:!|left(?![a-z])|right(?![a-z])|[bB]igg?[lr]?(?![a-z]))")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|boxed|operatorname)\s*\{([^{}]*)\}")
_LATEX_MIXED = re.compile(
    r"(?<![\d.^_])(\d+)\s*\\[dtc]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))(?!\s*\\[dtc]?frac)"
)
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_LATEX_POWER = re.compile(r"\^\s*\{([^{}]*)\}")
_LATEX_SIGNS = (
    ("\\times", "×"),
    ("\\cdot", "×"),
    ("\\div", "÷"),
    ("\\approx", "≈"),
    ("\\neq", "≠"),
    ("\\leq", "≤"),
    ("\\geq", "≥"),
    ("\\$", "$"),
    ("\\%", "%"),
    ("{,}", ","),
    ("^\\circ", " degrees"),
    ("^{\\circ}", " degrees"),
)
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−–‒﹣－", "-"),
        **dict.fromkeys("×✕✖∙⋅·∗＊", "*"),
        **dict.fromkeys("÷∕⁄", "/"),
        **dict.fromkeys("\u00a0\u2009\u202f\u200a\u3000\t\r", " "),
        "＝": "=",
        "＋": "+",
        "—": ";",
        "’": "'",
        "\u200b": None,
    }
)


def normalize(text: str) -> str:
    r"""Writes LaTeX and Unicode signs in plain ones; `\frac` becomes a quotient in parentheses."""
    if "\\" in text or "{" in text:
        for command, sign in _LATEX_SIGNS:
            text = text.replace(command, sign)
        text = _LATEX_NOTHING.sub("", text)
        text = _LATEX_MIXED.sub(r"\1 \2\3/\4\5", text)
        for _ in range(MAX_BRACES):
            text, fractions = _LATEX_FRACTION.subn(r"((\1\2)/(\3\4))", text)
            text, powers = _LATEX_POWER.subn(r"^(\1)", text)
            text, wrappers = _LATEX_TEXT.subn(r" \1 ", text)
            if not fractions + powers + wrappers:
                break
        text = text.replace("\\\\", "\n")
        text = _LATEX_SPACE.sub(" ", text)
    # Braces that are left belong to commands that are not known: the tokenizer lets no expression hold them.
    return text.translate(_SIGNS)


def joins_digits(mark: re.Match) -> bool:
    """Whether digits stand on both sides of a calculator mark, so that taking it out would join them."""
    text = mark.string
    return text[mark.start() - 1 : mark.start()].isdigit() and text[mark.end() : mark.end() + 1].isdigit()


def strip_label(line: str) -> str:
    """Takes a list sign and a label such as "Step 3:" or "2)" off the line."""
    return _LABEL.sub("", _BULLET.sub("", line, count=1), count=1)


@dataclass
class Token:
    """One token of a line.

    `words` are a run of words behind each other, `break` is what ends a clause (punctuation, "because"), `relation` is
    a sign of comparison other than `=`, and `unknown` is what no expression may hold.
    """

    kind: str  # number, op, (, ), words, break, unknown, relation, =
    text: str
    value: Fraction | None = None
    place: Fraction | None = None  # of the last digit, for a decimal or a percentage
    percent: bool = False
    dollars: bool = False
    glued: bool = False  # no space before
    spelled: str = ""  # the word, for an operator written as one


_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)
  | (?P<vulgar>[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])
  | (?P<power>[²³])
  | (?P<money>[$€£¥₹]|\b(?:Rs|USD|EUR|GBP|INR|PHP|Php)\b\.?(?=\s*\d))
  | (?P<word>[^\W\d_](?:[\w']|-(?=[^\W\d_]))*)
  | (?P<relation>=>|<=|>=|!=|->|=<|[≈≠≤≥<>→⇒≡∼≃])
  | (?P<eq>==?)
  | (?P<stars>\*\*)
  | (?P<pow>\^)
  | (?P<op>[-+*/])
  | (?P<open>[(\[])
  | (?P<close>[)\]])
  | (?P<percent>%)
  | (?P<cents>¢)
  | (?P<quote>["“”`])
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
# After a number: a time of day, a version, an ordinal, a float in scientific notation, a name.
_NO_QUANTITY = re.compile(r":\d|\.\d|(?:st|nd|rd|ths?)\b|[eE][-+]?\d|_")
_VULGAR = {
    "½": Fraction(1, 2), "⅓": Fraction(1, 3), "⅔": Fraction(2, 3), "¼": Fraction(1, 4), "¾": Fraction(3, 4),
    "⅕": Fraction(1, 5), "⅖": Fraction(2, 5), "⅗": Fraction(3, 5), "⅘": Fraction(4, 5), "⅙": Fraction(1, 6),
    "⅚": Fraction(5, 6), "⅛": Fraction(1, 8), "⅜": Fraction(3, 8), "⅝": Fraction(5, 8), "⅞": Fraction(7, 8),
}  # fmt: skip
_ELLIPSIS = re.compile(r"\.{2,3}|…")
_MIXED = re.compile(r"[ ](\d{1,3})[ ]?/[ ]?(\d{1,3})(?![\d.,]*\d)")
_OPERAND_AHEAD = re.compile(r"\s*[$€£¥₹]?\s*(?:\.?\d|[(\[½⅓⅔¼¾⅛])")
_SIGNED_OPERAND_AHEAD = re.compile(r"\s+-[$€£¥₹]?\.?[\d(]")
_WORD_AHEAD = re.compile(r"\s?[^\W\d_][\w'-]*")
_WORD_OPERATORS = {"plus": "+", "minus": "-", "times": "*", "x": "*"}
_BY_OPERATORS = {"divided": "/", "multiplied": "*"}
_BY = re.compile(r"\s+by\b")
_OF_WORDS = re.compile(
    r"(?:\s+(?:the|his|her|their|its|these|those|that|this|all|my|our|your|remaining|total|original|first|other)\b)"
    r"{0,3}(?=\s+[$€£¥₹]?(?:\.?\d|\())",
    re.I,
)
_GOES_ON = re.compile(r"\s*[-+*/^=()\d]")
_FUNCTION = re.compile(r"(?:^|\s)(?:[^\W\d_]|sin|cos|tan|log|ln|exp|sqrt|max|min|gcd|lcm)$")
VERBS = frozenset(("is", "are", "was", "were", "has", "have", "had"))
# What follows one of these is a new statement, so they are never part of a unit.
_CONJUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        "because so since if then therefore thus hence but while which means meaning when where is are was were has "
        "have had gets got would will can could should costs cost makes made we he she they it you give gives become "
        "becomes leads yields",
    )
)


def tokenize(line: str) -> list[Token]:
    """Splits a normalised line into tokens, in one pass; decides between operators, units, dashes and names."""
    tokens: list[Token] = []
    position = 0
    glued = False
    dollars = percent_next = False
    while position < len(line):
        match = _TOKEN.match(line, position)
        kind, text = match.lastgroup, match.group()
        position = match.end()
        last = tokens[-1] if tokens else None
        if kind == "space":
            glued = False
            continue
        if kind == "stars":  # a power between operands, otherwise Markdown's bold
            power = last is not None and last.kind in ("number", ")") and _OPERAND_AHEAD.match(line, position)
            kind = "pow" if power else "quote"
        if kind == "quote":
            continue
        if kind == "money":
            dollars = text == "$"
            # "5 $" and the end of $...$ say nothing about the next number.
            dollars = dollars and _OPERAND_AHEAD.match(line, position) is not None
            continue
        if kind in ("number", "vulgar"):
            token, position = _number(line, match, tokens, glued)
            token.dollars, token.percent = dollars, percent_next
            if percent_next and token.kind == "number":
                token.place = token.place or Fraction(1)
            tokens.append(token)
        elif kind == "percent":
            if last and last.kind == "number" and not last.percent:
                _make_percent(last)
            elif last and last.kind == ")" and glued:
                tokens.append(Token("unknown", text))
            else:
                percent_next = True
                glued = True
                continue
        elif kind == "cents":
            tokens.append(Token("words", "cents"))
        elif kind == "word":
            position = _word(line, match, tokens, glued)
        elif kind == "power":
            tokens += [Token("op", "^"), Token("number", text, Fraction("²³".index(text) + 2))]
        elif kind == "pow":
            tokens.append(Token("op", "^"))
        elif kind == "op":
            position = _operator(line, match, tokens, glued)
        elif kind == "open":
            call = last and last.kind == "words" and (glued or _FUNCTION.search(last.text))
            tokens.append(Token("unknown" if call else "(", text, glued=glued))
        elif kind == "close":
            tokens.append(Token(")", text, glued=glued))
        elif kind == "eq":
            tokens.append(Token("=", text))
        elif kind == "relation":
            tokens.append(Token("relation", text))
        elif (text == "!" and glued and _GOES_ON.match(line, position)) or (
            text == ":" and not glued and last and last.kind == "number" and line[position : position + 1] == " "
        ):  # a factorial, a ratio
            tokens.append(Token("unknown", text))
        elif text == "|" and not glued and not line[position : position + 1].strip():  # a table's rule
            tokens.append(Token("break", text))
        elif text in ".,;:?!":
            tokens.append(Token("break", text, glued=glued))
        elif text == "#":
            tokens.append(Token("break", text))
        else:
            tokens.append(Token("unknown", text))
        dollars = percent_next = False
        glued = True
    return tokens


def _make_percent(token: Token) -> None:
    token.percent = True
    token.place = token.place or Fraction(1)
    token.text += "%"


def _number(line: str, match: re.Match, tokens: list[Token], glued: bool) -> tuple[Token, int]:
    """Reads one number; a time of day, a version, an ordinal, or one of too many digits is unknown."""
    text, position = match.group(), match.end()
    last = tokens[-1] if tokens else None
    if match.lastgroup == "vulgar":
        if glued and last and last.kind == "number" and last.place is None and last.value.denominator == 1:
            last.text += text
            last.value += _VULGAR[text]
            return Token("words", ""), position
        return Token("number", text, _VULGAR[text]), position
    if len(text) > MAX_DIGITS or _NO_QUANTITY.match(line, position) or (text[0] == "0" and text[1:2].isdigit()):
        return Token("unknown", text, glued=glued), position
    tight = glued and len(tokens) > 1 and last.text in (":", ",") and last.glued
    if tight and tokens[-2].kind in ("number", "unknown"):
        return Token("unknown", text, glued=glued), position
    whole, _, decimals = text.replace(",", "").partition(".")
    value = Fraction(int(whole + decimals), 10 ** len(decimals))
    place = Fraction(1, 10 ** len(decimals)) if decimals else None
    dots = _ELLIPSIS.match(line, position) if place is not None else None
    if dots:
        text, position = text + "...", dots.end()
    mixed = _MIXED.match(line, position) if place is None else None
    if mixed and 0 < int(mixed.group(1)) < int(mixed.group(2)):
        value += Fraction(int(mixed.group(1)), int(mixed.group(2)))
        text, position = text + mixed.group(), mixed.end()
    return Token("number", text, value, place, glued=glued), position


def _word(line: str, match: re.Match, tokens: list[Token], glued: bool) -> int:
    """Adds a word: an operator if an operand stands on both sides, otherwise part of a run of words."""
    text, position = match.group(), match.end()
    if text[-1].isdigit():
        letters = text.rstrip("0123456789")
        if letters.lower() in _CONJUNCTIONS:  # "because20-3"
            text, position = letters, match.start() + len(letters)
    last = tokens[-1] if tokens else None
    after_operand = last is not None and last.kind in ("number", ")", "words")
    # "3x4" and "3 boxes x4": the digits would otherwise be read as part of a name.
    if text[0] in "xX" and text[1:2].isdigit() and after_operand and not (glued and last.kind == "words"):
        text, position = text[0], match.start() + 1
    lower = text.lower()
    if after_operand and lower in _WORD_OPERATORS:
        signed = not glued and _SIGNED_OPERAND_AHEAD.match(line, position)
        if signed or _OPERAND_AHEAD.match(line, position):
            tokens.append(Token("op", _WORD_OPERATORS[lower], spelled=text if len(text) > 1 else ""))
            return position
    by = _BY.match(line, position) if after_operand and lower in _BY_OPERATORS else None
    if by and _OPERAND_AHEAD.match(line, by.end()):
        tokens.append(Token("op", _BY_OPERATORS[lower], spelled=text))
        return by.end()
    if lower == "percent" and last is not None and last.kind == "number" and not last.percent:
        _make_percent(last)
        return position
    if lower == "of" and last is not None and _is_share(tokens):
        words = _OF_WORDS.match(line, position)
        if words:
            tokens.append(Token("op", "*", spelled="of"))
            return words.end()
    if lower == "equals":
        tokens.append(Token("=", text))
        return position
    if lower in _CONJUNCTIONS:
        tokens.append(Token("break", text))
        return position
    if last is not None and last.kind == "words":
        last.text += ("" if glued else " ") + text
    elif last is not None and last.kind == "number" and glued and any(char.isdigit() for char in text):
        tokens.append(Token("unknown", text))  # "5C2"
    else:
        tokens.append(Token("words", text, glued=glued))
    return position


def _is_share(tokens: list[Token]) -> bool:
    """Whether the tokens end in a percentage or a fraction, after which "of" multiplies."""
    last = tokens[-1]
    if last.kind == "number":
        if last.percent or last.value.denominator != 1:
            return True
        return len(tokens) >= 3 and tokens[-2].text == "/" and tokens[-3].kind == "number"
    return last.kind == ")"


def _operator(line: str, match: re.Match, tokens: list[Token], glued: bool) -> int:
    """Adds an operator, unless the sign belongs to a unit ("$50/share", "5-mile") or is a dash."""
    text, position = match.group(), match.end()
    last = tokens[-1] if tokens else None
    word = _WORD_AHEAD.match(line, position) if text in "/-" else None
    if text == "/" and last is not None and last.kind in ("number", "words", ")") and word:
        if last.kind == "words":
            last.text += "/" + word.group().strip()
        else:
            tokens.append(Token("words", "/" + word.group().strip(), glued=glued))
        return word.end()
    if text == "-" and word:
        name = word.group()
        if glued and last is not None and last.kind in ("number", "words") and not name[0].isspace():
            if last.kind == "words":
                last.text += "-" + name
            else:
                tokens.append(Token("words", name, glued=glued))
            return word.end()
        if name[0].isspace() and len(name) > 2 and last is not None and last.kind in ("number", "words", ")"):
            tokens.append(Token("break", "-dash"))
            return position
    tokens.append(Token("op", text, glued=glued))
    return position


def text_of(tokens: list[Token]) -> str:
    """Writes tokens down again, for a message."""
    return " ".join(token.text for token in tokens if token.text)
