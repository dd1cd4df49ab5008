r"""Modes that reproduce the verdicts of the programs with which published GSM8K and MATH scores were made.

    from reward_fns.official import OFFICIAL_MODES

    correct, extracted, gold = OFFICIAL_MODES["minerva_math"](gold_column_text, completion)

They judge as those programs judge, mistakes included; `reward_fns.grade` with its default policy judges as a
mathematics teacher. Each module names its source and the rules that surprise. Written from the behaviour of the
sources; no code of theirs.

What the sources run in their own process runs in killable workers here. A pair on which an official program would stop
with an error, or that is over the official time limit, is wrong.
"""

from collections.abc import Callable

from ._common import Verdict
from .deepseek import deepseek_math
from .gsm8k import gsm8k_flexible, gsm8k_strict
from .hendrycks import hendrycks_math
from .minerva import minerva_math
from .qwen import qwen25_math

OFFICIAL_MODES: dict[str, Callable[[str, str], Verdict]] = {
    "gsm8k_strict": gsm8k_strict,
    "gsm8k_flexible": gsm8k_flexible,
    "hendrycks_math": hendrycks_math,
    "minerva_math": minerva_math,
    "deepseek_math": deepseek_math,
    "qwen25_math": qwen25_math,
}

__all__ = [
    "OFFICIAL_MODES",
    "Verdict",
    "deepseek_math",
    "gsm8k_flexible",
    "gsm8k_strict",
    "hendrycks_math",
    "minerva_math",
    "qwen25_math",
]
