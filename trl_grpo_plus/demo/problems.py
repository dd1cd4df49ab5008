"""Synthetic multi-step word problems in GSM8K's format.

A problem is a start value of 3 to 12 and two to four one-digit changes, told as a story:

    Tom has 5 apples. He buys 3 more. He loses 6. How many apples does Tom have now?

and its solution has one line a step, with one equality each, and GSM8K's answer line:

    5 + 3 = 8
    8 - 6 = 2
    #### 2

The true values never fall below zero. The ranges are narrow on purpose: a policy under 1M parameters learns them in
minutes on a CPU.
"""

import random
import zlib
from dataclasses import dataclass
from typing import Literal

import datasets

START_VALUES = range(3, 13)
CHANGES = range(1, 10)
NUM_STEPS = range(2, 5)

PRONOUNS = {
    "Tom": "He",
    "Ben": "He",
    "Sam": "He",
    "Leo": "He",
    "Anna": "She",
    "Mia": "She",
    "Zoe": "She",
    "Eva": "She",
}
ITEMS = ("apples", "books", "cards", "coins", "pens", "shells", "stamps", "toys")
GAINS = ("buys {} more", "finds {} more", "gets {} more", "wins {} more")
LOSSES = ("loses {}", "sells {}", "uses {}", "breaks {}")

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Problem:
    """A start value and its signed changes. Two problems with the same numbers are the same problem, however told."""

    start: int
    changes: tuple[int, ...]

    @property
    def values(self) -> list[int]:
        """The true value after each step, shape (num_steps,)."""
        values, value = [], self.start
        for change in self.changes:
            value += change
            values.append(value)
        return values

    @property
    def split(self) -> Split:
        """Every tenth problem is held out, chosen by its numbers alone, so that no seed can mix the splits."""
        return "test" if zlib.crc32(repr((self.start, self.changes)).encode()) % 10 == 0 else "train"

    def solution_steps(self, values: list[int] | None = None) -> list[str]:
        """One equality a step. With `values`, the trace of a solver that got these results and went on from them."""
        values = self.values if values is None else values
        before = [self.start, *values]
        return [
            f"{left} {'+' if change > 0 else '-'} {abs(change)} = {result}"
            for left, change, result in zip(before, self.changes, values, strict=False)
        ]


def sample_problem(rng: random.Random, split: Split = "train") -> Problem:
    """Draws a problem: number of steps, start and changes uniform among those of the split with no value below 0."""
    while True:
        num_steps = rng.choice(NUM_STEPS)
        start = rng.choice(START_VALUES)
        changes = tuple(rng.choice((1, -1)) * rng.choice(CHANGES) for _ in range(num_steps))
        problem = Problem(start, changes)
        if min(problem.values) >= 0 and problem.split == split:
            return problem


def tell(problem: Problem, rng: random.Random) -> str:
    """Tells the problem as a story. The prompt ends in a newline, so that a completion starts on a line of its own."""
    name, item = rng.choice(list(PRONOUNS)), rng.choice(ITEMS)
    sentences = [f"{name} has {problem.start} {item}."]
    for change in problem.changes:
        action = rng.choice(GAINS if change > 0 else LOSSES).format(abs(change))
        sentences.append(f"{PRONOUNS[name]} {action}.")
    sentences.append(f"How many {item} does {name} have now?")
    return " ".join(sentences) + "\n"


def write_solution(steps: list[str], final: int) -> str:
    """The steps, one a line, and GSM8K's answer line."""
    return "\n".join([*steps, f"#### {final}"])


def make_problems(num_problems: int, seed: int, split: Split = "train") -> datasets.Dataset:
    """Makes a data set of word problems, the same one for the same arguments.

    Args:
        num_problems: How many; all prompts differ.
        seed: Seed of the draw. Different seeds give different, possibly overlapping, data sets of the same split.
        split: `"train"`, or `"test"` for held-out problems: their numbers never occur in the train split.

    Returns:
        A data set with the columns `prompt` (str, ends in a newline), `answer` (str, the gold solution, last line
        `#### N`) and `solution_steps` (list of str: the gold lines with an equality, without the answer line).

    Raises:
        ValueError: `num_problems` below 1, or an unknown split.
    """
    if num_problems < 1:
        raise ValueError(f"num_problems must be at least 1, got {num_problems}.")
    if split not in ("train", "test"):
        raise ValueError(f'split must be "train" or "test", got {split!r}.')
    rng = random.Random(seed)
    rows: dict[str, dict] = {}
    while len(rows) < num_problems:
        problem = sample_problem(rng, split)
        prompt = tell(problem, rng)
        steps = problem.solution_steps()
        rows[prompt] = {
            "prompt": prompt,
            "answer": write_solution(steps, problem.values[-1]),
            "solution_steps": steps,
        }
    return datasets.Dataset.from_list(list(rows.values()))
