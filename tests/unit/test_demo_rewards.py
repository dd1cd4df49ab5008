import pytest

from trl_grpo_plus.demo import exact_step_reward

COLUMNS = {"solution_steps": [["5 + 3 = 8", "8 - 6 = 2"]], "answer": ["5 + 3 = 8\n8 - 6 = 2\n#### 2"]}


def score(steps, **columns):
    return exact_step_reward(prompts=[""], completions=[""], completion_ids=[[]], steps=[steps], **columns)


@pytest.mark.parametrize(
    "steps, scores",
    [
        (["5 + 3 = 8\n", "8 - 6 = 2\n", "#### 2"], [1, 1, 1]),
        (["5 + 3 = 9\n", "9 - 6 = 3\n", "#### 3"], [0, 0, 0]),  # true arithmetic on a wrong value is not the solution
        (["5 + 3 = 8\n", "8 - 6 = 3\n", "#### 2"], [1, 0, 1]),
        (["5 + 3 = 8\n", "#### 2"], [1, 0]),
        (["5 + 3 = 8\n", "8 - 6 = 2\n", "#### 2\n", "#### 2"], [1, 1, 1, 0]),
        ([], []),
    ],
)
def test_scores(steps, scores):
    assert score(steps, **COLUMNS) == [scores]


@pytest.mark.parametrize("missing", ["solution_steps", "answer"])
def test_missing_column_is_named(missing):
    columns = {name: value for name, value in COLUMNS.items() if name != missing}
    with pytest.raises(ValueError, match=f"needs the data set column '{missing}'"):
        score(["5 + 3 = 8"], **columns)
