"""Compares two readings. True and False are certain; None means that only sympy can tell."""

import math
import re
from fractions import Fraction

from .answers import Answer, _number_word, _word_key, unit_scale
from .clean import TEXT_OPEN
from .exact import (
    ONE_POLY,
    Refused,
    Unsupported,
    const_value,
    equal,
    normal_form,
    numeric,
    provably_different,
    provably_varies,
)
from .latex import TRIG
from .policy import GradePolicy

__all__ = ["compare"]


def compare(gold: Answer, answer: Answer, policy: GradePolicy) -> bool | None:
    """Whether any reading of the answer equals any reading of the gold.

    Raises:
        Refused: A number in one of them is too large.
    """
    if gold.kind == answer.kind == "time":
        # Not as ratios: 2:30 is not 1:15.
        return _times(gold, answer, policy)
    verdict: bool | None = False
    for g in (gold, *gold.alternatives):
        for a in (answer, *answer.alternatives):
            same = _compare(g, a, policy)
            if same:
                return True
            if same is None:
                verdict = None
    return verdict


def _any(*verdicts: bool | None) -> bool | None:
    if True in verdicts:
        return True
    return None if None in verdicts else False


def _compare(gold: Answer, answer: Answer, policy: GradePolicy) -> bool | None:
    if "false" in (gold.kind, answer.kind):
        return gold.kind == answer.kind and gold.key == answer.key
    if gold.kind == answer.kind and gold.key and gold.key == answer.key and gold.kind != "number":
        return True
    if answer.kind == "relation" and gold.kind != "relation":
        return _unwrap_relation(gold, answer, policy)
    if gold.kind == "relation" and answer.kind != "relation":
        return _gold_relation(gold, answer, policy)
    if gold.kind == "relation":
        return _relations(gold, answer, policy)
    handler = _HANDLERS.get((gold.kind, answer.kind))
    if handler is not None:
        return handler(gold, answer, policy)
    if gold.kind in _SEQUENCES and answer.kind in _SEQUENCES:
        return _sequences(gold, answer, policy)
    if gold.kind in _SETS and answer.kind in _SETS:
        return _as_sets(gold, answer, policy)
    # One item and a list of that one item.
    if gold.kind in ("list", "set") and answer.kind == "number":
        return _singleton(gold, answer, policy, gold_is_list=True)
    if answer.kind in ("list", "set") and gold.kind == "number":
        return _singleton(gold, answer, policy, gold_is_list=False)
    if "matrix" in (gold.kind, answer.kind) and "number" in (gold.kind, answer.kind):
        number = gold if gold.kind == "number" else answer
        return None if "\\begin" in number.text and len(number.text) < 400 else False
    return False


_SEQUENCES = ("list", "set", "tuple", "matrix")
_SETS = ("set", "tuple", "union", "setminus", "list", "relation")


def _singleton(gold: Answer, answer: Answer, policy: GradePolicy, gold_is_list: bool) -> bool | None:
    items = _flat(gold if gold_is_list else answer)
    if len({(item.kind, item.key) for item in items}) != len(items):
        # "7, 7" repeats itself; one value in two forms (7/2, 3.5) does not.
        return False
    many = _distinct(items, policy)
    if len(many) != 1:
        return False
    return compare(many[0], answer, policy) if gold_is_list else compare(gold, many[0], policy)


# --- numbers ---------------------------------------------------------------------------------------------------------


def _numbers(gold: Answer, answer: Answer, policy: GradePolicy) -> bool | None:
    scale = _unit_scale(gold, answer, policy)
    if scale is None:
        return False
    if gold.percent or answer.percent:
        return _percents(gold, answer, policy)
    return _values(gold, answer, policy, scale)


def _unit_scale(gold: Answer, answer: Answer, policy: GradePolicy) -> Fraction | None:
    """The factor that brings the answer to the gold's unit; None when the units do not go together."""
    if (gold.doubtful and not answer.unit) or (answer.doubtful and not gold.unit):
        return None
    if policy.units == "ignored" or gold.unit == answer.unit:
        return Fraction(1)
    if policy.units == "required" and gold.unit and not answer.unit:
        return None
    if not gold.unit or not answer.unit:
        return Fraction(1)
    if gold.unit.startswith("mod ") or answer.unit.startswith("mod "):
        return None
    of_gold, of_answer = unit_scale(gold.unit), unit_scale(answer.unit)
    if of_gold and of_answer:
        return of_answer[1] / of_gold[1] if of_gold[0] == of_answer[0] else None
    (gold_base, _, gold_power), (answer_base, _, answer_power) = gold.unit.partition("^"), answer.unit.partition("^")
    if gold_power != answer_power:
        return None
    # "10 units" and "10 cm"; "14 triangles" and "14 right triangles": things that are counted have many names.
    if of_gold or of_answer:
        known, loose = (gold.unit, answer_base) if of_gold else (answer.unit, gold_base)
        return Fraction(1) if loose == "unit" and unit_scale(known)[0].startswith("length") else None
    return Fraction(1)


