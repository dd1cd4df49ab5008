"""The exact arithmetic against sympy and against hand-computed values."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_fns.exact import Refused, Unsupported, const_value, equal, normal_form, provably_different
from reward_fns.latex import parse_expression


def form(text):
    return normal_form(parse_expression(text))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("-2^2", -4),
        ("(-2)^2", 4),
        ("2^{-3}", Fraction(1, 8)),
        ("6/2/3", 1),
        ("6/2(3)", 9),
        (r"\frac16", Fraction(1, 6)),
        (r"\frac1{72}", Fraction(1, 72)),
        (r"\frac{3}{4}/\frac{1}{2}", Fraction(3, 2)),
        (r"2\frac{1}{3}", Fraction(7, 3)),
        (r"2\frac{4}{3}", Fraction(8, 3)),
        (r"2\cdot\frac{1}{3}", Fraction(2, 3)),
        ("1 1/2", Fraction(3, 2)),
        ("3.5e-2", Fraction(7, 200)),
        (r"1.5\times10^3", 1500),
        ("5!", 120),
        ("-3!", -6),
        (r"\binom{5}{2}", 10),
        (r"\sqrt{16}", 4),
        (r"\sqrt[3]{-27}", -3),
        (r"\sqrt{2}\sqrt{8}", 4),
        ("8^{2/3}", 4),
        ("i^2", -1),
        ("(1+i)(1-i)", 2),
        (r"|{-3}|", 3),
        (r"\lfloor -2.5 \rfloor", -3),
        (r"\gcd(12, 18)", 6),
        (r"17 \bmod 5", 2),
        ("2^{10}-24", 1000),
        (r"\frac{\sqrt{50}}{\sqrt{2}}", 5),
        (r"(1+\sqrt{2})(1-\sqrt{2})", -1),
    ],
)
def test_values(text, value):
    assert const_value(form(text)) == value


@pytest.mark.parametrize(
    "text", ["", "2 3", "1+", "(1", "1)", "hello", "x_", r"\frac{1}", "1..2", "2**3", r"\foo", "5 = 5"]
)
def test_what_is_no_expression(text):
    with pytest.raises(Unsupported):
        parse_expression(text)


@pytest.mark.parametrize(
    "text", ["9" * 2000, "(" * 100 + "1" + ")" * 100, "x+" * 2000 + "1", "1e99999", r"\frac{1}{" * 80 + "2" + "}" * 80]
)
def test_what_is_too_large_to_be_read(text):
    with pytest.raises(Refused):
        parse_expression(text)


@pytest.mark.parametrize(
    "text", ["9^{99999}", "99999!", r"\binom{99999}{5}", "2^{3^{20}}", "7^{9999}7^{9999}7^{9999}"]
)
def test_what_is_too_large_to_be_computed(text):
    with pytest.raises((Refused, Unsupported)):
        form(text)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (r"\frac{1}{1+\sqrt{2}}", r"\sqrt{2}-1", True),
        (r"\sqrt{6}", r"\sqrt{2}\sqrt{3}", True),
        (r"\frac{x^2-1}{x-1}", "x+1", True),
        ("(x+y)^3", "x^3+3x^2y+3xy^2+y^3", True),
        ("x^{1/2}x^{1/2}", "x", True),
        (r"\frac{a}{b}+\frac{b}{a}", r"\frac{a^2+b^2}{ab}", True),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", False),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5}", False),
        ("x^2", "x^3", False),
        (r"\pi", r"\frac{22}{7}", False),
        (r"\sin^2 x + \cos^2 x", "1", None),
        (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}", None),
    ],
)
def test_equality(a, b, same):
    assert equal(form(a), form(b)) is same


def test_the_root_of_a_square_keeps_its_sign_open():
    with pytest.raises(Unsupported):
        form(r"\sqrt{x^2}")


@pytest.mark.parametrize(
    ("a", "b", "different"),
    [
        (r"\sin x", r"\cos x", True),
        (r"\sin^2 x + \cos^2 x", "1", False),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", True),
        (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}", False),
        (r"\sqrt{3+2\sqrt{2}}", "2.41421356237", True),
        ("10^{20}+x-10^{20}", "x", False),
        ("x^2", "(x+1)^{2000}", True),
        (r"\log_2 8", "3", False),
        (r"\log_2 9", "3", True),
    ],
)
def test_floating_point_only_disproves(a, b, different):
    assert provably_different(parse_expression(a), parse_expression(b)) is different


_LEAF = st.sampled_from(["x", "y", "1", "2", "3", "5", r"\sqrt{2}", r"\sqrt{3}", r"\sqrt{12}", r"\frac{1}{2}", r"\pi"])
_EXPRESSION = st.recursive(
    _LEAF,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        st.tuples(inner, inner).map(lambda t: f"{t[0]} \\cdot {t[1]}"),
        st.tuples(inner, st.sampled_from("23")).map(lambda t: f"({t[0]})^{t[1]}"),
        st.tuples(inner, st.sampled_from([r"\sqrt{2}", "3", "x"])).map(lambda t: f"\\frac{{{t[0]}}}{{{t[1]}}}"),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_EXPRESSION, _EXPRESSION)
def test_against_sympy(a, b):
    sympy = pytest.importorskip("sympy")
    from reward_fns.grading import _as_json
    from reward_fns.symbolic import _build

    trees = [parse_expression(a), parse_expression(b)]
    try:
        ours = equal(normal_form(trees[0]), normal_form(trees[1]))
    except Unsupported:
        return
    difference = sympy.expand(sympy.together(_build(_as_json(trees[0])) - _build(_as_json(trees[1]))))
    numerator = sympy.numer(sympy.together(difference))
    theirs = sympy.expand(numerator) == 0
    assert ours is theirs
    if theirs:
        assert not provably_different(*trees)
