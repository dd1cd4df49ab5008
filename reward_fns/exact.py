"""Exact arithmetic on small expressions, without sympy and with bounded cost.

An expression tree (see `latex`) is brought to a normal form `(numerator, denominator)`. Both are polynomials
`{monomial: Fraction}`; a monomial is a sorted tuple of `(atom, exponent)`. Atoms:

- `("p", 2)`: a prime under a root, exponent in (0, 1). Products of distinct such roots are linearly independent over
  the rationals (Besicovitch 1940), so that radicals have a normal form.
- `("v", "x")`: a variable, any rational exponent.
- `("c", "pi")`, `("c", "e")`, `("c", "i")`: constants, taken as independent of each other.
- `("f", name, argument, ...)`: anything else, known only by its own normal form. It is *opaque*: two expressions with
  opaque atoms can be equal and look different.

`numeric` evaluates the same tree in floating point with a running error bound, so that `provably_different` never
says so because of rounding.
"""

import cmath
import functools
import math
import threading
from fractions import Fraction
from functools import lru_cache

__all__ = [
    "ONE_POLY",
    "Refused",
    "Unsupported",
    "const_value",
    "equal",
    "normal_form",
    "numeric",
    "provably_different",
    "provably_varies",
    "substituted",
]

MAX_BITS = 40_000
MAX_TERMS = 400
MAX_WORK = 10_000
MAX_EXPONENT = 12_000
MAX_POLYNOMIAL_EXPONENT = 24
MAX_FACTORIAL = 3000
MAX_UNROLLED = 100


class Unsupported(Exception):
    """The expression is outside of what this module can treat."""


class Refused(Exception):
    """The expression is too large to be computed by anybody."""


Monomial = tuple
Poly = dict
ONE_POLY: Poly = {(): Fraction(1)}


_work = threading.local()


