"""The equalities of a step and whether each holds.

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
from dataclasses import dataclass, field

from reward_fns.arithmetic.expressions import (
    NO_SCALE,
    ONE,
    UNIT_TABLE,
    Node,
    Parser,
    Unreadable,
    agree,
    evaluate,
    fraction_readings,
    noun,
    parse_whole,
    unit_scales,
)
from reward_fns.arithmetic.tokens import (
    CALCULATOR_MARK,
    VERBS,
    Token,
    joins_digits,
    normalize,
    strip_label,
    text_of,
    tokenize,
)

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
    for mark in CALCULATOR_MARK.finditer(text):
        found += _equalities_of(tokenize(normalize(mark.group(1))))
    plain = normalize(CALCULATOR_MARK.sub(lambda mark: " " if joins_digits(mark) else "", text))
    for line in plain.split("\n"):
        if "=" in line or "equals" in line.lower():
            found += _equalities_of(tokenize(strip_label(line)))
    return found


# --- The two sides ---


@dataclass
class _Side:
    """One side of an equality.

    Attributes:
        node: the longest expression there.
        others: other readings of the same words, which may make the equality true but never false.
        cuts: readings of less than the whole, which may only put it in doubt.
        doubt: why the result is not to be trusted where the sides differ.
    """

    node: Node
    text: str
    others: list[Node]
    cuts: list[Node] = field(default_factory=list)
    doubt: str = ""
    preceded: bool = False  # words stand before it in the same clause
    remainder: bool = False  # the text after it speaks of a remainder


def _left_side(tokens: list[Token], first: bool) -> _Side | str:
    """Reads the longest expression that ends where the tokens end; returns why there is none.

    `first` is False where the tokens begin with the right side of another equality.
    """
    cut = len(tokens) > MAX_TOKENS
    tokens = tokens[-MAX_TOKENS:]
    begin = max((i + 1 for i, token in enumerate(tokens) if token.kind in ("break", "unknown")), default=0)
    if tokens and tokens[-1].kind == "words" and _NEXT_NAME.search(tokens[-1].text):
        return "another name stands before the equals sign"  # "3 units and BC = 4 units"
    tried = 0
    for start in range(begin, len(tokens)):
        token, before = tokens[start], tokens[start - 1] if start else None
        negative = token.kind == "op" and token.text == "-" and (start == begin or before.kind == "(")
        if token.kind not in ("number", "(") and not negative:
            continue
        tried += 1
        if tried > MAX_STARTS:
            break
        node = parse_whole(tokens[start:])
        if node is None:
            continue
        problem = "too long" if cut and start == 0 else _context_problem(tokens, start)
        if problem:
            return problem
        others = fraction_readings(tokens[start:])
        # "10% of the $400 + $1580 = $1980" states the sum.
        sums = [parse_whole(tokens[k + 1 :]) for k in range(start, len(tokens)) if tokens[k].spelled == "of"]
        others += [other for other in sums if other and other.op != "number"]
        if negative and not tokens[start + 1].glued:
            others.append(parse_whole(tokens[start + 1 :]))  # a dash may begin a list item
        side = _Side(node, text_of(tokens[start:]), [other for other in others if other])
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


def _context_problem(tokens: list[Token], start: int) -> str:
    """An expression that follows an operator without a written left operand is only part of one."""
    index = start - 1
    if index >= 0 and tokens[index].kind == "number":
        return "two numbers stand side by side"
    if index >= 0 and tokens[index].kind == ")" and any(token.text in ("(", "[") for token in tokens[:index]):
        return "a parenthesis stands before it"
    # "3 + Cindy has 5 = 8" and "3 + Mr. Smith's 5 = 8": neither the verb nor the dot ends the statement.
    while index >= 0 and (
        tokens[index].kind in ("words", "(") or tokens[index].text in VERBS or _ends_abbreviation(tokens, index)
    ):
        index -= 1
    if index < 0:
        return ""
    if tokens[index].kind == "op":
        return "an operand is not a number"
    if tokens[index].kind == "unknown":
        return "something before the expression was not understood"
    return ""


def _ends_abbreviation(tokens: list[Token], index: int) -> bool:
    before = tokens[index - 1] if index else None
    if tokens[index].text != "." or before is None:
        return False
    return before.kind == "op" or (before.kind == "words" and len(before.text.split()[-1]) <= 3)


def _right_side(tokens: list[Token], last: bool) -> _Side | str:
    """Reads the longest expression that begins where the tokens begin; returns why there is none.

    `last` is False where the tokens end with the left side of another equality.
    """
    cut = len(tokens) > MAX_TOKENS
    tokens = tokens[:MAX_TOKENS]
    parser = Parser(tokens)
    try:
        node = parser.sum()
    except Unreadable:
        return "no expression after the equals sign"
    end = parser.position
    following, after = parser.peek(), parser.peek(1)
    others = fraction_readings(tokens[:end])
    # "3/3 - 2/3 = 1/3 of $150" states the fraction.
    others += [parse_whole(tokens[:k]) for k in range(end) if tokens[k].spelled == "of"]
    side = _Side(node, text_of(tokens[:end]), [other for other in others if other])
    # "100/5 = 20 times 2 people came" counts times, and "8*45 = 360 divided by 5 is 72" goes on.
    cuts = [parse_whole(tokens[:k]) for k in range(end) if tokens[k].spelled not in ("", "of")]
    side.cuts = [cut for cut in cuts if cut]
    side.doubt = _doubt_in(tokens[:end])
    side.remainder = any("remain" in token.text or "left" in token.text for token in tokens if token.kind == "words")
    if following is None:
        return "too long" if cut else side
    if following.kind in ("op", "unknown"):
        return "an operand is not a number"
    remark = following.kind == "(" and not following.glued and after is not None and after.kind in ("words", "break")
    goes_on = not last and tokens[end - 1].text.endswith("and")  # "3 + 4 = 7 and 7 * 2 = 14"
    if following.kind in ("number", "(") and not remark and not goes_on:
        side.doubt = "another number follows"
    if following.text == "!":
        side.doubt = "it may be a factorial"
    if following.text == "." and after is not None and after.kind == "unknown":
        side.doubt = "digits may follow"  # "0.\\overline{3}"
    if following.text == "-dash":
        side.doubt = "a dash may be a minus sign"
    if following.text == "," and after is not None and after.kind in ("number", "unknown") and after.glued:
        side.doubt = "it may be part of a list or of a longer number"
    return side


_CHANGES_MEANING = re.compile(
    r"(?:\b(?:twice|thrice|doubled?|triple|quadruple|half|halve|quarter|squared?|cubed?|root|than|by|least|most|"
    r"every|each|another|per|dozen|negative|minus|plus|times|as|over|from|into|to|or|between|about|around|nearly|"
    r"almost|approximately|roughly|mod|choose|gcd|lcm|max|min|log|ln|sqrt|no|numbers?|(?:day|week|month|year|hour|minute|question|problem|step|option|case|"
    r"box|group|stage|round|level|room|grade|chapter|page|equation|eq|line|part|example|figure|table)s?)"
    r"|\b(?:half|thirds?|quarters?|fourths?|fifths?|sixths?|eighths?|tenths?|average|mean|median|product|difference|"
    r"ratio|root|square|cube|fraction|percent|percentage|rest|remainder|multiple|sum|double|part)\s+of)"
    r"(?:\s+(?:the|a|an|his|her|their|its|all))?$",
    re.I,
)
_NEXT_NAME = re.compile(r"\b(?:and|or)\s+\w{1,3}$", re.I)
_COUNTED = re.compile(r"\b(?:and|of|in|at|for|with|on|a|to|the)$", re.I)  # "8 packs of 5 bags * $4"
_LESS = re.compile(
    r"\b(?:less|fewer|lower|below|behind|short|shorter|loss|lost|decrease|drop|debt|younger|under)\b", re.I
)
_NUMBER_WORD = re.compile(
    r"\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|forty|fifty|hundred|half|"
    r"twice|double|quarter|third|fourth|times)\b|\b(?:am|pm|a\.m|p\.m|o'clock)\b",
    re.I,
)


def _doubt_in(tokens: list[Token]) -> str:
    """What in an expression may mean something else than it reads."""
    for i, token in enumerate(tokens):
        previous = tokens[i - 1] if i else None
        if token.kind == "words":
            if _NUMBER_WORD.search(token.text):
                return "a number in words, or a time of day, stands among the units"
            if token.text.startswith("of ") or token.text == "of":
                return "a share of something is set equal"
        if previous is None:
            continue
        if token.kind == "op" and token.text == "/" and token.glued and previous.kind == "words":
            return "a number may belong to a unit"
        if token.kind in ("(", "number") and previous.kind in (")", "number") and not token.glued:
            return "a parenthesis may be a remark"
    return ""


# --- Verdicts ---


def _equalities_of(tokens: list[Token]) -> list[Equality]:
    """Judges each `=` of a line between the expression that ends before it and the one that begins after it."""
    segments: list[list[Token]] = [[]]
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
            found.append(Equality(text_of(segments[index][-12:]), text_of(segments[index + 1][:12]), None, problem))
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
        if any(agree(a, b) for a in (left.node, *left.others) for b in (right.node, *right.others)):
            return True, "equal"
        if right.remainder and _is_quotient(left.node, right.node):
            return True, "equal but for the remainder"
        if any(agree(left.node, right.node, scale) for scale in unit_scales(numbers)):
            return True, "equal after converting units"
        if any(agree(left.node, node) for node in right.cuts):
            return None, "a word may be no operator"
    except ZeroDivisionError:
        return False, "division by zero"
    except Unreadable:
        return None, "too large to evaluate"
    doubt = left.doubt or right.doubt or _doubt_about(left, right)
    return (None, doubt) if doubt else (False, "not equal")


def _is_quotient(left: Node, right: Node) -> bool:
    whole = right.literal()
    if left.op != "/" or whole is None or whole.token.place is not None:
        return False
    exact = evaluate(left, ONE, NO_SCALE)
    return exact >= 0 and exact // 1 == evaluate(right, ONE, NO_SCALE)


_UNIT_LETTERS = frozenset("mglhskLKMBtCFd")
_ABBREVIATIONS = frozenset(
    re.findall(
        r"\w+",
        "cm mm km kg mg ml cl dl ft lb lbs oz in inch yd mi hr hrs min sec mph kph gal pt pts qt gb mb kb tb am pm "
        "usd eur gbp inr rs pcs yrs mo wk men cal",
    )
)


def _is_variable(node: Node) -> bool:
    """A letter or a few of them behind a number are variables unless they abbreviate a unit or are an article."""
    first, *others = re.split(r"[\s-]+", node.unit)
    head = first.split("/")[0]
    if len(head) == 1 and head not in _UNIT_LETTERS and (node.unit_glued or head not in "aA"):
        return True
    short = 1 < len(head) <= 3 and head.lower().rstrip("s") not in _ABBREVIATIONS
    if short and (node.unit_glued or (head.isupper() and len(head) == 2)):
        return True
    divisors = re.findall(r"/(\w)(?!\w)", node.unit)
    return any(letter not in _UNIT_LETTERS for letter in divisors) or any(
        len(other) == 1 and other not in "aAI" for other in others
    )


def _may_be_variable(node: Node) -> bool:
    """Whether a unit may be a variable after all, so that a sum that does not fit is no error."""
    word = re.split(r"[\s/]", node.unit, maxsplit=1)[0]
    if len(word) == 1:
        return word not in "aA" and (node.unit_glued or node.op != "number")
    if not word or noun(node) in _ABBREVIATIONS or any(noun(node) in table for table in UNIT_TABLE.values()):
        return False
    return node.unit_glued or (node.op != "number" and node.unit == word and len(word) < 5)


def _doubt_about(left: _Side, right: _Side) -> str:
    a, b = left.node.literal(), right.node.literal()
    if any(_may_be_variable(node) for node in left.node.walk() + right.node.walk() if node.unit):
        return "a letter may stand for a number"
    if a is not None and left.preceded:
        return "the words before it may be what is equal"
    if not _same_things(left.node, right.node):
        return "different things are set equal"
    if a is not None and not a.token.percent and all(number.token.percent for number in right.node.numbers()):
        return "a number is set equal to a percentage"
    if b is not None and _LESS.search(b.unit) and agree(Node("neg", operands=(left.node,)), right.node):
        return "the sign is in the words"
    if _mixes_percent(left.node) or _mixes_percent(right.node):
        return "a percentage is added to a number"
    return ""


def _same_things(left: Node, right: Node) -> bool:
    """Whether a single quantity on the left counts what the right side counts, so that the two can be compared."""
    a, b = left.literal(), right.literal()
    if left.op == "/" and all(operand.op == "number" for operand in left.operands):
        above, below = left.operands  # "1/2 a cup = 4 ounces", "1/4 container = 60/4"
        if above.unit or not below.unit:
            return True
        if b is not None:
            return not b.unit or noun(below) == noun(b)
        return any(noun(number) == noun(below) for number in right.numbers())
    if a is None:
        return True
    if b is not None and a.unit != b.unit and any(re.search(r"\bper\b|/", unit) for unit in (a.unit, b.unit)):
        return False  # "60 miles per hour = 88 feet per second"
    if b is not None:
        return noun(a) == noun(b) or any(noun(a) in table and noun(b) in table for table in UNIT_TABLE.values())
    return not a.unit or all(noun(number) == noun(a) for number in right.numbers())


def _mixes_percent(node: Node) -> bool:
    for part in node.walk():
        if part.op in ("+", "-"):
            literals = [operand.literal() for operand in part.operands]
            if len({literal.token.percent for literal in literals if literal}) == 2:
                return True
    return False
