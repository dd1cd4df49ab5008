"""A process reward that needs no model: is every equality that a step writes down true?

How equalities are read and judged is described in `reward_fns.arithmetic.equalities`. A verdict of "false" is meant to
be trustworthy, since the policy pays for it; what is not understood is not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reward_fns.arithmetic import Equality, check_step, find_equalities

__all__ = ["Equality", "StepArithmeticReward", "check_step", "find_equalities", "step_arithmetic_reward"]


class StepArithmeticReward:
    """Process reward: one score per step by whether every equality in the step is true.

    A callable for `process_reward_funcs`; [`step_arithmetic_reward`] is this class with its defaults. Instances can be
    pickled.

    Args:
        true_value: score of a step with at least one true equality and no false one.
        false_value: score of a step with a false equality.
        unchecked_value: score of a step without an equality that could be judged; None leaves the step unscored.
    """

    def __init__(
        self, true_value: float = 1.0, false_value: float = 0.0, unchecked_value: float | None = None
    ) -> None:
        for name, value in (("true_value", true_value), ("false_value", false_value)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}.")
        if isinstance(unchecked_value, bool) or not isinstance(unchecked_value, int | float | None):
            raise TypeError(f"unchecked_value must be a number or None, got {unchecked_value!r}.")
        self.true_value = true_value
        self.false_value = false_value
        self.unchecked_value = unchecked_value
        self.__name__ = "step_arithmetic_reward"

    def __call__(
        self,
        prompts: Any = None,
        completions: Any = None,
        completion_ids: Any = None,
        steps: Sequence[Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> list[list[float | None]]:
        """Scores each step of each completion.

        Args:
            prompts, completions, completion_ids, kwargs: not used; taken so that a trainer can pass what it has.
            steps: for each completion, the texts of its steps.

        Returns:
            For each completion, one float or None per step.

        Raises:
            ValueError: no `steps`.
            TypeError: `steps` is not one list of strings per completion.
        """
        if steps is None:
            raise ValueError(
                "step_arithmetic_reward scores steps and got none: pass it in `process_reward_funcs`, not in "
                "`reward_funcs`, or call it with steps=[[text, ...], ...]."
            )
        return [self._score(index, row) for index, row in enumerate(steps)]

    def _score(self, index: int, row: Sequence[str]) -> list[float | None]:
        if isinstance(row, str) or not all(isinstance(step, str) for step in row):
            raise TypeError(f"steps[{index}] must be a list of strings, got {row!r}.")
        values = {True: self.true_value, False: self.false_value, None: self.unchecked_value}
        return [values[check_step(step)] for step in row]

    def __repr__(self) -> str:
        return (
            f"StepArithmeticReward(true_value={self.true_value}, false_value={self.false_value}, "
            f"unchecked_value={self.unchecked_value})"
        )


_DEFAULT = StepArithmeticReward()


def step_arithmetic_reward(
    prompts: Any = None,
    completions: Any = None,
    completion_ids: Any = None,
    steps: Sequence[Sequence[str]] | None = None,
    **kwargs: Any,
) -> list[list[float | None]]:
    """Returns 1.0 for a step whose equalities are all true, 0.0 if any is false, None if there is none to check.

    See [`StepArithmeticReward`] for the arguments, the errors and other values.
    """
    return _DEFAULT(prompts, completions, completion_ids, steps, **kwargs)
