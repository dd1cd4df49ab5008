r"""GSM8K as EleutherAI/lm-evaluation-harness scores it.

Source: lm-eval 0.4.13, `lm_eval/tasks/gsm8k/gsm8k.yaml` (task version 3.0), `lm_eval/filters/extraction.py`
(`RegexFilter`, `take_first`) and `lm_eval/api/metrics.py` (`exact_match`).

- The generation ends before the first "Question:", "</s>" or "<|im_end|>".
- strict-match: the first `#### (\-?[0-9\.\,]+)`. So `#### $18` has no answer.
- flexible-extract: the last match of `(-?[$0-9.,]{2,})|(-?[0-9]+)` anywhere. So "18 eggs." is 18, and so is the last
  number of an afterthought.
- Both sides then lose every "," and "$", everything up to the last "#### ", and one "." at the end, become lower case,
  and are compared as strings: 18.0 is not 18.
"""

import re

from ._common import Verdict, cut_at

STOPS = ("Question:", "</s>", "<|im_end|>")
STRICT = re.compile(r"#### (-?[0-9.,]+)")
FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
FINAL_POINT = re.compile(r"\.$")


def normalize(text: str) -> str:
    """The `exact_match` normalisation with the options of the task."""
    text = text.replace(",", "").replace("$", "")
    _, _, text = text.rpartition("#### ")
    # numpy, in whose arrays the strings are compared, does not see zero characters at the end.
    return FINAL_POINT.sub("", text).lower().rstrip("\0")


def _verdict(gold: str, found: str | None) -> Verdict:
    reference = normalize(gold)
    if found is None:
        return False, None, reference
    prediction = normalize(found.strip())
    return prediction == reference, prediction, reference


def gsm8k_strict(gold: str, completion: str) -> Verdict:
    """The harness' `exact_match,strict-match` on one GSM8K answer.

    Args:
        gold: The `answer` column (`... #### 18`), or the bare number.
        completion: The model's text.

    Returns:
        `(correct, extracted, gold)`; the last two as they are compared, `extracted` None where the harness records
        "[invalid]".
    """
    match = STRICT.search(cut_at(completion, STOPS))
    return _verdict(gold, match.group(1) if match else None)


def gsm8k_flexible(gold: str, completion: str) -> Verdict:
    """The harness' `exact_match,flexible-extract` on one GSM8K answer. Arguments and result as `gsm8k_strict`."""
    found = None
    for match in FLEXIBLE.finditer(cut_at(completion, STOPS)):
        found = match.group()
    return _verdict(gold, found)