def _checked(value: Fraction) -> Fraction:
    """Charges one operation on a number of that size, and raises when the size or the work is over its limit."""
    bits = value.numerator.bit_length() + value.denominator.bit_length()
    if bits > MAX_BITS:
        raise Refused("number too large")
    _work.left -= 1 + (bits // 500) ** 2
    if _work.left < 0:
        raise Unsupported("too much work")
    return value


def _with_work(function):
    """Gives each outermost call its own work limit."""

    @functools.wraps(function)
    def limited(*args):
        outer = getattr(_work, "left", None)
        if outer is None:
            _work.left = MAX_WORK
        try:
            return function(*args)
        finally:
            if outer is None:
                _work.left = None

    return limited


def _add(a: Poly, b: Poly, sign: int = 1) -> Poly:
    out = dict(a)
    for monomial, coefficient in b.items():
        total = out.get(monomial, 0) + sign * coefficient
        if total:
            out[monomial] = _checked(total)
        else:
            out.pop(monomial, None)
    if len(out) > MAX_TERMS:
        raise Unsupported("too many terms")
    return out


def _mul(a: Poly, b: Poly) -> Poly:
    if len(a) * len(b) > 8 * MAX_TERMS:
        raise Unsupported("too many terms")
    out: Poly = {}
    for m1, c1 in a.items():
        for m2, c2 in b.items():
            monomial, factor = _mul_monomials(m1, m2)
            total = out.get(monomial, 0) + _checked(c1 * c2) * factor
            if total:
                out[monomial] = _checked(total)
            else:
                out.pop(monomial, None)
    if len(out) > MAX_TERMS:
        raise Unsupported("too many terms")
    return out


def _mul_monomials(a: Monomial, b: Monomial) -> tuple[Monomial, Fraction | int]:
    if not a:
        return b, 1
    if not b:
        return a, 1
    exponents = dict(a)
    factor: Fraction | int = 1
    for atom, exponent in b:
        exponents[atom] = exponents.get(atom, 0) + exponent
    for atom in list(exponents):
        exponent = exponents[atom]
        if atom[0] == "p":
            whole = math.floor(exponent)
            if whole:
                factor *= Fraction(atom[1]) ** whole
                exponent -= whole
        elif atom == ("c", "i"):
            if exponent.denominator != 1:
                raise Unsupported("fractional power of i")
            turns = int(exponent) % 4
            if turns >= 2:
                factor = -factor
            exponent = turns % 2
        elif abs(exponent) > MAX_EXPONENT:
            raise Unsupported("exponent too large")
        if exponent:
            exponents[atom] = exponent
        else:
            del exponents[atom]
    return tuple(sorted(exponents.items(), key=_sort_key)), factor


def _sort_key(item):
    return repr(item[0])


def _pow_poly(a: Poly, n: int) -> Poly:
    out, base = ONE_POLY, a
    while n:
        if n & 1:
            out = _mul(out, base)
        n >>= 1
        if n:
            base = _mul(base, base)
    return out


Form = tuple  # (numerator Poly, denominator Poly)


def _constant(value) -> Form:
    return ({(): Fraction(value)} if value else {}, ONE_POLY)


def _atom(atom: tuple, exponent=1) -> Form:
    return {((atom, Fraction(exponent)),): Fraction(1)}, ONE_POLY


def _form_add(a: Form, b: Form, sign: int = 1) -> Form:
    if a[1] == b[1]:
        return _add(a[0], b[0], sign), a[1]
    return _add(_mul(a[0], b[1]), _mul(b[0], a[1]), sign), _mul(a[1], b[1])


def _form_mul(a: Form, b: Form) -> Form:
    return _tidy((_mul(a[0], b[0]), _mul(a[1], b[1])))


def _form_inverse(a: Form) -> Form:
    if not a[0]:
        raise ZeroDivisionError
    return _tidy((a[1], a[0]))


def _tidy(a: Form) -> Form:
    """Moves a denominator of one term into the numerator."""
    numerator, denominator = a
    if len(denominator) == 1:
        ((monomial, coefficient),) = denominator.items()
        if monomial or coefficient != 1:
            inverse, factor = _invert_monomial(monomial)
            numerator = _mul(numerator, {inverse: factor / coefficient})
            denominator = ONE_POLY
    return numerator, denominator


def _invert_monomial(monomial: Monomial) -> tuple[Monomial, Fraction]:
    out: Monomial = ()
    factor = Fraction(1)
    for atom, exponent in monomial:
        if atom[0] == "p":
            piece, scale = ((atom, 1 - exponent),), Fraction(1, atom[1])
        elif atom == ("c", "i"):
            piece, scale = ((atom, Fraction(1)),), Fraction(-1)
        else:
            piece, scale = ((atom, -exponent),), Fraction(1)
        out, more = _mul_monomials(out, piece)
        factor *= scale * more
    return out, factor


def _rational(a: Form) -> Fraction | None:
    """The value of a form that is a rational number, else None."""
    numerator, denominator = a
    if not numerator:
        return Fraction(0)
    if denominator == ONE_POLY and len(numerator) == 1 and () in numerator:
        return numerator[()]
    return None


def _integer(a: Form, what: str) -> int:
    value = _rational(a)
    if value is None or value.denominator != 1:
        raise Unsupported(f"{what} of a non-integer")
    return value.numerator


def _freeze(a: Form) -> tuple:
    return tuple(
        tuple(sorted(((m, c) for m, c in poly.items()), key=lambda item: (repr(item[0]), item[1]))) for poly in a
    )


def _opaque(name: str, *forms: Form) -> Form:
    return _atom(("f", name, *(_freeze(form) for form in forms)))


@lru_cache(maxsize=4096)
def _factor(n: int) -> tuple[tuple[int, int], ...] | None:
    """Prime factors of n, or None when that takes too long."""
    if n.bit_length() > 200:
        return None
    factors = []
    d = 2
    while d * d <= n and d < 5000:
        count = 0
        while n % d == 0:
            n //= d
            count += 1
        if count:
            factors.append((d, count))
        d += 1 if d == 2 else 2
    if n > 1:
        if n >= 5000 * 5000:
            root = math.isqrt(n)
            if root * root != n or root >= 5000 * 5000:
                return None
            factors.append((root, 2))
        else:
            factors.append((n, 1))
    return tuple(factors)


def _root(a: Form, k: int) -> Form:
    """The k-th root: real where there is one, i·√ for the square root of a negative number."""
    if not 2 <= k <= 100:
        raise Unsupported("root of that order")
    numerator, denominator = a
    if not numerator:
        return a
    if denominator != ONE_POLY or len(numerator) != 1:
        return _opaque("root", _constant(k), a)
    ((monomial, coefficient),) = numerator.items()
    out: Monomial = ()
    scale = Fraction(1)
    if coefficient < 0:
        if k % 2:
            scale = -scale
        elif k == 2:
            out = ((("c", "i"), Fraction(1)),)
        else:
            raise Unsupported("even root of a negative number")
        coefficient = -coefficient
    top, bottom = _factor(coefficient.numerator), _factor(coefficient.denominator)
    if top is None or bottom is None:
        return _opaque("root", _constant(k), a)
    for prime, count, sign in [(p, n, 1) for p, n in top] + [(p, n, -1) for p, n in bottom]:
        exponent = Fraction(sign * count, k)
        whole = math.floor(exponent)
        scale = _checked(scale * Fraction(prime) ** whole)
        if exponent != whole:
            out, factor = _mul_monomials(out, ((("p", prime), exponent - whole),))
            scale *= factor
    for atom, exponent in monomial:
        if atom == ("c", "i"):
            raise Unsupported("root of an imaginary number")
        new = exponent / k
        if atom[0] == "v" and k % 2 == 0 and new.denominator == 1 and new % 2:
            raise Unsupported("root of a square of a variable: its sign matters")
        if atom[0] == "f":
            return _opaque("root", _constant(k), a)
        if atom[0] == "p" and new.denominator > 100:
            raise Unsupported("root of a high order")
        out, factor = _mul_monomials(out, ((atom, new),))
        scale *= factor
    return {out: scale}, ONE_POLY


def _power(a: Form, b: Form) -> Form:
    exponent = _rational(b)
    if exponent is None:
        if a == _atom(("c", "e")):
            return _opaque("exp", b)
        return _opaque("pow", a, b)
    if exponent.denominator != 1:
        if exponent.denominator > 100 or abs(exponent.numerator) > 1000:
            raise Unsupported("power with that fraction")
        value = _rational(a)
        if value is not None and value < 0:
            raise Unsupported("fractional power of a negative number")
        return _power(_root(a, exponent.denominator), _constant(exponent.numerator))
    n = exponent.numerator
    if n == 0:
        if not a[0]:
            raise Unsupported("0^0")
        return _constant(1)
    if n < 0:
        return _power(_form_inverse(a), _constant(-n))
    if len(a[0]) == 1 and a[1] == ONE_POLY:
        ((_, coefficient),) = a[0].items()
        if abs(coefficient) != 1:
            bits = max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length())
            if n * bits > MAX_BITS:
                raise Refused("power too large")
        if n > MAX_EXPONENT:
            raise Unsupported("exponent too large")
    elif n > MAX_POLYNOMIAL_EXPONENT:
        raise Unsupported("exponent too large")
    return _tidy((_pow_poly(a[0], n), _pow_poly(a[1], n)))


