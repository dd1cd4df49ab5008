"""Rewards with TRL's signature: by dotted path (`reward_fns.gsm8k_reward`) or as configured, picklable objects."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from .extraction import extract, to_text
from .grading import DEFAULT_BUDGET, first_readable, grade_batch
from .policy import Grade, GradePolicy

__all__ = ["FormatReward", "GSM8KReward", "MathReward", "format_reward", "gsm8k_reward", "math_reward"]

GOLD_COLUMNS = ("solution", "answer", "gold", "final_answer", "ground_truth")


class MathReward:
    """Rewards a completion whose final answer equals the gold answer.

    Args:
        correct: Reward of a correct answer.
        wrong: Reward of a wrong answer, and of a missing one unless `unparseable` is given.
        unparseable: Reward where no answer was found or it cannot be read. None: the same as `wrong`.
        gold_columns: Columns that may hold the gold, in order. In each row the first that holds a readable one counts,
            and a text in which no answer is marked only when no other column holds one.
        policy: What counts as the same answer, and where the answer may stand.
        budget: Seconds of symbolic comparison for one batch. What is open then is paid as `wrong`.
        name: Name in TRL's logs.

    A call returns one float for each completion, in order, and None where the gold is empty or unreadable.

    It reports to TRL's `log_extra` the columns `<name>/extracted`, `<name>/gold`, `<name>/method`, `<name>/verdict`
    and `<name>/reason`, and to `log_metric` the share of each reason (`<name>/correct`, `<name>/wrong`,
    `<name>/unparseable`, `<name>/no_answer`, `<name>/timeout`, `<name>/refused`) among completions that have a gold,
    and `<name>/no_gold`, the share of all completions without one.
    """

    default_name = "math_reward"
    default_mode = "math"

    def __init__(
        self,
        correct: float = 1.0,
        wrong: float = 0.0,
        unparseable: float | None = None,
        gold_columns: Sequence[str] = GOLD_COLUMNS,
        policy: GradePolicy | None = None,
        budget: float | None = DEFAULT_BUDGET,
        name: str | None = None,
    ):
        if isinstance(gold_columns, str) or not gold_columns:
            raise ValueError(f"gold_columns must be a sequence of column names, got {gold_columns!r}")
        if budget is not None and not budget > 0:
            raise ValueError(f"budget must be positive or None, got {budget!r}")
        self.correct = float(correct)
        self.wrong = float(wrong)
        self.unparseable = float(wrong if unparseable is None else unparseable)
        self.gold_columns = tuple(gold_columns)
        self.policy = GradePolicy(mode=self.default_mode) if policy is None else policy
        self.budget = budget
        self.__name__ = name or self.default_name

    def __call__(
        self,
        completions: Sequence[Any],
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        golds = self._golds(len(completions), columns)
        grades = grade_batch(golds, completions, self.policy, self.budget)
        rewards = [self._reward(grade) for grade in grades]
        if log_extra is not None:
            self._log_columns(grades, log_extra)
        if log_metric is not None and grades:
            self._log_metrics(grades, log_metric)
        return rewards

    def _golds(self, count: int, columns: dict[str, Any]) -> list[Any]:
        present = [name for name in self.gold_columns if columns.get(name) is not None]
        if not present:
            raise ValueError(
                f"{self.__name__} needs a gold answer in one of the columns {list(self.gold_columns)}, and it was "
                f"given {sorted(columns)}. Rename a column or build the reward with gold_columns=[...]."
            )
        for name in present:
            value = columns[name]
            if isinstance(value, (str, bytes)) or not hasattr(value, "__len__") or len(value) != count:
                raise ValueError(
                    f"{self.__name__}: column {name!r} must be a list with one gold for each of the {count} "
                    f"completions, got {type(value).__name__}"
                )
        if len(present) == 1:
            return list(columns[present[0]])
        rows = [[columns[name][i] for name in present] for i in range(count)]
        return [values[first_readable(values)] for values in rows]

    def _reward(self, grade: Grade) -> float | None:
        if grade.gold is None:
            return None
        if grade.correct:
            return self.correct
        return self.unparseable if grade.reason in ("no answer", "unparseable") else self.wrong

    def _log_columns(self, grades: list[Grade], log_extra: Callable[[str, list], None]) -> None:
        name = self.__name__
        log_extra(f"{name}/extracted", [grade.extracted or "" for grade in grades])
        log_extra(f"{name}/gold", [grade.gold or "" for grade in grades])
        log_extra(f"{name}/method", [grade.method for grade in grades])
        log_extra(f"{name}/verdict", [_verdict(grade) for grade in grades])
        log_extra(f"{name}/reason", [grade.reason if grade.gold is not None else "no gold" for grade in grades])

    def _log_metrics(self, grades: list[Grade], log_metric: Callable[[str, float], None]) -> None:
        name = self.__name__
        judged = [grade for grade in grades if grade.gold is not None]
        log_metric(f"{name}/no_gold", 1 - len(judged) / len(grades))
        if judged:
            for reason in ("correct", "wrong", "unparseable", "no answer", "timeout", "refused"):
                share = sum(grade.reason == reason for grade in judged) / len(judged)
                log_metric(f"{name}/{reason.replace(' ', '_')}", share)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(correct={self.correct}, wrong={self.wrong}, unparseable={self.unparseable}, "
            f"gold_columns={self.gold_columns}, policy={self.policy}, budget={self.budget})"
        )


def _verdict(grade: Grade) -> str:
    if grade.gold is None:
        return "skipped"
    return "correct" if grade.correct else "incorrect"


class GSM8KReward(MathReward):
    """`MathReward` for GSM8K: when no answer is marked, the last number of the completion counts."""

    default_name = "gsm8k_reward"
    default_mode = "gsm8k"


class FormatReward:
    """Rewards a completion that presents its answer in a form that can be read, right or wrong.

    Args:
        style: Where the answer must stand, after any thinking: "boxed" (`\\boxed{...}`), "gsm8k" (`#### ...`),
            "answer" (`<answer>...</answer>`), "any" of the three, or "think" (`<think>...</think>` first, and text
            after it; nothing is asked of the answer), or "think_answer" (the same, then `<answer>...</answer>` and
            no more).
        right: Reward where the form is kept.
        wrong: Reward where it is not.
        pattern: A regular expression that the whole completion must match, in place of `style`.
        name: Name in TRL's logs.
    """

    _THINK = re.compile(r"\s*<think>(?:(?!<think>).)*?</think>\s*(?!\s|<think>)(?P<rest>.+)", re.DOTALL)
    _ANSWER = re.compile(r"<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)
    STYLES = ("any", "boxed", "gsm8k", "answer", "think", "think_answer")

    def __init__(
        self,
        style: str = "any",
        right: float = 1.0,
        wrong: float = 0.0,
        pattern: str | None = None,
        name: str = "format_reward",
    ):
        if style not in self.STYLES:
            raise ValueError(f"FormatReward.style must be one of {self.STYLES}, got {style!r}")
        self.style = style
        self.right = float(right)
        self.wrong = float(wrong)
        self.pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        self.__name__ = name

    def __call__(
        self,
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        rewards = [self.right if self.holds(to_text(completion)) else self.wrong for completion in completions]
        if log_metric is not None and rewards:
            log_metric(f"{self.__name__}/kept", sum(reward == self.right for reward in rewards) / len(rewards))
        return rewards

    def holds(self, text: str) -> bool:
        """Whether the text keeps the form."""
        if self.pattern is not None:
            return self.pattern.fullmatch(text.strip()) is not None
        if self.style in ("think", "think_answer"):
            match = self._THINK.fullmatch(text)
            if match is None or "</think>" in match["rest"]:
                return False
            return self.style == "think" or self._ANSWER.fullmatch(match["rest"]) is not None
        found = extract(text, mode="math")
        wanted = {"boxed": ("boxed",), "gsm8k": ("####",), "answer": ("<answer>",)}
        methods = wanted.get(self.style, ("boxed", "####", "<answer>"))
        if self.style == "answer" and found.method == "boxed":
            return self._tag_around_box(text)
        return bool(found.text) and found.method in methods

    def _tag_around_box(self, text: str) -> bool:
        tags = self._ANSWER.findall(text)
        return bool(tags) and extract(tags[-1], mode="math").method == "boxed"


_MATH = MathReward()
_GSM8K = GSM8KReward()
_FORMAT = FormatReward()


def math_reward(
    completions: Sequence[Any],
    log_extra: Callable[[str, list], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """1.0 for a completion whose final answer equals the gold, else 0.0, and None where there is no readable gold.

    The gold is taken from the column `solution`, `answer`, `gold`, `final_answer` or `ground_truth`, in any usual
    form. Use `MathReward` for other columns, weights or a `GradePolicy`.

    Example:
    ```python
    >>> math_reward([r"So it is $\\boxed{\\frac12}$."], solution=["0.5"])
    [1.0]
    ```
    """
    return _MATH(completions, log_extra=log_extra, log_metric=log_metric, **columns)


def gsm8k_reward(
    completions: Sequence[Any],
    log_extra: Callable[[str, list], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """`math_reward` for GSM8K: without a marked answer the last number of the completion counts.

    Example:
    ```python
    >>> gsm8k_reward(["48 / 2 = 24 clips.\\n#### 72"], answer=["48/2 = <<48/2=24>>24 ...\\n#### 72"])
    [1.0]
    ```
    """
    return _GSM8K(completions, log_extra=log_extra, log_metric=log_metric, **columns)


def format_reward(
    completions: Sequence[Any], log_metric: Callable[[str, float], None] | None = None, **kwargs: Any
) -> list[float]:
    """1.0 for an answer in `\\boxed{}`, after `####` or in `<answer>`, else 0.0. See `FormatReward`."""
    return _FORMAT(completions, log_metric=log_metric, **kwargs)