def _percents(gold: Answer, answer: Answer, policy: GradePolicy) -> bool | None:
    if gold.unit or answer.unit:
        return False
    if gold.percent and answer.percent:
        return _values(gold, answer, policy, Fraction(1))
    # One is x % and the other a plain number: the same value, or the same number without the sign.
    if gold.percent:
        verdict = _values(gold, answer, policy, Fraction(100))
        return verdict if policy.percent == "value" else _any(verdict, _values(gold, answer, policy, Fraction(1)))
    verdict = _values(gold, answer, policy, Fraction(1, 100))
    if policy.percent == "value":
        return verdict
    value = const_value(gold.form) if gold.form else None
    if value is not None and abs(value) < 1:
        return verdict
    return _any(verdict, _values(gold, answer, policy, Fraction(1)))


def _values(gold: Answer, answer: Answer, policy: GradePolicy, scale: Fraction) -> bool | None:
    """Whether gold = scale · answer."""
    if scale == 1 and gold.key == answer.key and gold.key:
        return not answer.undefined
    gold_form = gold.form
    answer_form = answer.form
    if answer.undefined or gold.undefined:
        return False
    if answer_form is not None and scale != 1:
        answer_form = normal_form(("*", ("n", scale), answer.tree))
    if gold_form is not None and answer_form is not None:
        verdict = equal(gold_form, answer_form)
        if verdict is True:
            return True
        close = _approximations(gold, answer, gold_form, answer_form, policy)
        if close is not None:
            return close
        if verdict is False and _no_rounding(gold, answer, policy):
            return False
    if gold.tree is not None and answer.tree is not None:
        tree = answer.tree if scale == 1 else ("*", ("n", scale), answer.tree)
        if _variables(gold.tree) == _variables(tree) or not _free(gold.tree):
            if _rounds(gold, tree):
                return True
            if (
                policy.approximate == "always"
                and answer.decimals
                and _rounds_to(gold.tree, gold_form, answer, policy.digits)
            ):
                return True
        if gold_form is not None and answer_form is not None and verdict is False:
            return False
        if provably_different(gold.tree, tree):
            return False
        if _free(gold.tree) != _free(tree) and provably_varies(gold.tree if _free(gold.tree) else tree):
            return False
        return None if scale == 1 else False
    if scale != 1:
        return False
    if not _looks_mathematical(answer) or not _looks_mathematical(gold):
        return False
    return None


def _no_rounding(gold: Answer, answer: Answer, policy: GradePolicy) -> bool:
    """Whether neither side is a decimal that the other, exact one could round to."""
    return not gold.decimals and not (answer.decimals and policy.approximate == "always")


def _looks_mathematical(answer: Answer) -> bool:
    """Whether sympy could make anything of it."""
    text = answer.text
    if TEXT_OPEN in text or len(text) < 1 or not text.isascii():
        return False
    if "\\ldots" in text or "..." in text:
        return False
    plain = re.sub(r"\\[a-zA-Z]+|_\{[^{}]*\}", " ", text)
    names = [name for name in re.findall(r"[A-Za-z]{3,}", plain) if name not in TRIG]
    return len(names) <= 1 and not any(len(name) > 4 for name in names)


def _free(tree: tuple) -> bool:
    return bool(_variables(tree))


def _variables(tree) -> frozenset:
    if not isinstance(tree, tuple) or not tree:
        return frozenset()
    if tree[0] == "v":
        return frozenset([tree[1]])
    return frozenset().union(*(_variables(part) for part in tree[1:]))


def _approximations(gold: Answer, answer: Answer, gold_form, answer_form, policy: GradePolicy) -> bool | None:
    """Verdict where one side is a decimal and the other is not, or None when this says nothing."""
    exact_gold, exact_answer = const_value(gold_form), const_value(answer_form)
    if answer.decimals and exact_answer is not None and exact_gold is not None and not gold.decimals:
        if _finite_decimal(exact_gold):
            return _float_noise(exact_gold, exact_answer, answer)
        if policy.approximate == "never":
            return None
        # Rounded or cut off after enough digits.
        close = abs(exact_gold - exact_answer) < Fraction(1, 10**answer.decimals)
        return True if close and answer.significant >= policy.digits else None
    if gold.decimals and answer.decimals and exact_gold is not None and exact_answer is not None:
        if answer.significant >= 15 or gold.significant >= 15:
            return _float_noise(exact_gold, exact_answer, answer if answer.significant >= 15 else gold)
        return None
    if gold.decimals and answer.decimals is None and None not in (exact_answer, exact_gold) and gold.significant >= 4:
        return True if abs(exact_gold - exact_answer) * 2 <= Fraction(1, 10**gold.decimals) else None
    return None