def _comb(n: int, k: int) -> int:
    if not 0 <= n <= MAX_FACTORIAL:
        raise Refused("binomial too large")
    return math.comb(n, k) if k >= 0 else 0


@_with_work
def normal_form(tree: tuple) -> Form:
    """Brings an expression tree to its normal form.

    Raises:
        Unsupported: The tree has something that is not treated here.
        Refused: A number in it is too large.
        ZeroDivisionError: It divides by zero.
    """
    return _normal_form(tree)


def _normal_form(tree: tuple) -> Form:
    kind = tree[0]
    if kind == "n":
        return _constant(tree[1])
    if kind == "v":
        return _atom(("v", tree[1]))
    if kind == "c":
        return _atom(("c", tree[1]))
    if kind == "+":
        out = _normal_form(tree[1])
        for part in tree[2:]:
            out = _form_add(out, _normal_form(part))
        return out
    if kind == "-":
        return _form_mul(_constant(-1), _normal_form(tree[1]))
    if kind == "*":
        out = _normal_form(tree[1])
        for part in tree[2:]:
            out = _form_mul(out, _normal_form(part))
        return out
    if kind == "/":
        return _form_mul(_normal_form(tree[1]), _form_inverse(_normal_form(tree[2])))
    if kind == "^":
        return _power(_normal_form(tree[1]), _normal_form(tree[2]))
    if kind == "root":
        return _root(_normal_form(tree[2]), tree[1])
    if kind == "!":
        n = _integer(_normal_form(tree[1]), "factorial")
        if n > MAX_FACTORIAL:
            raise Refused("factorial too large")
        if n < 0:
            raise Unsupported("factorial of a negative number")
        return _constant(math.factorial(n))
    if kind == "binom":
        return _constant(_comb(*(_integer(_normal_form(part), "binomial") for part in tree[1:])))
    if kind == "abs":
        inner = _normal_form(tree[1])
        value = _rational(inner)
        return _constant(abs(value)) if value is not None else _opaque("abs", inner)
    if kind in ("floor", "ceil"):
        inner = _normal_form(tree[1])
        value = _rational(inner)
        if value is None:
            return _opaque(kind, inner)
        return _constant(math.floor(value) if kind == "floor" else math.ceil(value))
    if kind in ("gcd", "lcm", "max", "min"):
        if kind in ("gcd", "lcm"):
            values = [_integer(_normal_form(part), kind) for part in tree[1:]]
            return _constant((math.gcd if kind == "gcd" else math.lcm)(*values))
        values = [_rational(_normal_form(part)) for part in tree[1:]]
        if None in values:
            raise Unsupported(kind)
        return _constant((max if kind == "max" else min)(values))
    if kind == "mod":
        a, b = (_integer(_normal_form(part), "mod") for part in tree[1:])
        if b <= 0:
            raise Unsupported("mod of that number")
        return _constant(a % b)
    if kind == "fn":
        unrolled = _unrolled(tree)
        if unrolled is not None:
            return _normal_form(unrolled)
        return _opaque(tree[1], *(_normal_form(part) for part in tree[2:]))
    raise Unsupported(kind)


