r"""What only the last parser of the Qwen2.5-Math grader, latex2sympy2 1.9.1, can read. Runs in worker processes only.

The grader asks it after sympy's `parse_latex` and `parse_expr` have refused a text. Of its grammar that leaves, in
answers: lists `[\frac12,3]`, matrices with sums, products and powers of them, chains of relations, numbers with
leading zeros, and ":" for division. As there, the text may go on after what was read.
"""

import re
from typing import Any

import sympy
from sympy.parsing.latex import parse_latex

_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
_MATRIX = re.compile(r"\\begin\{([pb]matrix)\}(.*?)\\end\{\1\}", re.DOTALL)
_OPERATOR = re.compile(r"(?P<times>\\cdot(?![a-zA-Z])|\\times(?![a-zA-Z])|\*)|(?P<over>/|:|\\div(?![a-zA-Z]))")
_RELATIONS = {"<": sympy.StrictLessThan, ">": sympy.StrictGreaterThan, "=": sympy.Eq}
_RELATIONS |= {"\\le": sympy.LessThan, "\\ge": sympy.GreaterThan}
_RELATION = re.compile(r"([<>=]|\\[lg]e(?![a-zA-Z]))")
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_COMMAND_NAMES = (
    "frac sqrt pi text infty left right cos sin tan sec cot csc theta in overline alpha le triangle mathbf log "
    "textnormal beta gamma delta epsilon phi psi rho sigma tau mu nu eta zeta xi kappa chi lambda omega Gamma "
    "Delta Phi Omega Sigma ln exp gcd lcm max min lfloor rfloor lceil rceil sum int lim prod binom operatorname "
    "arcsin arccos arctan sinh cosh tanh det mathbb vec hat bar to ne ge equiv mod angle prime cdots dots "
    "emptyset div times cdot over ell imath Re Im neg Rightarrow rightarrow mathrm textbf textit lbrace rbrace "
    "lbrack rbrack lvert rvert vert"
)
_COMMANDS = frozenset(_COMMAND_NAMES.split())
_POWER = re.compile(r"\^(?:\{([^{}]*)\}|(\w))")
_OPENING = {"(": ")", "{": "}", "[": "]"}
_SPACES = ("\\displaystyle", "\\quad", "\\qquad", "~", "\\,", "$")


def _top_level(text: str) -> list[tuple[int, str]]:
    """Positions and characters outside all brackets; ends at a bracket that was not opened."""
    depth, found = 0, []
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                found.append((position, character))
                return found
        elif depth == 0:
            found.append((position, character))
    return found


def _scalar(text: str) -> Any:
    text = re.sub(r"(?<!\d)\.", " ", _LEADING_ZEROS.sub("", text.strip()).replace(":", "\\div "))
    return parse_latex(text.strip(), strict=True)


def _list(text: str) -> list | None:
    """`[a,b]`, `{a,b}` or `a,b` with two items at least; None when the text does not begin like that."""
    close = _OPENING.get(text[:1]) if not text.startswith("(") else None
    inside = text[1:] if close else text
    cuts, end = [-1], len(inside)
    for position, character in _top_level(inside):
        if character in ",;":
            cuts.append(position)
        elif character in ")]}":
            end = position
            break
    if len(cuts) < 2 or (close and inside[end : end + 1] != close):
        return None
    return [_relation(inside[begin + 1 : stop]) for begin, stop in zip(cuts, [*cuts[1:], end], strict=True)]


def _relation(text: str) -> Any:
    """A chain of relations, nested to the left and not evaluated, or a value."""
    first, *rest = _RELATION.split(text)
    result = _value(first)
    for sign, side in zip(rest[::2], rest[1::2], strict=True):
        result = _RELATIONS[sign](result, _value(side), evaluate=False)
    return result


def _value(text: str) -> Any:
    if "matrix" not in text:
        return _scalar(text)
    value, rest = _sum(text.strip())
    if rest:
        raise ValueError("text after an item")
    return value


def _matrix(body: str) -> sympy.Matrix:
    rows = [row for row in body.split("\\\\") if row.strip()]
    if any(re.search(r"\\[^a-zA-Z]", row) for row in rows):
        raise ValueError("a lone backslash")
    return sympy.Matrix([[_scalar(cell) for cell in row.split("&")] for row in rows])


def _closing(text: str) -> int:
    """Where the bracket that opens the text is closed."""
    for position, character in _top_level(text[1:]):
        if character == _OPENING[text[0]]:
            return position + 1
    raise ValueError("an open bracket")


def _factor(text: str) -> tuple[Any, str] | None:
    """The first factor and the text after it; None when the text begins with no factor."""
    match = _MATRIX.match(text)
    if match:
        value, rest = _matrix(match[2]), text[match.end() :]
    elif text[:1] in ("(", "{") and "matrix" in text[: _closing(text)]:
        end = _closing(text)
        value, rest = _value(text[1:end]), text[end + 1 :]
    else:
        match, operator = _MATRIX.search(text), _OPERATOR.search(text)
        ends = [position for position, character in _top_level(text) if character in "+-)]},"][:1]
        end = min([len(text), *ends, *(found.start() for found in (match, operator) if found)])
        return (_scalar(text[:end]), text[end:]) if text[:end].strip(" .") else None
    while power := _POWER.match(rest):
        exponent = power[1] or power[2]
        value = value.T if exponent == "T" else value ** _scalar(exponent)
        rest = rest[power.end() :]
    return value, rest


def _is_matrix(value: Any) -> bool:
    return bool(getattr(value, "is_Matrix", False))


def _product(left: Any, right: Any) -> Any:
    kind = sympy.MatMul if _is_matrix(left) or _is_matrix(right) else sympy.Mul
    return kind(left, right, evaluate=False)


def _term(text: str) -> tuple[Any, str]:
    negative = False
    while text[:1] in ("+", "-"):
        negative ^= text[0] == "-"
        text = text[1:].lstrip()
    read = _factor(text)
    if read is None:
        raise ValueError("no factor")
    value, text = read
    if negative:
        if _is_matrix(value):
            raise ValueError("latex2sympy2 does not read a minus before a matrix")
        value = _product(sympy.Integer(-1), value)
    while text := text.lstrip():
        operator = _OPERATOR.match(text)
        following = text[operator.end() :].lstrip() if operator else text
        read = None if not operator and following[:1] in ("+", "-") else _factor(following)
        if read is None:
            break
        factor, text = read
        value = _product(value, factor**-1 if operator and operator["over"] else factor)
    return value, text


def _sum(text: str) -> tuple[Any, str]:
    value, text = _term(text)
    while text.lstrip()[:1] in ("+", "-"):
        following, text = _term(text.lstrip())
        kind = sympy.MatAdd if _is_matrix(value) or _is_matrix(following) else sympy.Add
        value = kind(value, following, evaluate=False)
    return value, text.strip()


def parse(text: str) -> Any:
    """The list, matrix or expression at the beginning of a text. Raises when there is none."""
    text = text.replace("\\mathrm{T}", "T").replace("\\mathrm{d}", "d")
    for space in _SPACES:
        text = text.replace(space, " ")
    text = text.strip()
    outside = _MATRIX.sub(lambda match: match[2], text)
    if not _COMMANDS.issuperset(_COMMAND.findall(outside)):
        raise ValueError("a command that latex2sympy2 does not know")
    found = _list(text)
    if found is not None:
        return found
    if _MATRIX.search(text):
        return _sum(text)[0]
    if _RELATION.search(text):
        return _relation(text)
    return parse_latex(re.sub(r"(?<!\d)\.", " ", _LEADING_ZEROS.sub("", text).replace(":", "\\div ")))
