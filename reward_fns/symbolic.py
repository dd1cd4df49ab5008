"""Worker side: equality of two answers by sympy. Import it in a worker only: what it reads may hang or blow up."""

import logging
import random
from fractions import Fraction

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.grader import is_equation, is_relation

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
)
_LATEX = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_NORMALIZATION)

DIGITS = 60
# Two values that agree to this many digits at several points are taken as equal.
AGREEMENT = 45


# --- trees -----------------------------------------------------------------------------------------------------------

_CALLS = {
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "cot": sympy.cot,
    "sec": sympy.sec,
    "csc": sympy.csc,
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "sinh": sympy.sinh,
    "cosh": sympy.cosh,
    "tanh": sympy.tanh,
    "ln": sympy.log,
    "log": sympy.log,
}


def _build(tree: list):
    kind, *parts = tree
    if kind == "n":
        value = Fraction(parts[0])
        return sympy.Rational(value.numerator, value.denominator)
    if kind == "v":
        return sympy.Symbol(parts[0], real=True)
    if kind == "c":
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I}[parts[0]]
    if kind == "root":
        k, inner = parts[0], _build(parts[1])
        return sympy.real_root(inner, k) if k % 2 else inner ** sympy.Rational(1, k)
    if kind == "fn":
        name, *arguments = parts
        arguments = [_build(argument) for argument in arguments]
        if name in _CALLS:
            return _CALLS[name](*arguments)
        if name in ("sum", "prod", "int"):
            return _series(name, *arguments)
        return sympy.Function(name.replace(" ", "_"))(*arguments)
    a = [_build(part) for part in parts]
    return {
        "+": lambda: sympy.Add(*a),
        "-": lambda: -a[0],
        "*": lambda: sympy.Mul(*a),
        "/": lambda: a[0] / a[1],
        "^": lambda: a[0] ** a[1],
        "!": lambda: sympy.factorial(a[0]),
        "binom": lambda: sympy.binomial(*a),
        "abs": lambda: sympy.Abs(a[0]),
        "floor": lambda: sympy.floor(a[0]),
        "ceil": lambda: sympy.ceiling(a[0]),
        "gcd": lambda: sympy.gcd_list(a),
        "lcm": lambda: sympy.lcm_list(a),
        "max": lambda: sympy.Max(*a),
        "min": lambda: sympy.Min(*a),
        "mod": lambda: sympy.Mod(*a),
    }[kind]()


def _series(name: str, variable, low, high, body):
    maker = {"sum": sympy.Sum, "prod": sympy.Product, "int": sympy.Integral}[name]
    return maker(body, (variable, low, high)).doit()


def _agree(gold, answer) -> bool | None:
    """Whether the two agree at random real points, positive and negative. None when they cannot be evaluated."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    generator = random.Random(11)
    evaluated = 0
    for trial in range(6 if symbols else 1):
        sign = 1 if trial % 2 == 0 else -1
        # Exact in binary, so that no digits are lost.
        point = {s: sign * sympy.Rational(generator.randint(1009, 12011), 4096) for s in symbols}
        values = [side.evalf(DIGITS, subs=point, maxn=400) for side in (gold, answer)]
        if not all(value.is_number and value.is_finite for value in values):
            continue
        scale = max(abs(values[0]), abs(values[1]))
        if scale < sympy.Float(10) ** -AGREEMENT:
            # Zero, as far as floating point can tell: that is for simplify.
            return None
        if abs(values[0] - values[1]) > scale * sympy.Float(10) ** -AGREEMENT:
            return False
        evaluated += 1
    return True if evaluated >= (2 if symbols else 1) else None


def trees_equal(gold_tree: list, answer_tree: list) -> str:
    """Compares two expression trees of `reward_fns.latex`. Returns "equal" or "different"."""
    if _equal(_build(gold_tree), _build(answer_tree)):
        return "equal"
    if _has_bare_log(gold_tree) or _has_bare_log(answer_tree):
        # `\\log` is base 10 in school and natural elsewhere: one reading for both sides.
        common = [_with_base_ten(tree) for tree in (gold_tree, answer_tree)]
        return "equal" if _equal(*map(_build, common)) else "different"
    return "different"


def _has_bare_log(tree) -> bool:
    if not isinstance(tree, list):
        return False
    return (tree[:2] == ["fn", "log"] and len(tree) == 3) or any(map(_has_bare_log, tree))


def _with_base_ten(tree):
    if not isinstance(tree, list):
        return tree
    tree = [_with_base_ten(part) for part in tree]
    return [*tree, ["n", "10"]] if tree[:2] == ["fn", "log"] and len(tree) == 3 else tree


def _equal(gold, answer) -> bool:
    if gold.has(sympy.nan, sympy.zoo) or answer.has(sympy.nan, sympy.zoo):
        return False
    if gold == answer:
        return True
    agree = _agree(gold, answer)
    if agree is None:
        agree = bool(sympy.simplify(gold - answer).is_zero)
    return agree


# --- LaTeX -----------------------------------------------------------------------------------------------------------


def _read(text: str) -> list:
    """The readings of one bare LaTeX answer; an empty list when there is none."""
    found = parse(f"${text}$", [_LATEX], fallback_mode="no_fallback", parsing_timeout=None)
    if not found:
        found = parse(text, [ExprExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return [value for value in found if not _is_undefined(value)]


def _is_undefined(value) -> bool:
    return isinstance(value, sympy.Basic) and value.has(sympy.nan, sympy.zoo)


def symbolic_equal(gold: str, answer: str) -> str:
    """Compares two answers in LaTeX by math-verify.

    Returns "equal", "different", "gold unparseable" or "answer unparseable".
    """
    gold_values = _read(gold)
    if not gold_values:
        return "gold unparseable"
    answer_values = _read(answer)
    if not answer_values:
        return "answer unparseable"
    same = verify(
        gold_values, answer_values, float_rounding=8, strict=True, allow_set_relation_comp=True, timeout_seconds=None
    )
    if same and not any(_confirmed(g, a) for g in gold_values for a in answer_values):
        same = False
    same = same or any(_same_solutions(g, a) for g in gold_values for a in answer_values)
    return "equal" if same else "different"


def _confirmed(gold, answer) -> bool:
    """A second look at an equality of plain expressions.

    math-verify rounds a difference to 15 digits and cuts small parts off, which makes limits, products and sums that
    cannot be evaluated equal to each other.
    """
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return True
    if gold == answer:
        return True
    values = (gold.doit(), answer.doit())
    if any(value.has(sympy.Float) for value in values):
        return True
    agree = _agree(*values)
    return bool(sympy.simplify(values[0] - values[1]).is_zero) if agree is None else agree


def _same_solutions(gold, answer) -> bool:
    """Inequalities in one real variable that have the same solutions, such as x² < 4 and -2 < x < 2."""
    if not (is_relation(gold) and is_relation(answer)) or is_equation(gold) or is_equation(answer):
        return False
    if len(gold.free_symbols) != 1 or {str(s) for s in gold.free_symbols} != {str(s) for s in answer.free_symbols}:
        return False
    try:
        return gold.as_set() == answer.as_set()
    except (NotImplementedError, TypeError, ValueError):
        return False
