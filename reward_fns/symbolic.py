"""Worker side: equality of two answers by math-verify and sympy. Import it in a worker only."""

import logging

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
)
_LATEX = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_NORMALIZATION)


def _read(text: str) -> list:
    """The readings of one bare LaTeX answer; an empty list when there is none."""
    found = parse(f"${text}$", [_LATEX], fallback_mode="no_fallback", parsing_timeout=None)
    if not found:
        found = parse(text, [ExprExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return [value for value in found if not _is_undefined(value)]


def _is_undefined(value) -> bool:
    return isinstance(value, sympy.Basic) and value.has(sympy.nan, sympy.zoo)


def symbolic_equal(gold: str, answer: str) -> str:
    """Returns "equal", "different", "gold unparseable" or "answer unparseable"."""
    gold_values = _read(gold)
    if not gold_values:
        return "gold unparseable"
    answer_values = _read(answer)
    if not answer_values:
        return "answer unparseable"
    same = verify(
        gold_values, answer_values, float_rounding=8, strict=True, allow_set_relation_comp=True, timeout_seconds=None
    )
    return "equal" if same else "different"
