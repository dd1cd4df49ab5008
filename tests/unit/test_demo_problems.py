"""The word problems: GSM8K's format, true solutions, splits that cannot mix, and a tokenizer that decodes exactly."""

import random
import re

import pytest

from trl_grpo_plus.demo import make_problems
from trl_grpo_plus.demo.policy import build_tokenizer
from trl_grpo_plus.demo.problems import Problem, sample_problem, tell, write_solution
from trl_grpo_plus.demo.warmstart import SLIPS, slip_values

LOSS_VERBS = {"loses", "sells", "uses", "breaks"}


def read_story(prompt: str) -> list[int]:
    """The start value and the signed changes, read from the words alone."""
    start, *changes = prompt.split(". ")[:-1]
    numbers = [int(re.search(r"\d+", start)[0])]
    for sentence in changes:
        verb, number = sentence.split()[1:3]
        numbers.append(-int(number) if verb in LOSS_VERBS else int(number))
    return numbers


@pytest.mark.parametrize("split", ["train", "test"])
def test_solutions_are_true_and_in_gsm8k_format(split):
    for row in make_problems(300, seed=1, split=split):
        value, *changes = read_story(row["prompt"])
        assert 3 <= value <= 12 and 2 <= len(changes) <= 4 and all(1 <= abs(c) <= 9 for c in changes)
        *lines, last = row["answer"].splitlines()
        assert lines == row["solution_steps"] and len(lines) == len(changes)
        for line, change in zip(lines, changes, strict=True):
            left, sign, right, result = re.fullmatch(r"(\d+) ([+-]) (\d) = (\d+)", line).groups()
            assert int(left) == value and int(sign + right) == change
            value += change
            assert int(result) == value
        assert last == f"#### {value}"
        assert row["prompt"].endswith("?\n")


def test_example_in_full():
    problem = Problem(5, (3, -6))
    assert problem.values == [8, 2]
    assert write_solution(problem.solution_steps(), 2) == "5 + 3 = 8\n8 - 6 = 2\n#### 2"
    assert problem.solution_steps([9, 3]) == ["5 + 3 = 9", "9 - 6 = 3"]


def test_same_arguments_same_data_and_other_seed_other_data():
    first, again, other = (make_problems(50, seed) for seed in (3, 3, 4))
    assert first.to_dict() == again.to_dict()
    assert set(first["prompt"]).isdisjoint(other["prompt"])
    assert list(make_problems(20, 3)["prompt"]) == list(first["prompt"])[:20]


def test_held_out_problems_never_occur_in_the_train_split():
    numbers = {"train": set(), "test": set()}
    for split, seen in numbers.items():
        for seed in range(3):
            seen.update(tuple(read_story(prompt)) for prompt in make_problems(1500, seed, split)["prompt"])
    assert numbers["train"].isdisjoint(numbers["test"])
    assert len(numbers["test"]) > 500
    # The split hangs on the numbers, so it is the same however the story is told: about a tenth is held out.
    drawn = [Problem(start, (a, b)) for start in range(3, 13) for a in range(1, 10) for b in range(1, 10)]
    assert 0.07 < sum(problem.split == "test" for problem in drawn) / len(drawn) < 0.13


def test_prompts_are_all_different():
    prompts = make_problems(3000, seed=0)["prompt"]
    assert len(set(prompts)) == 3000


@pytest.mark.parametrize(
    "arguments, message",
    [((0, 0), "num_problems must be at least 1, got 0"), ((5, 0, "validation"), 'split must be "train" or "test"')],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_problems(*arguments)


def test_tokenizer_decodes_every_problem_and_every_slip_exactly():
    tokenizer = build_tokenizer()
    rng = random.Random(0)
    for _ in range(500):
        problem = sample_problem(rng, rng.choice(["train", "test"]))
        values = slip_values(problem, rng, probability=0.9)
        text = tell(problem, rng) + write_solution(problem.solution_steps(values), values[-1])
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        cut = rng.randrange(len(ids))
        assert tokenizer.decode(ids[:cut]) + tokenizer.decode(ids[cut:]) == text


def test_tokenizer_makes_one_token_of_a_number_and_of_a_newline():
    tokenizer = build_tokenizer()
    ids = tokenizer("3 - 5 = -2\n-2 + 12 = 10\n#### 10")["input_ids"]
    assert [tokenizer.decode([i]) for i in ids] == [
        *("3", " -", " 5", " =", " -2", "\n"),
        *("-2", " +", " 12", " =", " 10", "\n"),
        *("####", " 10"),
    ]


def test_slips_have_the_documented_rate_and_size_and_carry_on():
    rng = random.Random(0)
    problem = Problem(12, (9, -3, 5, 7))
    slips = []
    for _ in range(4000):
        before = 12
        for change, value in zip(problem.changes, slip_values(problem, rng), strict=True):
            slips.append(value - before - change)
            before = value
    assert set(slips) == {0, *SLIPS}
    assert sum(slip != 0 for slip in slips) / len(slips) == pytest.approx(0.2, abs=0.01)
    assert slip_values(problem, rng, probability=0.0) == problem.values
