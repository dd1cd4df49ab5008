"""What counts as the same answer, as options."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["OFFICIAL_MODE_NAMES", "Grade", "GradePolicy"]

OFFICIAL_MODE_NAMES = (
    "gsm8k_strict",
    "gsm8k_flexible",
    "hendrycks_math",
    "minerva_math",
    "deepseek_math",
    "qwen25_math",
)


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one completion.

    Attributes:
        correct: Whether the completion is paid. False when in doubt.
        extracted: The answer found in the completion, None when there is none.
        gold: The gold answer as it was read, None when it is empty or unreadable.
        method: How the answer was found: "boxed", "####", "final answer", "<answer>", "bold", "math", "conclusion",
            "last number", "whole text", "none", or the official mode's name.
        reason: "correct", "wrong", "unparseable" (something was found, but it is no answer that can be read),
            "timeout" (the worker's time or the batch's budget was over), "no answer" (nothing was found) or "refused"
            (too long, too deep or too large a number to be computed).
    """

    correct: bool
    extracted: str | None
    gold: str | None
    method: str
    reason: Literal["correct", "wrong", "unparseable", "timeout", "no answer", "refused"]


@dataclass(frozen=True, slots=True)
class GradePolicy:
    """How answers are found and compared. The defaults judge as a mathematics teacher would.

    Args:
        mode: Where the answer may stand. "math": box, `####`, "final answer is", `<answer>`, bold, last formula.
            "gsm8k": the same, then the last number. "auto": the last number counts only in a concluding sentence and
            for a gold that is a number. Or an official mode, which reproduces another harness's verdict exactly and
            ignores all other options (see `reward_fns.official`).
        percent: "lenient": 28% is 28 and 0.28. "value": 28% is 0.28 only.
        units: "optional": may be missing on either side, must agree (after conversion) when both have one.
            "required": must be there when the gold has one. "ignored": never compared.
        list_order: "any" or "same", for lists without brackets. Sets have no order and tuples always have one.
        brackets: "lenient": `(1, 2)` is also the list 1, 2 and the column vector. "strict": it is not. An open and a
            closed interval differ always.
        intervals: "relation": (0, 1) is also 0 < x < 1. "strict": it is not.
        approximate: Whether a decimal answer is taken for an exact gold. "never"; "rational": for a fraction that has
            no finite decimal, when at least `digits` significant digits are right (1/3 and 0.333333); "always": also
            for roots, pi and the like. A gold that is a decimal itself takes an exact answer that rounds to it, if it
            has at least four significant digits.
        digits: See `approximate`.
        base: "optional": 2516 is taken for a gold 2516_8. "required": the base must be written.
        variables: "named": x = 5 is not y = 5. "any": it is.
        form: The form that the answer must have, beside being equal: "any", "same" (written as the gold, up to spaces
            and LaTeX synonyms), "fraction" (one fraction of integers in lowest terms, or an integer), "decimal".
        unfinished_thinking: What to do with a completion that opens `<think>` and never closes it: "no answer", or
            "read" it as if it were the answer.
        timeout: Seconds for one symbolic comparison.
    """

    mode: str = "auto"
    percent: Literal["lenient", "value"] = "lenient"
    units: Literal["optional", "required", "ignored"] = "optional"
    list_order: Literal["any", "same"] = "any"
    brackets: Literal["lenient", "strict"] = "lenient"
    intervals: Literal["relation", "strict"] = "relation"
    approximate: Literal["never", "rational", "always"] = "rational"
    digits: int = 6
    base: Literal["optional", "required"] = "optional"
    variables: Literal["named", "any"] = "named"
    form: Literal["any", "same", "fraction", "decimal"] = "any"
    unfinished_thinking: Literal["no answer", "read"] = "no answer"
    timeout: float = 1.0

    def __post_init__(self):
        choices = {
            "mode": ("auto", "math", "gsm8k", *OFFICIAL_MODE_NAMES),
            "percent": ("lenient", "value"),
            "units": ("optional", "required", "ignored"),
            "list_order": ("any", "same"),
            "brackets": ("lenient", "strict"),
            "intervals": ("relation", "strict"),
            "approximate": ("never", "rational", "always"),
            "base": ("optional", "required"),
            "variables": ("named", "any"),
            "form": ("any", "same", "fraction", "decimal"),
            "unfinished_thinking": ("no answer", "read"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"GradePolicy.{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if not self.timeout > 0:
            raise ValueError(f"GradePolicy.timeout must be positive, got {self.timeout!r}")
        if self.digits < 1:
            raise ValueError(f"GradePolicy.digits must be at least 1, got {self.digits!r}")
