"""Tokens -> expression trees -> exact fractions, and whether two of them agree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from reward_fns.arithmetic.tokens import Token

MAX_EXPONENT = 64
MAX_BITS = 4096  # of a numerator or denominator
MAX_DEPTH = 32  # of parentheses


_JOINING_WORD = re.compile(r"\b(?:and|or)\b", re.I)


class Unreadable(Exception):
    """The tokens are no expression, or one that is too large to evaluate."""


@dataclass
class Node:
    """An expression: a number, a negation, or a binary operator; each may be followed by a unit."""

    op: str  # number, neg, or the sign of a binary operator
    token: Token | None = None
    operands: tuple[Node, ...] = ()
    unit: str = ""
    unit_glued: bool = False

    def walk(self) -> list[Node]:
        """The node and all below it, from left to right."""
        nodes, stack = [], [self]
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack.extend(reversed(node.operands))
        return nodes

    def numbers(self) -> list[Node]:
        return [node for node in self.walk() if node.op == "number"]

    def literal(self) -> Node | None:
        """The number that this expression is, if it is only one, with or without a sign."""
        node = self
        while node.op == "neg":
            node = node.operands[0]
        return node if node.op == "number" else None


class Parser:
    """Recursive descent. Stops at the first token that cannot go on with the expression.

    `fractions` says where the operand after a division is a fraction of two written numbers, so that `25 / 1/3` is 75:
    `""` nowhere, `"tight"` where no space is in it, `"any"`.
    """

    def __init__(self, tokens: list[Token], fractions: str = ""):
        self.tokens, self.position, self.depth = tokens, 0, 0
        self.fractions = fractions
        self.ended = False

    def peek(self, offset: int = 0) -> Token | None:
        index = self.position + offset
        return self.tokens[index] if index < len(self.tokens) else None

    def at(self, signs: str, offset: int = 0) -> bool:
        token = self.peek(offset)
        return not self.ended and token is not None and token.kind == "op" and token.text in signs

    def sum(self) -> Node:
        node = self.product()
        while self.at("+-"):
            sign, before = self.peek().text, (self.position, self.depth)
            self.position += 1
            try:
                node = Node(sign, operands=(node, self.product()))
            except Unreadable:
                self.position, self.depth = before
                break
        return node

    def product(self) -> Node:
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
                node = Node(sign, operands=(node, operand or self.power()))
            except Unreadable:
                self.position, self.depth = before
                break
        return node

    def _fraction(self) -> Node | None:
        above, below = self.peek(), self.peek(2)
        if above and below and above.kind == below.kind == "number" and self.at("/", 1):
            if self.fractions == "tight" and not (self.peek(1).glued and below.glued):
                return None
            self.position += 2
            return Node("/", operands=(Node("number", above), self.primary()))
        return None

    def _juxtaposed(self) -> bool:
        """`5(3 + 2)`, `(2)(3)`, `(1/2) 18` and `1/2 (18)` multiply; a parenthesis after a unit is a remark."""
        token, previous = self.peek(), self.tokens[self.position - 1]
        if token is None or previous.kind not in ("number", ")"):
            return False
        return token.kind == "(" or (token.kind == "number" and previous.kind == ")")

    def power(self) -> Node:
        node = self.unary()
        if self.at("^") and self.tokens[self.position - 1].kind in ("number", ")"):
            self.position += 1
            node = Node("^", operands=(node, self.unary()))
        return node

    def unary(self) -> Node:
        if not self.at("-"):
            return self.primary()
        self._deeper()
        self.position += 1
        node = Node("neg", operands=(self.power(),))
        self.depth -= 1
        return node

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable

    def primary(self) -> Node:
        token = self.peek()
        if token is None or token.kind not in ("number", "("):
            raise Unreadable
        self.position += 1
        if token.kind == "number":
            node = Node("number", token)
        else:
            self._deeper()
            node = self.sum()
            closing = self.peek()
            if closing is None or closing.kind != ")":
                raise Unreadable
            self.position += 1
            self.depth -= 1
        unit = self.peek()
        if unit and unit.kind == "words":
            self.position += 1
            node.unit, node.unit_glued = unit.text, unit.glued
            self.ended = _JOINING_WORD.search(unit.text) is not None  # "39 and -11 + 2*50 = 89"
            power = self.peek(1)
            if self.at("^") and power and power.text in ("2", "3", "²", "³"):  # "15 cm^2"
                self.position += 2
        return node


def parse_whole(tokens: list[Token], fractions: str = "") -> Node | None:
    """Parses all tokens as one expression."""
    parser = Parser(tokens, fractions=fractions)
    try:
        node = parser.sum()
    except Unreadable:
        return None
    return node if parser.position == len(tokens) else None


def fraction_readings(tokens: list[Token]) -> list[Node | None]:
    """The readings of `a / b / c` in which b / c is a fraction."""
    if sum(token.kind == "op" and token.text == "/" for token in tokens) < 2:
        return []
    return [parse_whole(tokens, fractions="tight"), parse_whole(tokens, fractions="any")]


# --- Values ---

ONE = Fraction(1)
NO_SCALE: dict[str, Fraction] = {}


def agree(left: Node, right: Node, scale: dict[str, Fraction] = NO_SCALE) -> bool:
    """Whether two expressions are equal, exactly or at the precision at which one of them is written.

    Args:
        scale: factor by unit with which each number is multiplied; units that are not in it count as they stand.

    Raises:
        Unreadable: a value is too large or a power is not a small integer.
        ZeroDivisionError: of the expressions.
    """
    tokens = [number.token for number in left.numbers() + right.numbers()]
    slack = _float_error(tokens)
    readings = [Fraction(1, 100), ONE] if any(token.percent for token in tokens) else [ONE]
    for left_percent in readings:
        for right_percent in readings:
            a, b = evaluate(left, left_percent, scale), evaluate(right, right_percent, scale)
            if a == b or abs(a - b) < slack:
                return True
            if _rounds_to(a, b, _place(right, right_percent, scale)):
                return True
            if _rounds_to(b, a, _place(left, left_percent, scale)):
                return True
    return False


def _float_error(tokens: list[Token]) -> Fraction:
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


def _place(node: Node, percent: Fraction, scale: dict[str, Fraction]) -> Fraction | None:
    number = node.literal()
    if number is None or number.token.place is None:
        return None
    return number.token.place * (percent if number.token.percent else 1) * unit_factor(number, scale)


def evaluate(node: Node, percent: Fraction, scale: dict[str, Fraction]) -> Fraction:
    """The exact value; `percent` is what a percent sign multiplies by, 1/100 or 1. Raises as [`agree`] does."""
    if node.op == "number":
        return node.token.value * (percent if node.token.percent else 1) * unit_factor(node, scale)
    values = [evaluate(operand, percent, scale) for operand in node.operands]
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
            raise Unreadable
        result = a ** int(b)
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
        raise Unreadable
    return result


# --- Units ---

UNIT_TABLE = {
    "time": {
        "second": 1, "sec": 1, "s": 1, "minute": 60, "min": 60, "hour": 3600, "hr": 3600, "h": 3600, "day": 86400,
        "week": 604800, "fortnight": 1209600,
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


def noun(number: Node) -> str:
    """The first word of the unit, singular and in lower case; "$" for a dollar sign before the number."""
    words = re.split(r"[\s/]", number.unit.lstrip("/"), maxsplit=1)[0].lower().rstrip("s.") if number.unit else ""
    return words if words or not number.token.dollars else "$"


def unit_factor(number: Node, scale: dict[str, Fraction]) -> Fraction:
    """What the number's unit multiplies by; 1 if it is not in the scale."""
    return scale.get(noun(number), Fraction(1)) if scale else Fraction(1)


def unit_scales(numbers: list[Node]) -> list[dict[str, Fraction]]:
    """Returns the tables of conversion factors in which the numbers' units differ."""
    nouns = {noun(number) for number in numbers}
    if any("" in table and noun in table and noun for table in UNIT_TABLE.values() for noun in nouns):
        nouns.add("")  # "2 dozen = 24 eggs": what is counted has the factor 1
    scales = [
        {noun: Fraction(factor) for noun, factor in table.items()}
        for table in UNIT_TABLE.values()
        if len({table[noun] for noun in nouns if noun in table}) > 1
    ]
    if len(scales) > 1:  # "1 km / 2 hours = 1000 meters / 120 minutes"
        scales.append({noun: factor for scale in reversed(scales) for noun, factor in scale.items()})
    return scales
