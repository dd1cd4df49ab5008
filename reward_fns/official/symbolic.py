"""The sympy half of the official modes. Runs in worker processes only: `reward_fns.workers` imports it there.

Two of the official graders hand model text to sympy's `parse_expr` and `sympify`, which are `eval`. Here the same
tokens (sympy's own transformations) become a syntax tree that is walked: numbers, names, operators, tuples, sets,
comparisons and calls of mathematical functions have sympy's meaning; attributes, subscripts, strings, keywords and
calls of anything else are refused, which the graders see as text that cannot be parsed.
"""

import ast
import builtins
import math
import operator
import re
import types
from functools import lru_cache
from typing import Any

import sympy
from sympy.parsing.latex import _parse_latex_antlr, parse_latex
from sympy.parsing.sympy_parser import (
    TokenError,
    convert_xor,
    rationalize,
    standard_transformations,
    stringify_expr,
)

from ._common import limited
from ._sympy_runtime import RUNTIMES, runtime_version

# `parse_latex` asks for a runtime 4.11 by name; the others in RUNTIMES read the same tables.
if (runtime_version() or "").startswith(RUNTIMES):
    _parse_latex_antlr.version = lambda package: "4.11.1"


class Refused(ValueError):
    """Text that the official grader would have run and this one does not."""


_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitXor: operator.xor,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.MatMult: operator.matmul,
}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert, ast.Not: operator.not_}
_COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_SEQUENCES = {ast.Tuple: tuple, ast.List: list, ast.Set: set}
# Functions of sympy's namespace that are not classes and only compute.
_FUNCTION_NAMES = (
    "sqrt cbrt root real_root factorint gcd lcm igcd ilcm simplify expand factor cancel together apart nsimplify "
    "divisors isprime nextprime prevprime prime solve integrate diff limit summation product abs pow round sum divmod"
)
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
# What the transformations write with a string inside, and what that string may be.
_FROM_STRING = {
    "Symbol": str.isidentifier,
    "Function": str.isidentifier,
    "Integer": re.compile(r"-?[0-9_]+|0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+").fullmatch,
    "Float": re.compile(r"[0-9._]*(?:[eE][+-]?[0-9_]+)?").fullmatch,
    "Rational": re.compile(r"[0-9._]*(?:[eE][+-]?[0-9_]+)?").fullmatch,
}


@lru_cache(maxsize=1)
def _namespace() -> dict[str, Any]:
    """The names that `parse_expr` resolves: all of sympy and the functions that are built into Python."""
    names = {name: getattr(sympy, name) for name in sympy.__all__}
    names |= {name: item for name, item in vars(builtins).items() if isinstance(item, types.BuiltinFunctionType)}
    return names | {"max": sympy.Max, "min": sympy.Min}


def _callable(name: str, local: dict[str, Any]) -> Any:
    if name in local:
        return local[name]
    item = _namespace().get(name)
    if item is None:
        raise Refused(name)
    if name in _FUNCTIONS or (isinstance(item, type) and issubclass(item, sympy.Basic)):
        return item
    raise Refused(name)


