"""A process reward that knows the true values of a demo problem."""


def exact_step_reward(
    prompts: list, completions: list, completion_ids: list[list[int]], steps: list[list[str]], **columns
) -> list[list[float]]:
    """Scores each step 1.0 if it is the true line of the solution at its place, else 0.0.

    A rule as `reward_fns.step_arithmetic_reward` looks at a step alone, so it finds a step that goes on rightly from a
    wrong value true. This one, like a reward model trained on roll-outs, finds it lost: after the first slip all steps
    score 0. The answer line is scored as a step.

    Args:
        prompts, completions, completion_ids: As TRL passes them; not looked at.
        steps: Texts of the steps of each completion.
        columns: The data set's columns. Needs `solution_steps` (list of str for each completion) and `answer`, as
            `make_problems` makes them.

    Raises:
        ValueError: one of the two columns is missing.
    """
    for name in ("solution_steps", "answer"):
        if name not in columns:
            raise ValueError(
                f"exact_step_reward needs the data set column {name!r}; make the data with "
                "trl_grpo_plus.demo.make_problems, or use reward_fns.step_arithmetic_reward, which needs no column."
            )
    scores = []
    for texts, gold_steps, answer in zip(steps, columns["solution_steps"], columns["answer"], strict=True):
        gold = [*gold_steps, answer.splitlines()[-1]]
        scores.append([float(j < len(gold) and text.strip() == gold[j]) for j, text in enumerate(texts)])
    return scores