def _unrolled(tree: tuple) -> tuple | None:
    """A sum or product with few terms, written out."""
    if tree[1] not in ("sum", "prod") or len(tree) != 6:
        return None
    _, name, index, low, high, body = tree
    if low[0] != "n" or high[0] != "n" or low[1].denominator != 1 or high[1].denominator != 1:
        return None
    count = int(high[1] - low[1]) + 1
    if not 1 <= count <= MAX_UNROLLED:
        return None
    terms = [substituted(body, index, ("n", low[1] + k)) for k in range(count)]
    return terms[0] if count == 1 else ("+" if name == "sum" else "*", *terms)


def substituted(tree, old: tuple, new: tuple):
    """The tree with every part that is `old` replaced by `new`."""
    if tree == old:
        return new
    return tuple(substituted(part, old, new) for part in tree) if isinstance(tree, tuple) else tree


def _has_opaque(a: Form) -> bool:
    return any(atom[0] == "f" for poly in a for monomial in poly for atom, _ in monomial)


@_with_work
def equal(a: Form, b: Form) -> bool | None:
    """True or False when the normal forms decide, None when opaque atoms leave it open."""
    try:
        same = a[0] == b[0] if a[1] == b[1] else _mul(a[0], b[1]) == _mul(b[0], a[1])
    except (Unsupported, Refused):
        return None
    if same:
        return True
    return None if _has_opaque(a) or _has_opaque(b) else False


def const_value(a: Form) -> Fraction | None:
    """The value of a rational constant, else None."""
    return _rational(a)