def _value(node: ast.expr, local: dict[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            if isinstance(value, str | bytes):
                raise Refused("a string")
            return value
        case ast.Name(id=name):
            if name in local:
                return local[name]
            if name in _namespace():
                return _namespace()[name]
            raise Refused(name)
        case ast.BinOp():
            return _BINARY[type(node.op)](_value(node.left, local), _value(node.right, local))
        case ast.UnaryOp():
            return _UNARY[type(node.op)](_value(node.operand, local))
        case ast.Tuple() | ast.List() | ast.Set():
            return _SEQUENCES[type(node)](_value(item, local) for item in node.elts)
        case ast.BoolOp():
            result = _value(node.values[0], local)
            for item in node.values[1:]:
                if bool(result) is isinstance(node.op, ast.Or):
                    return result
                result = _value(item, local)
            return result
        case ast.Compare():
            left, result = _value(node.left, local), True
            for operation, right_node in zip(node.ops, node.comparators, strict=True):
                right = _value(right_node, local)
                result = _COMPARE[type(operation)](left, right)
                if len(node.ops) > 1 and not result:
                    return result
                left = right
            return result
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str() as text)], keywords=[]):
            if name not in _FROM_STRING or not _FROM_STRING[name](text):
                raise Refused("a string")
            return _namespace()[name](text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _callable(name, local)(*(_value(item, local) for item in args))
        case ast.Call(func=ast.Call(func=ast.Name(id="Function")), args=args, keywords=[]):
            return _value(node.func, local)(*(_value(item, local) for item in args))
    raise Refused(type(node).__name__)


def parse_python(text: str, transformations: tuple = standard_transformations) -> Any:
    """`sympy.parsing.sympy_parser.parse_expr` without `eval`. Raises what it raises, and `Refused`."""
    local: dict[str, Any] = {}
    code = stringify_expr(text, local, _namespace(), transformations)
    return _value(ast.parse(code.strip(), mode="eval").body, local)


def sympify_text(text: str, rational: bool = False) -> Any:
    """What `sympify` makes of a string: as `parse_python`, with `^` for powers and, if asked, exact decimals."""
    transformations = standard_transformations + ((rationalize,) if rational else ()) + (convert_xor,)
    try:
        return parse_python(text.replace("\n", ""), transformations)
    except (TokenError, SyntaxError) as error:
        raise sympy.SympifyError(text) from error


def evaluate(item: Any) -> Any:
    """`sympy.N`, which reads a string as exact first."""
    return sympify_text(item, rational=True).evalf() if isinstance(item, str) else sympy.N(item)


def equals(first: Any, second: Any) -> Any:
    """`first.equals(second)`, which reads a string."""
    return first.equals(sympify_text(second) if isinstance(second, str) else second)


def _is_zero(item: Any) -> bool:
    return bool(sympy.simplify(item) == 0)


def minerva_equal_in_worker(first: str, second: str, seconds: float) -> bool:
    """`minerva_equal` within so many seconds of processor time."""
    with limited(seconds):
        return minerva_equal(first, second)


def minerva_equal(first: str, second: str) -> bool:
    """lm-evaluation-harness, `minerva_math/utils.py:is_equiv`, without its test for equal strings."""
    try:
        return _is_zero(parse_latex(first) - parse_latex(second))
    except Exception:
        # The harness ends every failure, whatever its kind, with the verdict "not equivalent".
        return False


def _first_parse(text: str, parsers: tuple, candidates: tuple[str, ...]) -> Any:
    """The result of the first parser that accepts a candidate; the text itself when none does."""
    for parser in parsers:
        for candidate in candidates:
            try:
                return parser(candidate)
            except Exception:
                continue
    return text


def _holds(test) -> bool:
    """Whether a comparison succeeds; one that raises does not, as everywhere in the official code."""
    try:
        return bool(test())
    except Exception:
        return False


def deepseek_symbolic_equal(first: str, second: str) -> bool:
    """DeepSeek-Math, `eval_utils.py:symbolic_equal`: equal for `simplify`, or numerically within 1e-3."""
    a, b = (_first_parse(text, (parse_latex, parse_python), (text,)) for text in (first, second))
    return _holds(lambda: sympy.simplify(a - b) == 0) or _holds(
        lambda: math.isclose(evaluate(a), evaluate(b), abs_tol=1e-3)
    )


def qwen_symbolic_equal(first: str, second: str) -> bool:
    """Qwen2.5-Math, `grader.py:symbolic_equal`: same print, `equals`, `simplify`, same equation, or within 1e-4."""
    from .latex2sympy import parse as parse_last

    parsers = (parse_latex, parse_python, parse_last)
    a, b = (_first_parse(text, parsers, (text.replace("\\\\", "\\"), text)) for text in (first, second))
    return (
        _holds(lambda: str(a) == str(b) or a == b)
        or _holds(lambda: equals(a, b) or sympy.simplify(a - b) == 0)
        or _holds(lambda: abs(a.lhs - a.rhs).equals(abs(b.lhs - b.rhs)))
        or _holds(lambda: math.isclose(float(evaluate(b)), float(evaluate(a)), rel_tol=1e-4))
        or _holds(lambda: _rounded_matrices_equal(a, b))
    )


def _rounded_matrices_equal(a: Any, b: Any) -> bool:
    if a.shape != b.shape:
        return False
    return a.applyfunc(lambda item: round(item, 3)).equals(b.applyfunc(lambda item: round(item, 3)))


__all__ = ["deepseek_symbolic_equal", "minerva_equal", "parse_python", "qwen_symbolic_equal"]