def _finite_decimal(value: Fraction) -> bool:
    denominator = value.denominator
    for p in (2, 5):
        while denominator % p == 0:
            denominator //= p
    return denominator == 1


def _float_noise(a: Fraction, b: Fraction, printed: Answer) -> bool | None:
    """0.30000000000000004 for 0.3: a double that was printed in full."""
    if printed.significant < 15:
        return None
    return True if abs(a - b) <= abs(a) * Fraction(1, 10**14) else None


def _rounds(gold: Answer, tree: tuple) -> bool:
    """An exact answer for a gold that is a decimal with at least four significant digits: it must round to it."""
    if not gold.decimals or gold.significant < 4:
        return False
    try:
        value, bound = numeric(tree, {"?": _no_variables})
    except (Unsupported, Refused, OverflowError, ZeroDivisionError, ValueError):
        return False
    if isinstance(value, complex):
        return False
    half = 0.5 * 10.0**-gold.decimals
    target = float(gold.text)
    return abs(value - target) <= half * (1 + 1e-9) + 4 * abs(target) * 2.0**-52 and bound < half + abs(target) * 1e-12


def _rounds_to(gold_tree: tuple, gold_form: tuple | None, answer: Answer, digits: int) -> bool:
    """A decimal answer for an exact gold, right in all its digits (rounded or cut off)."""
    exact = const_value(gold_form) if gold_form else None
    if answer.significant < digits or (exact is not None and _finite_decimal(exact)):
        return False
    try:
        value, bound = numeric(gold_tree, {"?": _no_variables})
    except (Unsupported, Refused, OverflowError, ZeroDivisionError, ValueError):
        return False
    if isinstance(value, complex):
        return False
    return abs(value - float(answer.text)) < 10.0**-answer.decimals + bound


def _no_variables() -> float:
    raise Unsupported("variable")


# --- words and the like ----------------------------------------------------------------------------------------------


def _words(gold: Answer, answer: Answer, policy: GradePolicy) -> bool:
    if not gold.value[0]:
        return False
    return gold.value[0] == answer.value[0] or sorted(_tokens(gold)) == sorted(_tokens(answer)) != []


def _tokens(answer: Answer) -> list[str]:
    """Words of a name with several parts, so that word order does not count: none for fewer than two."""
    words = re.findall(r"[a-z0-9]+", answer.text.lower())
    return [w for w in words if w not in ("the", "a", "an")] if "," in answer.text and len(words) > 1 else []


def _number_and_word(number: Answer, word: Answer) -> bool | None:
    key = _word_key(number.text)
    if key and key == word.value[0]:
        return True
    value = _number_word(word.text)
    return str(value) == number.text if value is not None else False


def _choice_and_number(choice: Answer, number: Answer) -> bool:
    return number.text.strip() == choice.value[0]


def _choice_and_word(choice: Answer, word: Answer) -> bool:
    return word.value[0] == choice.value[0].lower() or bool(re.match(rf"\(?{choice.value[0]}[).:]\s", word.text))


def _dates(gold: Answer, answer: Answer, policy: GradePolicy) -> bool:
    same = gold.value[:2] == answer.value[:2]
    return same and (gold.value[2] == answer.value[2] or None in (gold.value[2], answer.value[2]))


def _times(gold: Answer, answer: Answer, policy: GradePolicy) -> bool:
    (h1, m1, s1, half1), (h2, m2, s2, half2) = gold.value, answer.value
    if (m1, s1) != (m2, s2):
        return False
    if half1 and half2:
        return (h1 % 12, half1) == (h2 % 12, half2)
    if half1 or half2:
        hour, half, other = (h1, half1, h2) if half1 else (h2, half2, h1)
        return other == hour or (half == "pm" and other == hour % 12 + 12)
    return h1 == h2


def _ratios(gold: Answer, answer: Answer, policy: GradePolicy) -> bool | None:
    if len(gold.items) != len(answer.items):
        return False
    if any(item.form is not None and not item.form[0] for item in (*gold.items, *answer.items)):
        return _ordered(list(gold.items), list(answer.items), policy)
    first_gold, first_answer = gold.items[0], answer.items[0]
    verdicts = []
    for g, a in zip(gold.items[1:], answer.items[1:], strict=True):
        if None in (g.form, a.form, first_gold.form, first_answer.form):
            verdicts.append(True if gold.key == answer.key else None)
            continue
        left = normal_form(("*", first_gold.tree, a.tree))
        right = normal_form(("*", first_answer.tree, g.tree))
        verdicts.append(equal(left, right))
    return _all(verdicts)


def _ratio_and_number(ratio: Answer, number: Answer, policy: GradePolicy) -> bool | None:
    if len(ratio.items) != 2 or None in (ratio.items[0].form, ratio.items[1].form, number.form):
        return False
    try:
        form = normal_form(("/", ratio.items[0].tree, ratio.items[1].tree))
    except (ZeroDivisionError, Unsupported):
        return False
    return bool(equal(form, number.form)) and "/" in number.text.replace("\\frac", "/")