# Numbers with error bounds. A value is (complex or float, bound of the absolute error).
_EPS = 2.0**-51
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln"}


def numeric(tree: tuple, point: dict) -> tuple[complex, float]:
    """Evaluates at `point` (variable -> positive float, filled on demand). Returns the value and its error bound."""
    value, bound = _numeric(tree, point)
    if cmath.isnan(value) or cmath.isinf(value) or math.isnan(bound) or math.isinf(bound):
        raise Unsupported("not finite")
    return value, bound


def _numeric(tree: tuple, point: dict) -> tuple[complex, float]:
    kind = tree[0]
    if kind == "n":
        try:
            value = float(tree[1])
        except OverflowError:
            raise Unsupported("overflow") from None
        if value == 0 and tree[1]:
            raise Unsupported("underflow")
        return value, abs(value) * _EPS
    if kind == "v":
        return _variable(tree[1], point), 0.0
    if kind == "c":
        return {"pi": math.pi, "e": math.e, "i": 1j}[tree[1]], 4 * _EPS
    if kind == "+":
        value, bound = 0.0, 0.0
        for part in tree[1:]:
            v, b = _numeric(part, point)
            value += v
            bound += b + abs(value) * _EPS
        return value, bound
    if kind == "-":
        value, bound = _numeric(tree[1], point)
        return -value, bound
    if kind == "*":
        value, bound = 1.0, 0.0
        for part in tree[1:]:
            v, b = _numeric(part, point)
            bound = abs(value) * b + abs(v) * bound + bound * b
            value *= v
            bound += abs(value) * _EPS
        _underflow(value)
        return value, bound
    if kind == "/":
        (a, ea), (b, eb) = _numeric(tree[1], point), _numeric(tree[2], point)
        if abs(b) <= 2 * eb:
            raise Unsupported("division by about zero")
        value = a / b
        return value, (ea + abs(value) * eb) / (abs(b) - eb) + abs(value) * _EPS
    if kind == "^":
        return _numeric_power(*_numeric(tree[1], point), *_numeric(tree[2], point))
    if kind == "root":
        value, bound = _numeric(tree[2], point)
        if isinstance(value, complex) or (value < 0 and tree[1] % 2 == 0):
            if tree[1] != 2:
                raise Unsupported("complex root")
            root = cmath.sqrt(value)
        else:
            root = math.copysign(abs(value) ** (1 / tree[1]), value)
        if abs(value) <= 2 * bound:
            raise Unsupported("root of about zero")
        return root, abs(root) * (2 * bound / abs(value) + 8 * _EPS)
    if kind == "abs":
        value, bound = _numeric(tree[1], point)
        return abs(value), bound
    if kind == "fn" and len(tree) == 3 and tree[1] in _FUNCTIONS:
        return _numeric_function(tree[1], *_numeric(tree[2], point))
    if kind == "fn" and tree[1] in ("sum", "prod"):
        unrolled = _unrolled(tree)
        if unrolled is None:
            raise Unsupported(tree[1])
        return _numeric(unrolled, point)
    if kind == "fn" and tree[1] == "log":
        value, bound = _numeric_function("ln", *_numeric(tree[2], point))
        if len(tree) == 3:
            raise Unsupported("logarithm without a base")
        base, base_bound = _numeric_function("ln", *_numeric(tree[3], point))
        if abs(base) <= 2 * base_bound:
            raise Unsupported("base 1")
        ratio = value / base
        return ratio, (bound + abs(ratio) * base_bound) / (abs(base) - base_bound) + abs(ratio) * _EPS
    if kind in ("!", "binom", "gcd", "lcm", "floor", "ceil", "max", "min", "mod"):
        exact = const_value(normal_form(tree))
        if exact is None:
            raise Unsupported(kind)
        return _numeric(("n", exact), point)
    raise Unsupported(kind)


def _underflow(value) -> None:
    if value and abs(value) < 1e-280:
        raise Unsupported("underflow")


def _variable(name: str, point: dict) -> float:
    if name not in point:
        point[name] = point["?"]()
    return point[name]


