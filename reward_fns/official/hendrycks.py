r"""MATH as Hendrycks et al. score it (arXiv 2103.03874): the last box, a string normalisation, equality of strings.

Source: hendrycks/math at 357963a, `modeling/math_equivalence.py` (`is_equiv`), `modeling/dataset/util.py`
(`last_boxed_only_string`) and `modeling/eval_math_gpt.py` (`remove_boxed`).

No mathematics is done: `\frac{2}{4}` is not `\frac{1}{2}`, `x+1` not `1+x`, 0.5 is `\frac{1}{2}` but 0.25 not
`\frac{1}{4}`, and `50%` is not 50 although `50\%` is. When the normalisation stumbles (two `\text{ `, a `\frac` or
`\sqrt` at the end) the raw strings are compared. When neither side has a readable box the official function calls them
equal, and so does this one.
"""

from ._common import Verdict, brace_shorthand, gsm8k_answer, is_solution, last_box, slash_to_frac

_REMOVED_FIRST = ("\n", "\\!")
_REMOVED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")


def unbox(box: str | None) -> str | None:
    r"""The inside of `\boxed{...}`; None for `\fbox{...}`, `\boxed 5` and anything else, as in the original."""
    if box is None or not box.startswith("\\boxed{") or not box.endswith("}"):
        return None
    return box[len("\\boxed{") : -1]


def _cut_unit(text: str) -> str:
    r"""Drops what follows a `\text{ `. Raises ValueError when there are two: there the original asserts."""
    if text.count("\\text{ ") > 1:
        raise ValueError("two units")
    return text.split("\\text{ ")[0]


def _brace_roots(text: str) -> str:
    r"""`\sqrt3` -> `\sqrt{3}`: one character, so `\sqrt12` is `\sqrt{1}2` and `\sqrt[3]{8}` is `\sqrt{[}3]{8}`."""
    head, *tails = text.split("\\sqrt")
    for tail in tails:
        head += "\\sqrt" + (tail if tail[0] == "{" else "{" + tail[0] + "}" + tail[1:])
    return head


def strip_string(text: str) -> str:
    """The normalisation. Raises IndexError or ValueError where the original raises."""
    for removed in _REMOVED_FIRST:
        text = text.replace(removed, "")
    text = text.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for removed in _REMOVED:
        text = text.replace(removed, "")
    text = _cut_unit(text).replace("\\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    if text.count("=") == 1 and text.index("=") <= 2:
        text = text.partition("=")[2]
    text = brace_shorthand(_brace_roots(text).replace(" ", ""), tolerate_bare=False)
    if text == "0.5":
        text = "\\frac{1}{2}"
    return slash_to_frac(text, keep_sqrt=False)


def is_equiv(first: str | None, second: str | None) -> bool:
    """Whether two answers are the same by the official rules; two missing answers are."""
    if first is None or second is None:
        return first is second
    try:
        return strip_string(first) == strip_string(second)
    except (IndexError, ValueError):
        return first == second


def hendrycks_math(gold: str, completion: str) -> Verdict:
    r"""The official MATH verdict of hendrycks/math on one completion.

    Args:
        gold: A solution with `\boxed{...}` (the `solution` column), or the bare answer.
        completion: The model's text; its last `\boxed{...}` counts.

    Returns:
        `(correct, extracted, gold)`, the last two as they stand in the boxes.
    """
    if is_solution(gold):
        reference = unbox(last_box(gold))
    else:
        answer = gsm8k_answer(gold)
        reference = gold if answer is None else answer
    prediction = unbox(last_box(completion))
    return is_equiv(prediction, reference), prediction, reference