def _bases(gold: Answer, answer: Answer, policy: GradePolicy) -> bool:
    return gold.value == answer.value


def _base_and_number(base: Answer, number: Answer, policy: GradePolicy) -> bool:
    digits, value = base.value
    if number.unit or number.percent:
        return False
    written = re.sub(r"[\s,]", "", number.text).lstrip("0") or "0"
    if value == 10:
        return written == digits
    return policy.base == "optional" and written == digits


# --- sequences -------------------------------------------------------------------------------------------------------


def _all(verdicts: list) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _flat(answer: Answer) -> list[Answer]:
    """The items, with lists inside of lists (from ±) taken apart."""
    out = []
    for item in answer.items:
        out.extend(_flat(item) if item.kind == "list" else [item])
    return out


def _distinct(items: list[Answer], policy: GradePolicy) -> list[Answer]:
    """Without the items that repeat an earlier one's value."""
    out: list[Answer] = []
    for item in items:
        if not any(
            (item.kind == other.kind and item.key == other.key and item.unit == other.unit)
            or (item.kind == other.kind == "number" and compare(other, item, policy) is True)
            for other in out
        ):
            out.append(item)
    return out


def _ordered(gold: list[Answer], answer: list[Answer], policy: GradePolicy) -> bool | None:
    if len(gold) != len(answer):
        return False
    verdicts = []
    for g, a in zip(gold, answer, strict=True):
        verdicts.append(compare(g, a, policy))
        if verdicts[-1] is False:
            return False
    return _all(verdicts)


def _unordered(gold: list[Answer], answer: list[Answer], policy: GradePolicy) -> bool | None:
    """Equal as sets. Equality is transitive, so that the first match of an item is as good as any."""
    gold, answer = _distinct(gold, policy), _distinct(answer, policy)
    if len(gold) != len(answer):
        return False
    left = list(answer)
    unclear = False
    for g in gold:
        verdicts = [compare(g, a, policy) for a in left]
        if True in verdicts:
            del left[verdicts.index(True)]
        elif None in verdicts:
            unclear = True
        else:
            return False
    return None if unclear else True


def _matrix_rows(answer: Answer) -> list[list[Answer]]:
    return [list(row) for row in answer.items]


def _vector(answer: Answer) -> list[Answer] | None:
    """The entries of a matrix with one column."""
    rows = _matrix_rows(answer)
    return [row[0] for row in rows] if all(len(row) == 1 for row in rows) else None


def _matrices(gold: Answer, answer: Answer, policy: GradePolicy) -> bool | None:
    g, a = _matrix_rows(gold), _matrix_rows(answer)
    if len(g) != len(a) or len(g[0]) != len(a[0]):
        return False
    return _ordered([x for row in g for x in row], [x for row in a for x in row], policy)


def _sequences(gold: Answer, answer: Answer, policy: GradePolicy) -> bool | None:
    if "matrix" in (gold.kind, answer.kind):
        matrix, other = (gold, answer) if gold.kind == "matrix" else (answer, gold)
        entries = _vector(matrix)
        if policy.brackets == "strict" or entries is None or other.kind == "set":
            return False
        items = list(other.items)
        return _ordered(entries, items, policy) if matrix is gold else _ordered(items, entries, policy)
    if gold.kind == "tuple" and answer.kind == "tuple":
        if len(gold.items) == 2 and (gold.opener, gold.closer) != (answer.opener, answer.closer):
            return False
        if policy.brackets == "strict" and (gold.opener, gold.closer) != (answer.opener, answer.closer):
            return False
        return _ordered(list(gold.items), list(answer.items), policy)
    if "tuple" in (gold.kind, answer.kind):
        other = answer if gold.kind == "tuple" else gold
        bracketed = gold if gold.kind == "tuple" else answer
        if other.kind == "set" or policy.brackets == "strict":
            return False
        if (bracketed.opener, bracketed.closer) not in (("(", ")"), ("[", "]")):
            return False
        if gold.kind == "tuple" and gold.opener == "[" and len(gold.items) == 2:
            return False
        return _ordered(_flat(gold), _flat(answer), policy)
    if policy.brackets == "strict" and gold.kind != answer.kind:
        return False
    if policy.list_order == "same" and "set" not in (gold.kind, answer.kind):
        return _ordered(_flat(gold), _flat(answer), policy)
    return _unordered(_flat(gold), _flat(answer), policy)


# --- relations and sets of real numbers ------------------------------------------------------------------------------


def _is_equation(answer: Answer) -> bool:
    return all(op == "=" for op in answer.ops)