def _numeric_power(a, ea: float, b, eb: float):
    if isinstance(a, complex) or isinstance(b, complex):
        if eb or not isinstance(b, float) or b != int(b) or abs(b) > 100:
            if abs(a) <= 2 * ea:
                raise Unsupported("power of about zero")
            log = cmath.log(a)
            value = cmath.exp(b * log)
            return value, abs(value) * (abs(b) * 2 * ea / abs(a) + abs(log) * eb + abs(b * log) * 4 * _EPS + 8 * _EPS)
        value = a ** int(b)
        return value, abs(b) * 2 * ea * max(abs(a), 1e-300) ** (b - 1) + abs(value) * abs(b) * 4 * _EPS
    if a == 0 or abs(a) <= 2 * ea:
        raise Unsupported("power of about zero")
    if a < 0 and (b != round(b)):
        raise Unsupported("fractional power of a negative number")
    value = a**b
    log = math.log(abs(a))
    if value == 0:
        raise Unsupported("underflow")
    _underflow(value)
    return value, abs(value) * (abs(b) * 2 * ea / abs(a) + abs(log) * eb + abs(b * log) * 4 * _EPS + 8 * _EPS)


def _numeric_function(name: str, x, bound: float):
    if isinstance(x, complex):
        raise Unsupported("complex argument")
    if abs(x) > 1e6:
        raise Unsupported("argument too large")
    if name == "ln":
        if x <= 2 * bound:
            raise Unsupported("logarithm of that")
        value = math.log(x)
        return value, 2 * bound / x + 8 * _EPS * max(1.0, abs(value))
    if name in ("tan", "cot", "sec", "csc"):
        sine, cosine = math.sin(x), math.cos(x)
        below = cosine if name in ("tan", "sec") else sine
        above = {"tan": sine, "cot": cosine, "sec": 1.0, "csc": 1.0}[name]
        if abs(below) < 1e-6:
            raise Unsupported("pole")
        value = above / below
        return value, (bound + 4 * _EPS) * (1 + value * value + abs(value)) * 2 / abs(below)
    if name in ("arcsin", "arccos"):
        if not -0.999 < x < 0.999:
            raise Unsupported("near the edge")
        value = math.asin(x) if name == "arcsin" else math.acos(x)
        return value, 30 * bound + 8 * _EPS
    function = {"sin": math.sin, "cos": math.cos, "arctan": math.atan, "sinh": math.sinh, "cosh": math.cosh}
    if name == "tanh":
        return math.tanh(x), bound + 4 * _EPS
    value = function[name](x)
    slope = math.cosh(x) if name in ("sinh", "cosh") else 1.0
    return value, 2 * slope * bound + 8 * _EPS * max(1.0, abs(value))


def provably_varies(tree: tuple, seed: int = 7) -> bool:
    """True when the tree has different values at two points, beyond rounding."""
    import random

    values = []
    for trial in range(4):
        generator = random.Random(seed + trial)
        try:
            values.append(numeric(tree, {"?": lambda g=generator: g.uniform(0.35, 1.9)}))
        except (Unsupported, Refused, OverflowError, ZeroDivisionError, ValueError):
            continue
    return any(abs(v - w) > 8 * (e + f) for v, e in values for w, f in values)


def provably_different(a: tuple, b: tuple, seed: int = 7) -> bool:
    """True when the two trees have different values at some point with positive variables, beyond rounding."""
    import random

    # Small points too: (x + 1)^2000 overflows elsewhere.
    for trial, (low, high) in enumerate(((0.35, 1.9), (0.35, 1.9), (0.05, 0.3), (0.001, 0.01))):
        generator = random.Random(seed + trial)
        point = {"?": lambda g=generator, low=low, high=high: g.uniform(low, high)}
        try:
            (va, ea), (vb, eb) = numeric(a, point), numeric(b, point)
        except (Unsupported, Refused, OverflowError, ZeroDivisionError, ValueError):
            continue
        if abs(va - vb) > 8 * (ea + eb):
            return True
    return False
