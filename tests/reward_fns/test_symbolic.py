"""What is left for sympy, asked for in a worker as the grader does."""

import pytest

from reward_fns.grading import _as_json, screen
from reward_fns.latex import parse_expression
from reward_fns.workers import run_guarded


def trees(a, b):
    return run_guarded("trees_equal", [_as_json(parse_expression(text)) for text in (a, b)], 5.0)


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (r"\tan^2 y + 1", r"\sec^2 y", "equal"),
        (r"\sin(90^\circ - x)", r"\cos x", "equal"),
        (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}", "equal"),
        (r"\cos\frac{\pi}{5} - \cos\frac{2\pi}{5}", r"\frac12", "equal"),
        (r"a^{m+n}", "a^m a^n", "equal"),
        (r"\sqrt{x^2}", "|x|", "equal"),
        (r"\sqrt{x^2}", "x", "different"),
        (r"\log 100", "2", "equal"),
        (r"\log 100", r"\ln 100", "equal"),
        (r"\arctan 1", r"\frac{\pi}{4}", "equal"),
        (r"\sin x", r"\sin x + 10^{-30}", "different"),
        (r"\frac{1}{0}", "1", "different"),
        (r"e^{i\pi}", "-1", "equal"),
    ],
)
def test_trees(a, b, verdict):
    assert trees(a, b) == verdict


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (r"\begin{pmatrix}2\\4\end{pmatrix}", r"2\begin{pmatrix}1\\2\end{pmatrix}", "equal"),
        (r"\lim_{x\to 0}\frac{\sin x}{x}", "1", "equal"),
        ("x^3 < 8", "x < 2", "equal"),
        ("x^3 < 8", "x > 2", "different"),
        # Differences that disappear when they are rounded to 15 digits.
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", "different"),
        (r"\sin(10^{-20})", r"\sin(10^{-21})", "different"),
        ("x^2+", "3", "gold unparseable"),
    ],
)
def test_latex(a, b, verdict):
    assert run_guarded("symbolic_equal", (a, b), 5.0) == verdict


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("x^2 + 1", False),
        (r"e^{-x^2}", False),
        ("2^{100}", False),
        (r"\sum_{k=1}^{20} k", False),
        ("n!", False),
        ("2^{9999}", True),
        ("9^9^9", True),
        ("9^{9^{9}}", True),
        ("9^{9^{9^{9}}}", True),
        ("9999!", True),
        ("(5!)!", True),
        ("5!!!", True),
        (r"\sum_{k=1}^{100000} k", True),
        (r"\sqrt[12345]{2}", True),
        ("1" * 300, True),
        ("(" * 30 + "x" + ")" * 30, True),
        ("x" * 900, True),
        ('__import__("os")', True),
        ("eval(x)", True),
    ],
)
def test_screen(text, refused):
    assert (screen(text) is not None) is refused