def _unwrap_relation(gold: Answer, answer: Answer, policy: GradePolicy) -> bool | None:
    """The answer is a relation and the gold is not."""
    if not _is_equation(answer):
        return _as_sets(gold, answer, policy)
    verdict = _sided(gold, answer.items[-1], policy)
    if verdict is not True and len(answer.items) == 2 and not answer.name:
        # `7 = x` says the same as `x = 7`.
        first = answer.items[0]
        last = answer.items[1]
        if last.kind == "number" and re.fullmatch(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?", last.text):
            return _any(verdict, compare(gold, first, policy))
    return verdict


def _sided(gold: Answer, side: Answer, policy: GradePolicy) -> bool | None:
    return compare(gold, side, policy)


def _gold_relation(gold: Answer, answer: Answer, policy: GradePolicy) -> bool | None:
    """The gold is a relation and the answer is not: its right side is meant when its left side is a name."""
    if not _is_equation(gold):
        return _as_sets(gold, answer, policy)
    if gold.name or gold.items[0].kind != "number" or len(gold.items) > 2:
        return compare(gold.items[-1], answer, policy)
    return False


def _relations(gold: Answer, answer: Answer, policy: GradePolicy) -> bool | None:
    if _is_equation(gold) and _is_equation(answer):
        if gold.name and answer.name:
            if policy.variables == "any" or _same_name(gold.name, answer.name):
                verdict = compare(gold.items[-1], answer.items[-1], policy)
                plain = gold.items[-1].kind == answer.items[-1].kind == "number"
                if verdict is True or not plain or len(gold.items) > 2 or len(answer.items) > 2:
                    return verdict
                return _any(verdict, _proportional(gold, answer))
            return False if not (_free_in(gold) > 1 and _free_in(answer) > 1) else _proportional(gold, answer)
        if gold.items[0].kind != "number" or answer.items[0].kind != "number":
            first = compare(gold.items[0], answer.items[0], policy)
            return _all([first, compare(gold.items[-1], answer.items[-1], policy)])
        if len(gold.items) == len(answer.items) == 2:
            return _proportional(gold, answer)
        return _ordered(list(gold.items), list(answer.items), policy)
    return _inequalities(gold, answer, policy)


def _same_name(a: str, b: str) -> bool:
    """x and x; but also y and f(x), which both name a function's value."""
    if a.lower() == b.lower() and (a == b or "(" in a or len(a) > 1):
        return True

    def function(name: str) -> bool:
        return name in ("y", "Y") or bool(re.fullmatch(r"[a-zA-Z]'*\([a-z]\)", name))

    return function(a) and function(b) and (a[0] == b[0] or "y" in (a.lower(), b.lower()) or a[0] == b[0])


def _free_in(relation: Answer) -> int:
    found: frozenset = frozenset()
    for item in relation.items:
        if item.tree is not None:
            found |= _variables(item.tree)
    return len(found)


def _difference(relation: Answer, i: int = 0) -> tuple | None:
    """left - right as a normal form."""
    left, right = relation.items[i], relation.items[i + 1]
    if left.tree is None or right.tree is None or left.percent or right.percent:
        return None
    try:
        return normal_form(("+", left.tree, ("-", right.tree)))
    except (Unsupported, ZeroDivisionError):
        return None


def _without_negative_powers(poly: dict) -> dict:
    """Multiplied by the powers of its variables that leave no common factor and no negative exponent."""
    lowest: dict = {}
    atoms = {atom for monomial in poly for atom, _ in monomial if atom[0] == "v"}
    for atom in atoms:
        lowest[atom] = min(dict(monomial).get(atom, 0) for monomial in poly)
    out = {}
    for monomial, coefficient in poly.items():
        exponents = {atom: e - lowest.get(atom, 0) for atom, e in monomial}
        for atom, low in lowest.items():
            if low and atom not in exponents:
                exponents[atom] = -low
        key = tuple(sorted(((a, e) for a, e in exponents.items() if e), key=lambda item: repr(item[0])))
        out[key] = coefficient
    return out


def _ratio_of(a: dict, b: dict) -> Fraction | None:
    """c with a = c · b, or None."""
    if not a or not b or len(a) != len(b) or a.keys() != b.keys():
        return None
    monomial = next(iter(a))
    ratio = a[monomial] / b[monomial]
    return ratio if all(a[m] == ratio * b[m] for m in a) else None


def _proportional(gold: Answer, answer: Answer) -> bool | None:
    """Equations that differ by a constant factor."""
    names = [_names(side) for side in (gold, answer)]
    if names[0] and names[1] and not names[0] & names[1]:
        return False
    g, a = _difference(gold), _difference(answer)
    if g is None or a is None:
        return None
    gold_poly, answer_poly = _without_negative_powers(g[0]), _without_negative_powers(a[0])
    if not gold_poly or not answer_poly:
        return not gold_poly and not answer_poly
    if _ratio_of(gold_poly, answer_poly) is not None:
        return True
    radical = any(atom[0] != "v" for poly in (gold_poly, answer_poly) for m in poly for atom, _ in m)
    return None if radical else False


_FLIP = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne", "=": "="}


def _inequalities(gold: Answer, answer: Answer, policy: GradePolicy) -> bool | None:
    if len(gold.ops) == len(answer.ops) == 1:
        if gold.ops[0] not in _FLIP or answer.ops[0] not in _FLIP:
            return None
        g, a = _difference(gold), _difference(answer)
        if g is not None and a is not None and g[1] == a[1]:
            ratio = _ratio_of(g[0], a[0])
            if ratio is not None:
                op = answer.ops[0] if ratio > 0 else _FLIP[answer.ops[0]]
                return op == gold.ops[0]
            gold_set, answer_set = _real_set(gold), _real_set(answer)
            if gold_set is None or answer_set is None:
                return None if gold.ops[0] != "=" and answer.ops[0] != "=" else False
        return _as_sets(gold, answer, policy)
    if len(gold.ops) == len(answer.ops):
        flipped = Answer(
            "relation", answer.text, items=answer.items[::-1], ops=tuple(_FLIP.get(op, op) for op in answer.ops[::-1])
        )
        for candidate in (answer, flipped):
            if candidate.ops == gold.ops:
                verdict = _ordered(list(gold.items), list(candidate.items), policy)
                if verdict is True:
                    return True
    return _as_sets(gold, answer, policy)


class _End:
    """An end of an interval: -inf, inf or a number with its exact form."""

    def __init__(self, value: float, form: tuple | None):
        self.value, self.form = value, form

    def same(self, other: "_End") -> bool | None:
        if self.form is None or other.form is None:
            return self.value == other.value and self.form is other.form is None
        verdict = equal(self.form, other.form)
        if verdict is None and abs(self.value - other.value) > 1e-6 * max(1.0, abs(self.value)):
            return False
        return verdict


_MINUS_INFINITY, _INFINITY_END = _End(float("-inf"), None), _End(float("inf"), None)
_INFINITY = re.compile(r"([+-]?)\s*(?:\\infty|infinity|inf|oo)")


def _end(answer: Answer) -> _End | None:
    if answer.kind != "number":
        return None
    match = _INFINITY.fullmatch(answer.text)
    if match:
        return _End(float("-inf") if match[1] == "-" else float("inf"), None)
    if answer.form is None:
        return None
    return _form_end(answer.form, answer.tree)


def _form_end(form: tuple, tree: tuple) -> _End | None:
    try:
        value, _ = numeric(tree, {"?": _no_variables})
    except (Unsupported, Refused, OverflowError, ZeroDivisionError, ValueError):
        return None
    return None if isinstance(value, complex) else _End(value, form)


Piece = tuple  # (low, low closed, high, high closed)


def _real_set(answer: Answer) -> list[Piece] | None:
    """The set of real numbers that the answer describes, as disjoint pieces in order; None when it is not clear."""
    pieces = _pieces(answer)
    return None if pieces is None else _merged(pieces)


def _pieces(answer: Answer) -> list[Piece] | None:
    if answer.kind == "tuple":
        if len(answer.items) != 2:
            return None
        low, high = _end(answer.items[0]), _end(answer.items[1])
        if low is None or high is None or not low.value <= high.value:
            return None
        return [(low, answer.opener == "[", high, answer.closer == "]")]
    if answer.kind in ("set", "list", "union"):
        out: list[Piece] = []
        for item in answer.items:
            if (
                answer.kind == "union"
                or item.kind in ("relation", "list")
                or (item.kind == "tuple" and answer.kind == "list")
            ):
                inner = _pieces(item)
                if inner is None:
                    return None
                out += inner
            else:
                end = _end(item)
                if end is None:
                    return None
                out.append((end, True, end, True))
        return out
    if answer.kind == "number":
        end = _end(answer)
        return None if end is None else [(end, True, end, True)]
    if answer.kind == "setminus" and len(answer.items) == 2:
        whole, taken = _pieces(answer.items[0]), _pieces(answer.items[1])
        if whole is None or taken is None or any(low is not high for low, _, high, _ in taken):
            return None
        for end, *_ in taken:
            whole = _cut(whole, end)
        return whole
    if answer.kind == "relation":
        return _relation_pieces(answer)
    return None


def _cut(pieces: list[Piece], point: _End) -> list[Piece]:
    out = []
    for low, low_closed, high, high_closed in pieces:
        if low.value < point.value < high.value:
            out += [(low, low_closed, point, False), (point, False, high, high_closed)]
        else:
            out.append((low, low_closed and low.value != point.value, high, high_closed and high.value != point.value))
    return out


def _relation_pieces(answer: Answer) -> list[Piece] | None:
    """Solves a < b or a < b < c for its only variable, which may stand there up to its square."""
    names = set()
    for item in answer.items:
        if item.kind != "number" or item.percent:
            return None
        if item.tree is None:
            if not _INFINITY.fullmatch(item.text):
                return None
        else:
            names |= _variables(item.tree)
    if len(names) != 1 or len(answer.items) > 3:
        return None
    (name,) = names
    result: list[Piece] | None = None
    for i, op in enumerate(answer.ops):
        pieces = _solve(answer.items[i].tree, op, answer.items[i + 1].tree, name)
        if pieces is None:
            return None
        result = pieces if result is None else _intersection(result, pieces)
    return result


def _solve(left: tuple | None, op: str, right: tuple | None, name: str) -> list[Piece] | None:
    """Solves left op right for `name`. None stands for an infinite side."""
    if left is None or right is None:
        # -∞ < x, or x < ∞.
        return [(_MINUS_INFINITY, False, _INFINITY_END, False)] if op in ("<", ">", "\\le", "\\ge") else None
    if right[0] == "abs" and left[0] != "abs":
        left, op, right = right, _FLIP.get(op, op), left
    if left[0] != "abs":
        return _solve_polynomial(left, op, right, name)
    if _variables(right):
        return None
    inner, minus = left[1], ("-", right)
    if op in ("<", "\\le"):
        parts = [_solve_polynomial(inner, op, right, name), _solve_polynomial(inner, _FLIP[op], minus, name)]
        return None if None in parts else _intersection(*parts)
    if op in (">", "\\ge", "="):
        parts = [_solve_polynomial(inner, op, right, name), _solve_polynomial(inner, _FLIP[op], minus, name)]
        return None if None in parts else parts[0] + parts[1]
    return None


def _solve_polynomial(left: tuple, op: str, right: tuple, name: str) -> list[Piece] | None:
    atom = ("v", name)
    try:
        numerator, denominator = normal_form(("+", left, ("-", right)))
    except (Unsupported, ZeroDivisionError):
        return None
    if len(denominator) != 1 or any(denominator):
        return None
    # coefficients[n] is the polynomial in front of the n-th power of the unknown.
    coefficients: list[dict] = [{}, {}, {}]
    for monomial, coefficient in numerator.items():
        exponents = dict(monomial)
        power = exponents.pop(atom, Fraction(0))
        if power not in (0, 1, 2):
            return None
        rest = tuple(item for item in monomial if item[0] != atom)
        coefficients[int(power)][rest] = coefficient
    constant, linear, square = coefficients
    if square:
        return _solve_quadratic(square, linear, constant, op)
    if set(linear) != {()}:
        return None
    slope = linear[()]
    end = _poly_end({m: -c / slope for m, c in constant.items()})
    if end is None:
        return None
    if slope < 0:
        op = _FLIP.get(op, op)
    return {
        "<": [(_MINUS_INFINITY, False, end, False)],
        "\\le": [(_MINUS_INFINITY, False, end, True)],
        ">": [(end, False, _INFINITY_END, False)],
        "\\ge": [(end, True, _INFINITY_END, False)],
        "=": [(end, True, end, True)],
        "\\ne": [(_MINUS_INFINITY, False, end, False), (end, False, _INFINITY_END, False)],
    }.get(op)


def _solve_quadratic(square: dict, linear: dict, constant: dict, op: str) -> list[Piece] | None:
    """a x² + b x + c op 0 for rational a, b, c."""
    if any(set(poly) - {()} for poly in (square, linear, constant)):
        return None
    a, b, c = (poly.get((), Fraction(0)) for poly in (square, linear, constant))
    if a < 0:
        a, b, c, op = -a, -b, -c, _FLIP.get(op, op)
    everything = [(_MINUS_INFINITY, False, _INFINITY_END, False)]
    discriminant = b * b - 4 * a * c
    if discriminant < 0:
        return everything if op in (">", "\\ge", "\\ne") else []
    roots = []
    for sign in (-1, 1):
        root = ("/", ("+", ("n", -b), ("*", ("n", Fraction(sign)), ("root", 2, ("n", discriminant)))), ("n", 2 * a))
        end = _form_end(normal_form(root), root) if discriminant else _poly_end({(): -b / (2 * a)} if b else {})
        if end is None:
            return None
        roots.append(end)
    low, high = roots
    closed = op in ("\\le", "\\ge")
    if op in ("<", "\\le"):
        return [(low, closed, high, closed)] if discriminant or closed else []
    if op in (">", "\\ge"):
        outside = [(_MINUS_INFINITY, False, low, closed), (high, closed, _INFINITY_END, False)]
        return everything if not discriminant and closed else outside
    if op == "=":
        return [(root, True, root, True) for root in roots[: 2 if discriminant else 1]]
    return _cut(_cut(everything, low), high) if discriminant else _cut(everything, low)


def _poly_end(poly: dict) -> _End | None:
    form = (poly, ONE_POLY)
    value = _form_value(form)
    return None if value is None else _End(value, form)


def _form_value(form: tuple) -> float | None:
    """A constant polynomial in radicals and π as a float."""
    total = 0.0
    for monomial, coefficient in form[0].items():
        try:
            value = float(coefficient)
        except OverflowError:
            return None
        for atom, exponent in monomial:
            if atom[0] == "p":
                value *= atom[1] ** float(exponent)
            elif atom in (("c", "pi"), ("c", "e")):
                value *= (math.pi if atom[1] == "pi" else math.e) ** float(exponent)
            else:
                return None
        total += value
    return total


def _intersection(a: list[Piece], b: list[Piece]) -> list[Piece]:
    out = []
    for low1, lc1, high1, hc1 in a:
        for low2, lc2, high2, hc2 in b:
            if low1.value == low2.value:
                low, low_closed = low1, lc1 and lc2
            else:
                low, low_closed = (low1, lc1) if low1.value > low2.value else (low2, lc2)
            if high1.value == high2.value:
                high, high_closed = high1, hc1 and hc2
            else:
                high, high_closed = (high1, hc1) if high1.value < high2.value else (high2, hc2)
            if low.value < high.value or (low.value == high.value and low_closed and high_closed):
                out.append((low, low_closed, high, high_closed))
    return out


def _merged(pieces: list[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p[0].value, not p[1], p[2].value)):
        if out:
            low, low_closed, high, high_closed = out[-1]
            touches = piece[0].value < high.value or (piece[0].value == high.value and (piece[1] or high_closed))
            if touches:
                if piece[2].value > high.value:
                    high, high_closed = piece[2], piece[3]
                elif piece[2].value == high.value:
                    high_closed = high_closed or piece[3]
                out[-1] = (low, low_closed, high, high_closed)
                continue
        out.append(piece)
    return out


def _as_sets(gold: Answer, answer: Answer, policy: GradePolicy) -> bool | None:
    relations = (gold.kind == "relation") + (answer.kind == "relation")
    if policy.intervals == "strict" and relations == 1:
        return False
    if relations == 2 and policy.variables == "named":
        names = [_names(side) for side in (gold, answer)]
        if names[0] and names[1] and names[0] != names[1] and len(names[0]) == len(names[1]) == 1:
            return False
    if relations == 1:
        plain = gold if answer.kind == "relation" else answer
        if plain.kind not in _SETS:
            return False
    if any(side.kind == "tuple" and _no_interval(side) for side in (gold, answer)):
        return False
    if relations == 0 and gold.kind != answer.kind:
        listed = [item for side in (gold, answer) if side.kind == "list" for item in side.items]
        if "tuple" in (gold.kind, answer.kind) and any(i.kind not in ("tuple", "relation", "union") for i in listed):
            return False
    g, a = _real_set(gold), _real_set(answer)
    if g is None or a is None:
        if relations == 0 and not _mathematical_set(gold, answer):
            return False
        return None
    if len(g) != len(a):
        return False
    verdicts = []
    for (l1, lc1, h1, hc1), (l2, lc2, h2, hc2) in zip(g, a, strict=True):
        if (lc1, hc1) != (lc2, hc2):
            return False
        verdicts += [l1.same(l2), h1.same(h2)]
    return _all(verdicts)


def _no_interval(answer: Answer) -> bool:
    """A tuple of three, or one whose ends are numbers in the wrong order."""
    if len(answer.items) != 2:
        return True
    low, high = _end(answer.items[0]), _end(answer.items[1])
    return low is not None and high is not None and low.value > high.value


def _names(relation: Answer) -> frozenset:
    return frozenset().union(
        *(_variables(item.tree) for item in relation.items if item.kind == "number" and item.tree)
    )


def _mathematical_set(gold: Answer, answer: Answer) -> bool:
    return "union" in (gold.kind, answer.kind) or "setminus" in (gold.kind, answer.kind)


_HANDLERS = {
    ("number", "number"): _numbers,
    ("word", "word"): _words,
    ("word", "number"): lambda g, a, p: _number_and_word(a, g),
    ("number", "word"): lambda g, a, p: _number_and_word(g, a),
    ("choice", "choice"): lambda g, a, p: g.value == a.value,
    ("choice", "number"): lambda g, a, p: _choice_and_number(g, a),
    ("number", "choice"): lambda g, a, p: _choice_and_number(a, g),
    ("choice", "word"): lambda g, a, p: _choice_and_word(g, a),
    ("word", "choice"): lambda g, a, p: _choice_and_word(a, g),
    ("date", "date"): _dates,
    ("time", "time"): _times,
    ("ratio", "ratio"): _ratios,
    ("ratio", "number"): _ratio_and_number,
    ("number", "ratio"): lambda g, a, p: _ratio_and_number(a, g, p),
    ("base", "base"): _bases,
    ("base", "number"): _base_and_number,
    ("number", "base"): lambda g, a, p: a.value[1] == 10 and _base_and_number(a, g, p),
    ("matrix", "matrix"): _matrices,
    ("set", "set"): _sequences,
    ("list", "list"): _sequences,
}
