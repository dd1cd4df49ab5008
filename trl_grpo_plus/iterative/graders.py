"""Where labels come from: the rule-based grader for outcomes, roll-outs of the policy for steps."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset

from trl_grpo_plus.iterative.config import IterativeGRPOConfig


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """A completion's text; of a conversation, what the assistant said."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def rule_grader(answer_column: str) -> Callable[..., list[float]]:
    """A grader that compares completions with the gold answers in a column, by `reward_fns.grade`."""

    def grade(prompts: list, completions: list, **columns: list) -> list[float]:
        from reward_fns import grade_batch

        if answer_column not in columns:
            raise ValueError(f"answer_column={answer_column!r} is not among the data's columns {sorted(columns)}.")
        grades = grade_batch(list(columns[answer_column]), [completion_text(completion) for completion in completions])
        return [float(bool(each.correct)) for each in grades]

    return grade


class RolloutLabeler:
    """Labels each step with the share of right answers among roll-outs of the policy from its end (arXiv 2312.08935).

    Called like a process reward. The label of the last step is the verdict on the completion itself.

    Args:
        policy: gives the model that rolls out.
        tokenizer: its tokenizer.
        args: `rollouts_per_step`, `temperature`, `max_completion_length`, `step_delimiter`, `answer_column` and `seed`
            are read.
        grader: judges completions.
    """

    __name__ = "rollout_labeler"

    def __init__(self, policy: Callable[[], Any], tokenizer, args: IterativeGRPOConfig, grader: Callable[..., list]):
        self.policy, self.tokenizer, self.args, self.grader = policy, tokenizer, args, grader

    def __call__(self, prompts, completions, completion_ids, steps, **columns) -> list[list[float | None]]:
        from trl_grpo_plus.reward_models import label_steps_by_rollout

        name = self.args.answer_column
        if name not in columns:
            raise ValueError(
                f"step_labels='rollouts' needs the gold answers; answer_column={name!r} is not in the data."
            )
        rows = [i for i, ids in enumerate(completion_ids) if len(ids)]
        labels: list[list[float | None]] = [[None] * len(texts) for texts in steps]
        if not rows:
            return labels
        labelled = label_steps_by_rollout(
            Dataset.from_dict(
                {
                    "prompt": [prompts[i] for i in rows],
                    "completion_ids": [list(completion_ids[i]) for i in rows],
                    name: [columns[name][i] for i in rows],
                }
            ),
            self.policy().eval(),
            self.tokenizer,
            num_rollouts=self.args.rollouts_per_step,
            label="soft",
            grader=self._judge,
            answer_column=name,
            delimiter=self.args.step_delimiter,
            max_new_tokens=self.args.max_completion_length,
            temperature=self.args.temperature,
            seed=self.args.seed,
            progress=False,
        )
        for i, row in zip(rows, labelled["labels"], strict=True):
            labels[i] = list(row)
        return labels

    def _judge(self, golds, completions) -> list[bool]:
        verdicts = self.grader(
            prompts=[None] * len(golds), completions=list(completions), **{self.args.answer_column: list(golds)}
        )
        return [verdict is not None and verdict > 0.5 for verdict in verdicts]
