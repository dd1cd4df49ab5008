"""A process reward that needs no model: is every equality that a step writes down true?

The equalities are read by a small parser into exact fractions. There is no `eval`, every regular expression takes
linear time, and numbers, exponents, nesting and expression length are capped, so that no step can make it hang.

What counts as an equality: two arithmetic expressions over written numbers with `=` (or "equals") between them, inside
GSM8K's calculator marks (`<<48/2=24>>`), in prose with units and words among the numbers ("12 apples - 7 apples = 5
apples"), or in LaTeX; `a = b = c` is two equalities. It holds in exact arithmetic, or else if

- one side is a single decimal and the other side, rounded (or cut off) at that decimal's last place, gives it;
- a number of 16 or more digits shows a calculator at work and the sides agree in double precision;
- percent signs are read as labels instead of hundredths ("19/20 * 100 = 95%");
- the units that are named differ by a known factor and the numbers agree after conversion ("90 minutes = 1.5 hours").

What is not understood is not judged: anything with a variable, a time of day, a function, an unfinished operand, or a
word before the expression that changes its meaning ("twice 5 + 3 = 13") gives no verdict unless the numbers agree as
they stand. A verdict of "false" is meant to be trustworthy, since it is paid for by the policy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

__all__ = ["Equality", "StepArithmeticReward", "check_step", "find_equalities", "step_arithmetic_reward"]

MAX_DIGITS = 40  # in one number
MAX_EXPONENT = 64
MAX_BITS = 4096  # of a numerator or denominator
MAX_DEPTH = 32  # of parentheses
MAX_BRACES = 6  # of LaTeX commands inside each other
MAX_TOKENS = 160  # of one side of an equality
MAX_STARTS = 32  # places at which a left side is tried


@dataclass(frozen=True)
class Equality:
    """One equality of a step.

    Attributes:
        left: text of the left side, as it was understood.
        right: text of the right side.
        holds: True, False, or None where it could not be judged.
        reason: why it holds, fails or was not judged.
    """

    left: str
    right: str
    holds: bool | None
    reason: str


def check_step(text: str) -> bool | None:
    """Returns False if any equality in the step is false, True if at least one is true and none false, else None."""
    verdicts = {equality.holds for equality in find_equalities(text)}
    return False if False in verdicts else True if True in verdicts else None


def find_equalities(text: str) -> list[Equality]:
    """Returns every equality in the step, calculator marks first, then the text in order."""
    found = []
    for mark in _MARK.finditer(text):
        found += _equalities_of(_tokenize(_normalize(mark.group(1))))
    plain = _normalize(_MARK.sub(lambda mark: " " if _joins_digits(mark) else "", text))
    for line in plain.split("\n"):
        if "=" in line or "equals" in line.lower():
            found += _equalities_of(_tokenize(_strip_label(line)))
    return found


class StepArithmeticReward:
    """Process reward: one score per step by whether every equality in the step is true.

    A callable for `process_reward_funcs`; [`step_arithmetic_reward`] is this class with its defaults. Instances can be
    pickled.

    Args:
        true_value: score of a step with at least one true equality and no false one.
        false_value: score of a step with a false equality.
        unchecked_value: score of a step without an equality that could be judged; None leaves the step unscored.
    """

    def __init__(
        self, true_value: float = 1.0, false_value: float = 0.0, unchecked_value: float | None = None
    ) -> None:
        for name, value in (("true_value", true_value), ("false_value", false_value)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}.")
        if isinstance(unchecked_value, bool) or not isinstance(unchecked_value, int | float | None):
            raise TypeError(f"unchecked_value must be a number or None, got {unchecked_value!r}.")
        self.true_value = true_value
        self.false_value = false_value
        self.unchecked_value = unchecked_value
        self.__name__ = "step_arithmetic_reward"

    def __call__(
        self,
        prompts: Any = None,
        completions: Any = None,
        completion_ids: Any = None,
        steps: Sequence[Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> list[list[float | None]]:
        """Scores each step of each completion.

        Args:
            prompts, completions, completion_ids, kwargs: not used; taken so that a trainer can pass what it has.
            steps: for each completion, the texts of its steps.

        Returns:
            For each completion, one float or None per step.

        Raises:
            ValueError: no `steps`.
            TypeError: `steps` is not one list of strings per completion.
        """
        if steps is None:
            raise ValueError(
                "step_arithmetic_reward scores steps and got none: pass it in `process_reward_funcs`, not in "
                "`reward_funcs`, or call it with steps=[[text, ...], ...]."
            )
        return [self._score(index, row) for index, row in enumerate(steps)]

    def _score(self, index: int, row: Sequence[str]) -> list[float | None]:
        if isinstance(row, str) or not all(isinstance(step, str) for step in row):
            raise TypeError(f"steps[{index}] must be a list of strings, got {row!r}.")
        values = {True: self.true_value, False: self.false_value, None: self.unchecked_value}
        return [values[check_step(step)] for step in row]

    def __repr__(self) -> str:
        return (
            f"StepArithmeticReward(true_value={self.true_value}, false_value={self.false_value}, "
            f"unchecked_value={self.unchecked_value})"
        )


_DEFAULT = StepArithmeticReward()


def step_arithmetic_reward(
    prompts: Any = None,
    completions: Any = None,
    completion_ids: Any = None,
    steps: Sequence[Sequence[str]] | None = None,
    **kwargs: Any,
) -> list[list[float | None]]:
    """Returns 1.0 for a step whose equalities are all true, 0.0 if any is false, None if there is none to check.

    See [`StepArithmeticReward`] for the arguments, the errors and other values.
    """
    return _DEFAULT(prompts, completions, completion_ids, steps, **kwargs)


# --- Text to tokens ---

_MARK = re.compile(r"<<([^<>\n]{1,400})>>")
_BULLET = re.compile(r"^\s*[*•+]\s+")  # a dash may also be a sign
_LABEL = re.compile(r"^\s*(?:-\s+)?(?:\**(?:step|part)\s*\d+\s*\**\s*[:.)-]\**|\(?\d{1,2}[.):](?=\s))\s*", re.I)
_LATEX_SPACE = re.compile(r"\\(?:[,;:! ]|quad\b|qquad\b|left\b|right\b|displaystyle\b|[()\[\]])|[&~]|\\?\{,\}(?!\d)")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|boxed|operatorname)\s*\{([^{}]*)\}")
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
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


def _normalize(text: str) -> str:
    if "\\" in text or "{" in text:
        for command, sign in _LATEX_SIGNS:
            text = text.replace(command, sign)
        for _ in range(MAX_BRACES):
            text, fractions = _LATEX_FRACTION.subn(r"((\1)/(\2))", text)
            text, wrappers = _LATEX_TEXT.subn(r" \1 ", text)
            if not fractions + wrappers:
                break
        text = text.replace("\\\\", "\n")
        text = _LATEX_SPACE.sub(" ", text)
    return text.translate(_SIGNS).replace("{", "(").replace("}", ")")


def _joins_digits(mark: re.Match) -> bool:
    text = mark.string
    return text[mark.start() - 1 : mark.start()].isdigit() and text[mark.end() : mark.end() + 1].isdigit()


def _strip_label(line: str) -> str:
    return _LABEL.sub("", _BULLET.sub("", line, count=1), count=1)


@dataclass
class _Token:
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
  | (?P<word>[^\W\d_](?:[\w']|-(?=[^\W\d_]))*)
  | (?P<relation>=>|<=|>=|!=|->|=<|[≈≠≤≥<>→⇒≡∼≃])
  | (?P<eq>==?)
  | (?P<bold>(?<!\d)\*\*|\*\*(?!\s*[\d(]))
  | (?P<pow>\*\*|\^)
  | (?P<op>[-+*/])
  | (?P<open>[(\[])
  | (?P<close>[)\]])
  | (?P<money>[$€£¥₹])
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
_WORD_OPERATORS = {"plus": "+", "minus": "-", "times": "*", "x": "*"}
_BY_OPERATORS = {"divided": "/", "multiplied": "*"}
_BY = re.compile(r"\s+by\b")
_OF_WORDS = re.compile(
    r"(?:\s+(?:the|his|her|their|its|these|those|that|this|all|my|our|your|remaining|total|original|first|other)\b)"
    r"{0,3}(?=\s+[$€£¥₹]?(?:\.?\d|\())",
    re.I,
)
_VERBS = frozenset(("is", "are", "was", "were", "has", "have", "had"))
# What follows one of these is a new statement, so they are never part of a unit.
_CONJUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        "because so since if then therefore thus hence but while which means meaning when where is are was were has "
        "have had gets got would will can could should costs cost makes made we he she they it you",
    )
)


def _tokenize(line: str) -> list[_Token]:
    tokens: list[_Token] = []
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
        if kind in ("quote", "bold"):
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
                tokens.append(_Token("unknown", text))
            else:
                percent_next = True
                glued = True
                continue
        elif kind == "cents":
            tokens.append(_Token("words", "cents"))
        elif kind == "word":
            position = _word(line, match, tokens, glued)
        elif kind == "power":
            tokens += [_Token("op", "^"), _Token("number", text, Fraction("²³".index(text) + 2))]
        elif kind == "pow":
            tokens.append(_Token("op", "^"))
        elif kind == "op":
            position = _operator(line, match, tokens, glued)
        elif kind == "open":
            call = last and last.kind == "words" and glued
            tokens.append(_Token("unknown" if call else "(", text, glued=glued))
        elif kind == "close":
            tokens.append(_Token(")", text, glued=glued))
        elif kind == "eq":
            tokens.append(_Token("=", text))
        elif kind == "relation":
            tokens.append(_Token("relation", text))
        elif text == ":" and not glued and last and last.kind == "number" and line[position : position + 1] == " ":
            tokens.append(_Token("unknown", text))
        elif text in ".,;:?!|":
            tokens.append(_Token("break", text, glued=glued))
        elif text == "_" and position < len(line) and line[position].isalnum():
            tokens.append(_Token("unknown", text))
        elif text in "_#":
            tokens.append(_Token("break", text))
        else:
            tokens.append(_Token("unknown", text))
        dollars = percent_next = False
        glued = True
    return tokens


def _make_percent(token: _Token) -> None:
    token.percent = True
    token.place = token.place or Fraction(1)
    token.text += "%"


def _number(line: str, match: re.Match, tokens: list[_Token], glued: bool) -> tuple[_Token, int]:
    """Reads one number; a time of day, a version, an ordinal, or one of too many digits is unknown."""
    text, position = match.group(), match.end()
    last = tokens[-1] if tokens else None
    if match.lastgroup == "vulgar":
        if glued and last and last.kind == "number" and last.place is None and last.value.denominator == 1:
            last.text += text
            last.value += _VULGAR[text]
            return _Token("words", ""), position
        return _Token("number", text, _VULGAR[text]), position
    if len(text) > MAX_DIGITS or _NO_QUANTITY.match(line, position) or re.match(r"0\d", text):
        return _Token("unknown", text, glued=glued), position
    tight = glued and len(tokens) > 1 and last.text in (":", ",") and last.glued
    if tight and tokens[-2].kind in ("number", "unknown"):
        return _Token("unknown", text, glued=glued), position
    value = Fraction(text.replace(",", ""))
    place = Fraction(1, 10 ** len(text.partition(".")[2])) if "." in text else None
    dots = _ELLIPSIS.match(line, position) if place is not None else None
    if dots:
        text, position = text + "...", dots.end()
    mixed = _MIXED.match(line, position) if place is None else None
    if mixed and 0 < int(mixed.group(1)) < int(mixed.group(2)):
        value += Fraction(int(mixed.group(1)), int(mixed.group(2)))
        text, position = text + mixed.group(), mixed.end()
    return _Token("number", text, value, place, glued=glued), position


def _word(line: str, match: re.Match, tokens: list[_Token], glued: bool) -> int:
    """Adds a word: an operator if an operand stands on both sides, otherwise part of a run of words."""
    text, position = match.group(), match.end()
    letters = text.rstrip("0123456789")
    if letters != text and letters.lower() in _CONJUNCTIONS:  # "because20-3"
        text, position = letters, match.start() + len(letters)
    last = tokens[-1] if tokens else None
    after_operand = last is not None and last.kind in ("number", ")", "words")
    # "3x4" and "3 boxes x4": the digits would otherwise be read as part of a name.
    if re.match(r"[xX]\d", text) and after_operand and not (glued and last.kind == "words"):
        text, position = text[0], match.start() + 1
    operand = _OPERAND_AHEAD.match(line, position) or (not glued and _SIGNED_OPERAND_AHEAD.match(line, position))
    if after_operand and operand and text.lower() in _WORD_OPERATORS:
        tokens.append(_Token("op", _WORD_OPERATORS[text.lower()], spelled=text if len(text) > 1 else ""))
        return position
    by = _BY.match(line, position) if text.lower() in _BY_OPERATORS else None
    if by and after_operand and _OPERAND_AHEAD.match(line, by.end()):
        tokens.append(_Token("op", _BY_OPERATORS[text.lower()], spelled=text))
        return by.end()
    if text.lower() == "percent" and last is not None and last.kind == "number" and not last.percent:
        _make_percent(last)
        return position
    if text.lower() == "of" and last is not None and _is_share(tokens):
        words = _OF_WORDS.match(line, position)
        if words:
            tokens.append(_Token("op", "*", spelled="of"))
            return words.end()
    if text.lower() == "equals":
        tokens.append(_Token("=", text))
        return position
    if text.lower() in _CONJUNCTIONS:
        tokens.append(_Token("break", text))
        return position
    if last is not None and last.kind == "words":
        last.text += ("" if glued else " ") + text
    else:
        tokens.append(_Token("words", text, glued=glued))
    return position


def _is_share(tokens: list[_Token]) -> bool:
    """Whether the tokens end in a percentage or a fraction, after which "of" multiplies."""
    last = tokens[-1]
    if last.kind == "number":
        if last.percent or last.value.denominator != 1:
            return True
        return len(tokens) >= 3 and tokens[-2].text == "/" and tokens[-3].kind == "number"
    return last.kind == ")"


def _operator(line: str, match: re.Match, tokens: list[_Token], glued: bool) -> int:
    """Adds an operator, unless the sign belongs to a unit ("$50/share", "5-mile") or is a dash."""
    text, position = match.group(), match.end()
    last = tokens[-1] if tokens else None
    word = re.compile(r"\s?[^\W\d_][\w'-]*").match(line, position)
    if text == "/" and last is not None and last.kind in ("number", "words", ")") and word:
        if last.kind == "words":
            last.text += "/" + word.group().strip()
        else:
            tokens.append(_Token("words", "/" + word.group().strip(), glued=glued))
        return word.end()
    if text == "-" and word:
        name = word.group()
        if glued and last is not None and last.kind in ("number", "words") and not name[0].isspace():
            if last.kind == "words":
                last.text += "-" + name
            else:
                tokens.append(_Token("words", name, glued=glued))
            return word.end()
        if name[0].isspace() and len(name) > 2 and last is not None and last.kind in ("number", "words", ")"):
            tokens.append(_Token("break", "-dash"))
            return position
    tokens.append(_Token("op", text, glued=glued))
    return position


# --- Tokens to expressions ---


class _Unreadable(Exception):
    pass


@dataclass
class _Node:
    """An expression: a number, a negation, or a binary operator; each may be followed by a unit."""

    op: str  # number, neg, or the sign of a binary operator
    token: _Token | None = None
    operands: tuple[_Node, ...] = ()
    unit: str = ""
    unit_glued: bool = False

    def walk(self) -> list[_Node]:
        """The node and all below it, from left to right."""
        nodes, stack = [], [self]
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack.extend(reversed(node.operands))
        return nodes

    def numbers(self) -> list[_Node]:
        return [node for node in self.walk() if node.op == "number"]

    def literal(self) -> _Node | None:
        """The number that this expression is, if it is only one, with or without a sign."""
        node = self
        while node.op == "neg":
            node = node.operands[0]
        return node if node.op == "number" else None


class _Parser:
    """Recursive descent. Stops at the first token that cannot go on with the expression.

    `fractions` says where the operand after a division is a fraction of two written numbers, so that `25 / 1/3` is 75:
    `""` nowhere, `"tight"` where no space is in it, `"any"`.
    """

    def __init__(self, tokens: list[_Token], fractions: str = ""):
        self.tokens, self.position, self.depth = tokens, 0, 0
        self.fractions = fractions

    def peek(self, offset: int = 0) -> _Token | None:
        index = self.position + offset
        return self.tokens[index] if index < len(self.tokens) else None

    def at(self, signs: str, offset: int = 0) -> bool:
        token = self.peek(offset)
        return token is not None and token.kind == "op" and token.text in signs

    def sum(self) -> _Node:
        node = self.product()
        while self.at("+-"):
            sign, before = self.peek().text, (self.position, self.depth)
            self.position += 1
            try:
                node = _Node(sign, operands=(node, self.product()))
            except _Unreadable:
                self.position, self.depth = before
                break
        return node

    def product(self) -> _Node:
        node = self.power()
        while True:
            before = (self.position, self.depth)
            if self.at("*/"):
                sign = self.peek().text
                self.position += 1
            elif self._juxtaposed():
                sign = "*"
            else:
                break
            try:
                operand = self._fraction() if sign == "/" and self.fractions else None
                node = _Node(sign, operands=(node, operand or self.power()))
            except _Unreadable:
                self.position, self.depth = before
                break
        return node

    def _fraction(self) -> _Node | None:
        above, below = self.peek(), self.peek(2)
        if above and below and above.kind == below.kind == "number" and self.at("/", 1):
            if self.fractions == "tight" and not (self.peek(1).glued and below.glued):
                return None
            self.position += 2
            return _Node("/", operands=(_Node("number", above), self.primary()))
        return None

    def _juxtaposed(self) -> bool:
        """`5(3 + 2)`, `(2)(3)`, `(1/2) 18` and `1/2 (18)` multiply; a parenthesis after a unit is a remark."""
        token, previous = self.peek(), self.tokens[self.position - 1]
        if token is None or previous.kind not in ("number", ")"):
            return False
        return token.kind == "(" or (token.kind == "number" and previous.kind == ")")

    def power(self) -> _Node:
        node = self.unary()
        if self.at("^") and self.tokens[self.position - 1].kind in ("number", ")"):
            self.position += 1
            node = _Node("^", operands=(node, self.unary()))
        return node

    def unary(self) -> _Node:
        if not self.at("-"):
            return self.primary()
        self._deeper()
        self.position += 1
        node = _Node("neg", operands=(self.power(),))
        self.depth -= 1
        return node

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Unreadable

    def primary(self) -> _Node:
        token = self.peek()
        if token is None or token.kind not in ("number", "("):
            raise _Unreadable
        self.position += 1
        if token.kind == "number":
            node = _Node("number", token)
        else:
            self._deeper()
            node = self.sum()
            closing = self.peek()
            if closing is None or closing.kind != ")":
                raise _Unreadable
            self.position += 1
            self.depth -= 1
        unit = self.peek()
        if unit and unit.kind == "words":
            self.position += 1
            node.unit, node.unit_glued = unit.text, unit.glued
            power = self.peek(1)
            if self.at("^") and power and power.text in ("2", "3", "²", "³"):  # "15 cm^2"
                self.position += 2
        return node


@dataclass
class _Side:
    """One side of an equality.

    Attributes:
        node: the longest expression there.
        others: other readings of the same words, which may make the equality true but never false.
        cuts: readings of less than the whole, which may only put it in doubt.
        doubt: why the result is not to be trusted where the sides differ.
    """

    node: _Node
    text: str
    others: list[_Node]
    cuts: list[_Node] = field(default_factory=list)
    doubt: str = ""
    preceded: bool = False  # words stand before it in the same clause
    remainder: bool = False  # the text after it speaks of a remainder


def _whole(tokens: list[_Token], fractions: str = "") -> _Node | None:
    """Parses all tokens as one expression."""
    parser = _Parser(tokens, fractions=fractions)
    try:
        node = parser.sum()
    except _Unreadable:
        return None
    return node if parser.position == len(tokens) else None


def _with_fractions(tokens: list[_Token]) -> list[_Node | None]:
    """The readings of `a / b / c` in which b / c is a fraction."""
    if sum(token.kind == "op" and token.text == "/" for token in tokens) < 2:
        return []
    return [_whole(tokens, fractions="tight"), _whole(tokens, fractions="any")]


def _left_side(tokens: list[_Token], first: bool) -> _Side | str:
    """Reads the longest expression that ends where the tokens end; returns why there is none.

    `first` is False where the tokens begin with the right side of another equality.
    """
    tokens = tokens[-MAX_TOKENS:]
    begin = max((i + 1 for i, token in enumerate(tokens) if token.kind in ("break", "unknown")), default=0)
    tried = 0
    for start in range(begin, len(tokens)):
        token, before = tokens[start], tokens[start - 1] if start else None
        negative = token.kind == "op" and token.text == "-" and (start == begin or before.kind == "(")
        if token.kind not in ("number", "(") and not negative:
            continue
        tried += 1
        if tried > MAX_STARTS:
            break
        node = _whole(tokens[start:])
        if node is None:
            continue
        problem = _context_problem(tokens, start)
        if problem:
            return problem
        others = _with_fractions(tokens[start:])
        # "10% of the $400 + $1580 = $1980" states the sum.
        sums = [_whole(tokens[k + 1 :]) for k in range(start, len(tokens)) if tokens[k].spelled == "of"]
        others += [other for other in sums if other and other.op != "number"]
        if negative and not tokens[start + 1].glued:
            others.append(_whole(tokens[start + 1 :]))  # a dash may begin a list item
        side = _Side(node, _text_of(tokens[start:]), [other for other in others if other])
        side.doubt = _doubt_in(tokens[start:])
        if before is not None and before.kind == "words":
            side.preceded = True
            counted = start > 1 and tokens[start - 2].kind in ("number", ")") and _COUNTED.search(before.text)
            counted = counted and (first or not before.text.endswith("and"))  # "3 + 4 = 7 and 7 * 2 = 14"
            if counted or _CHANGES_MEANING.search(before.text):
                side.doubt = "the words before it may change its meaning"
        if before is not None and before.text == "," and start > 1 and tokens[start - 2].kind == "number":
            side.doubt = "it may be part of a list or of a longer number"
        return side
    return "no expression before the equals sign"


def _context_problem(tokens: list[_Token], start: int) -> str:
    """An expression that follows an operator without a written left operand is only part of one."""
    index = start - 1
    if index >= 0 and tokens[index].kind == "number":
        return "two numbers stand side by side"
    if index >= 0 and tokens[index].kind == "break" and tokens[index].text == ".":
        index -= 1
        return "an operand is not a number" if index >= 0 and tokens[index].kind == "op" else ""
    # "3 + Cindy has 5 = 8": a verb is no end of the statement.
    while index >= 0 and (tokens[index].kind in ("words", "(") or tokens[index].text in _VERBS):
        index -= 1
    if index < 0:
        return ""
    if tokens[index].kind == "op":
        return "an operand is not a number"
    if tokens[index].kind == "unknown":
        return "something before the expression was not understood"
    return ""


def _right_side(tokens: list[_Token], last: bool) -> _Side | str:
    """Reads the longest expression that begins where the tokens begin; returns why there is none.

    `last` is False where the tokens end with the left side of another equality.
    """
    tokens = tokens[:MAX_TOKENS]
    parser = _Parser(tokens)
    try:
        node = parser.sum()
    except _Unreadable:
        return "no expression after the equals sign"
    end = parser.position
    following, after = parser.peek(), parser.peek(1)
    others = _with_fractions(tokens[:end])
    # "3/3 - 2/3 = 1/3 of $150" states the fraction.
    others += [_whole(tokens[:k]) for k in range(end) if tokens[k].spelled == "of"]
    side = _Side(node, _text_of(tokens[:end]), [other for other in others if other])
    # "100/5 = 20 times 2 people came" counts times, and "8*45 = 360 divided by 5 is 72" goes on.
    cuts = [_whole(tokens[:k]) for k in range(end) if tokens[k].spelled not in ("", "of")]
    side.cuts = [cut for cut in cuts if cut]
    side.doubt = _doubt_in(tokens[:end])
    side.remainder = any("remain" in token.text or "left" in token.text for token in tokens if token.kind == "words")
    if following is None:
        return side
    if following.kind in ("op", "unknown"):
        return "an operand is not a number"
    if following.kind in ("number", "(") and (last or not tokens[end - 1].text.endswith("and")):
        side.doubt = "another number follows"
    if following.text == "-dash":
        side.doubt = "a dash may be a minus sign"
    if following.text == "," and after is not None and after.kind in ("number", "unknown") and after.glued:
        side.doubt = "it may be part of a list or of a longer number"
    return side


def _text_of(tokens: list[_Token]) -> str:
    return " ".join(token.text for token in tokens if token.text)


_CHANGES_MEANING = re.compile(
    r"(?:\b(?:twice|thrice|doubled?|triple|quadruple|half|halve|quarter|squared?|cubed?|root|than|by|least|most|"
    r"every|each|another|per|dozen|negative|minus|plus|times|as|over|from|into|to|or|between|about|around|nearly|"
    r"almost|approximately|roughly|no|numbers?|(?:day|week|month|year|hour|minute|question|problem|step|option|case|"
    r"box|group|stage|round|level|room|grade|chapter|page|equation|eq|line|part|example|figure|table)s?)"
    r"|\b(?:half|thirds?|quarters?|fourths?|fifths?|sixths?|eighths?|tenths?|average|mean|median|product|difference|"
    r"ratio|root|square|cube|fraction|percent|percentage|rest|remainder|multiple|sum|double|part)\s+of)"
    r"(?:\s+(?:the|a|an|his|her|their|its|all))?$",
    re.I,
)
_COUNTED = re.compile(r"\b(?:and|of|in|at|for|with|on|a|to|the)$", re.I)  # "8 packs of 5 bags * $4"
_LESS = re.compile(
    r"\b(?:less|fewer|lower|below|behind|short|shorter|loss|lost|decrease|drop|debt|younger|under)\b", re.I
)
_NUMBER_WORD = re.compile(
    r"\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|forty|fifty|hundred|half|"
    r"twice|double|quarter|third|fourth|times)\b",
    re.I,
)


def _doubt_in(tokens: list[_Token]) -> str:
    """What in an expression may mean something else than it reads."""
    for i, token in enumerate(tokens):
        previous = tokens[i - 1] if i else None
        if token.kind == "words":
            if _NUMBER_WORD.search(token.text):
                return "a number in words stands among its units"
            if token.text.startswith("of ") or token.text == "of":
                return "a share of something is set equal"
        if previous is None:
            continue
        if token.kind == "op" and token.text == "/" and token.glued and previous.kind == "words":
            return "a number may belong to a unit"
        if token.kind in ("(", "number") and previous.kind in (")", "number") and not token.glued:
            return "a parenthesis may be a remark"
    return ""


# --- Expressions to verdicts ---


def _equalities_of(tokens: list[_Token]) -> list[Equality]:
    """Judges each `=` of a line between the expression that ends before it and the one that begins after it."""
    segments: list[list[_Token]] = [[]]
    relations: list[str] = []
    for token in tokens:
        if token.kind in ("=", "relation"):
            segments.append([])
            relations.append(token.kind)
        else:
            segments[-1].append(token)
    found = []
    for index, relation in enumerate(relations):
        if relation != "=":
            continue
        left = _left_side(segments[index], first=index == 0)
        right = _right_side(segments[index + 1], last=index + 2 == len(segments))
        if isinstance(left, str) or isinstance(right, str):
            problem = left if isinstance(left, str) else right
            found.append(Equality(_text_of(segments[index][-12:]), _text_of(segments[index + 1][:12]), None, problem))
            continue
        holds, reason = _judge(left, right)
        found.append(Equality(left.text, right.text, holds, reason))
    return found


def _judge(left: _Side, right: _Side) -> tuple[bool | None, str]:
    nodes = left.node.walk() + right.node.walk()
    if any(_is_variable(node) for node in nodes if node.unit):
        return None, "a letter stands for a number"
    numbers = [node for node in nodes if node.op == "number"]
    try:
        if any(_agree(a, b) for a in (left.node, *left.others) for b in (right.node, *right.others)):
            return True, "equal"
        if right.remainder and _is_quotient(left.node, right.node):
            return True, "equal but for the remainder"
        if any(_agree(left.node, right.node, scale) for scale in _unit_scales(numbers)):
            return True, "equal after converting units"
        if any(_agree(left.node, node) for node in right.cuts):
            return None, "a word may be no operator"
    except ZeroDivisionError:
        return False, "division by zero"
    except _Unreadable:
        return None, "too large to evaluate"
    doubt = left.doubt or right.doubt or _doubt_about(left, right)
    return (None, doubt) if doubt else (False, "not equal")


_ONE = Fraction(1)
_NO_SCALE: dict[str, Fraction] = {}


def _agree(left: _Node, right: _Node, scale: dict[str, Fraction] = _NO_SCALE) -> bool:
    tokens = [number.token for number in left.numbers() + right.numbers()]
    slack = _float_error(tokens)
    readings = [Fraction(1, 100), _ONE] if any(token.percent for token in tokens) else [_ONE]
    for left_percent in readings:
        for right_percent in readings:
            a, b = _evaluate(left, left_percent, scale), _evaluate(right, right_percent, scale)
            if a == b or abs(a - b) < slack:
                return True
            if _rounds_to(a, b, _place(right, right_percent, scale)):
                return True
            if _rounds_to(b, a, _place(left, left_percent, scale)):
                return True
    return False


def _float_error(tokens: list[_Token]) -> Fraction:
    """What a calculator in double precision may be off by; 0 unless a number shows that one was at work."""
    if not any(token.place and len(token.text.replace(".", "").lstrip("0")) >= 16 for token in tokens):
        return Fraction(0)
    return max(abs(token.value) for token in tokens) / 10**14


def _rounds_to(exact: Fraction, written: Fraction, place: Fraction | None) -> bool:
    """Whether `written`, of which the last digit counts `place`, is `exact` rounded or cut off there."""
    if place is None:
        return False
    error = abs(exact - written)
    return error <= place / 2 or (error < place and abs(written) < abs(exact))


def _place(node: _Node, percent: Fraction, scale: dict[str, Fraction]) -> Fraction | None:
    number = node.literal()
    if number is None or number.token.place is None:
        return None
    return number.token.place * (percent if number.token.percent else 1) * _factor(number, scale)


def _is_quotient(left: _Node, right: _Node) -> bool:
    whole = right.literal()
    if left.op != "/" or whole is None or whole.token.place is not None:
        return False
    exact = _evaluate(left, _ONE, _NO_SCALE)
    return exact >= 0 and exact // 1 == _evaluate(right, _ONE, _NO_SCALE)


def _evaluate(node: _Node, percent: Fraction, scale: dict[str, Fraction]) -> Fraction:
    if node.op == "number":
        return node.token.value * (percent if node.token.percent else 1) * _factor(node, scale)
    values = [_evaluate(operand, percent, scale) for operand in node.operands]
    if node.op == "neg":
        return -values[0]
    a, b = values
    if node.op == "+":
        result = a + b
    elif node.op == "-":
        result = a - b
    elif node.op == "*":
        result = a * b
    elif node.op == "/":
        result = a / b
    else:
        if b.denominator != 1 or abs(b) > MAX_EXPONENT:
            raise _Unreadable
        result = a ** int(b)
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
        raise _Unreadable
    return result


_UNIT_LETTERS = set("mglhskLKMBtCFd")


def _is_variable(node: _Node) -> bool:
    """A lone letter among the units is a variable unless it abbreviates a unit or is an article."""
    first, *others = re.split(r"[\s/-]+", node.unit)
    if len(first) == 1 and first not in _UNIT_LETTERS and (node.unit_glued or first not in "aA"):
        return True
    return any(len(other) == 1 and other not in _UNIT_LETTERS | set("aAI") for other in others)


def _doubt_about(left: _Side, right: _Side) -> str:
    a, b = left.node.literal(), right.node.literal()
    numbers = left.node.numbers() + right.node.numbers()
    if any(len(re.split(r"[\s/]", number.unit)[0]) == 1 and number.unit_glued for number in numbers if number.unit):
        return "a letter may stand for a number"
    if a is not None and left.preceded:
        return "the words before it may be what is equal"
    if not _same_things(left.node, right.node):
        return "different things are set equal"
    if a is not None and not a.token.percent and all(number.token.percent for number in right.node.numbers()):
        return "a number is set equal to a percentage"
    if b is not None and _LESS.search(b.unit) and _agree(_Node("neg", operands=(left.node,)), right.node):
        return "the sign is in the words"
    if _mixes_percent(left.node) or _mixes_percent(right.node):
        return "a percentage is added to a number"
    return ""


def _same_things(left: _Node, right: _Node) -> bool:
    """Whether a single quantity on the left counts what the right side counts, so that the two can be compared."""
    a, b = left.literal(), right.literal()
    if left.op == "/" and all(operand.op == "number" for operand in left.operands):
        above, below = left.operands  # "1/2 a cup = 4 ounces", "1/4 container = 60/4"
        if above.unit or not below.unit:
            return True
        if b is not None:
            return not b.unit or _noun(below) == _noun(b)
        return any(_noun(number) == _noun(below) for number in right.numbers())
    if a is None:
        return True
    if b is not None:
        return _noun(a) == _noun(b) or any(_noun(a) in table and _noun(b) in table for table in _UNIT_TABLE.values())
    return not a.unit or all(_noun(number) == _noun(a) for number in right.numbers())


def _mixes_percent(node: _Node) -> bool:
    for part in node.walk():
        if part.op in ("+", "-"):
            literals = [operand.literal() for operand in part.operands]
            if len({literal.token.percent for literal in literals if literal}) == 2:
                return True
    return False


# --- Units ---

_UNIT_TABLE = {
    "time": {
        "second": 1, "sec": 1, "s": 1, "minute": 60, "min": 60, "hour": 3600, "hr": 3600, "h": 3600, "day": 86400,
        "week": 604800,
    },
    "calendar": {"month": 1, "year": 12, "decade": 120, "century": 1200},
    "money": {"cent": 1, "penny": 1, "pennie": 1, "nickel": 5, "dime": 10, "quarter": 25, "dollar": 100, "$": 100},
    "imperial length": {"inch": 1, "inche": 1, "foot": 12, "feet": 12, "ft": 12, "yard": 36, "mile": 63360},
    "metric length": {
        "millimeter": 1, "mm": 1, "centimeter": 10, "cm": 10, "meter": 1000, "metre": 1000, "m": 1000,
        "kilometer": 1000000, "kilometre": 1000000, "km": 1000000,
    },
    "imperial weight": {"ounce": 1, "oz": 1, "pound": 16, "lb": 16, "ton": 32000},
    "metric weight": {
        "milligram": 1, "mg": 1, "gram": 1000, "g": 1000, "kilogram": 1000000, "kg": 1000000, "kilo": 1000000,
    },
    "metric volume": {"milliliter": 1, "ml": 1, "liter": 1000, "litre": 1000, "l": 1000},
    "imperial volume": {
        "teaspoon": 1, "tablespoon": 3, "cup": 48, "pint": 96, "quart": 192, "gallon": 768,
    },
    "count": {"": 1, "pair": 2, "dozen": 12, "score": 20, "gross": 144},
    "magnitude": {
        "": 1, "k": 1000, "hundred": 100, "thousand": 1000, "million": 10**6, "m": 10**6, "billion": 10**9,
    },
}  # fmt: skip


def _noun(number: _Node) -> str:
    """The first word of the unit, singular and in lower case; "$" for a dollar sign before the number."""
    words = re.split(r"[\s/]", number.unit.lstrip("/"), maxsplit=1)[0].lower().rstrip("s.") if number.unit else ""
    return words if words or not number.token.dollars else "$"


def _factor(number: _Node, scale: dict[str, Fraction]) -> Fraction:
    return scale.get(_noun(number), Fraction(1)) if scale else Fraction(1)


def _unit_scales(numbers: list[_Node]) -> list[dict[str, Fraction]]:
    """Returns the tables of conversion factors in which the numbers' units differ."""
    nouns = {_noun(number) for number in numbers}
    if any("" in table and noun in table and noun for table in _UNIT_TABLE.values() for noun in nouns):
        nouns.add("")  # "2 dozen = 24 eggs": what is counted has the factor 1
    return [
        {noun: Fraction(factor) for noun, factor in table.items()}
        for table in _UNIT_TABLE.values()
        if len({table[noun] for noun in nouns if noun in table}) > 1
    ]
