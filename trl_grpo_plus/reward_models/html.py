"""A page that shows solutions with their steps coloured by score."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment

from trl_grpo_plus.reward_models.formats import Prompt
from trl_grpo_plus.reward_models.prm import ScoredStep, aggregate


def render_scores(
    prompts: Sequence[Prompt], solutions: Sequence[Sequence[ScoredStep]], title: str, threshold: float = 0.5
) -> str:
    """An HTML page, complete in itself: no script, nothing from elsewhere, all text escaped.

    Args:
        prompts: One for each solution: text or chat messages.
        solutions: The scored steps of each.
        title: Heading of the page, such as the model's name.
        threshold: In each solution, the first step with a score below it is outlined.
    """
    records = []
    for prompt, steps in zip(prompts, solutions, strict=True):
        below = next((j for j, step in enumerate(steps) if step.score is not None and step.score < threshold), None)
        records.append(
            {
                "prompt": prompt_text(prompt),
                "steps": [ScoredStep(step.text.rstrip("\r\n"), step.score) for step in steps],
                "first_below": below,
                "summary": summary([step.score for step in steps], below),
            }
        )
    template = files("trl_grpo_plus.reward_models").joinpath("templates/scores.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(title=title, solutions=records, threshold=threshold, hue=_hue)


def write_scores(path: str | Path, *args, **kwargs) -> None:
    """Writes the page of `render_scores`."""
    Path(path).write_text(render_scores(*args, **kwargs), encoding="utf-8")


def prompt_text(prompt: Prompt) -> str:
    """A prompt as one text; messages with their roles."""
    if isinstance(prompt, str):
        return prompt.strip()
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def summary(scores: Sequence[float | None], first_below: int | None) -> str:
    """One line on a solution."""
    lowest, product = aggregate(scores, "min"), aggregate(scores, "product")
    if lowest is None:
        return "no step scored"
    where = "none below the threshold" if first_below is None else f"first below the threshold: step {first_below + 1}"
    return f"{len(scores)} steps, lowest {lowest:.3f}, product {product:.3f}, {where}"


def _hue(score: float) -> int:
    """Red (0) for 0, yellow (60) for 0.5, green (120) for 1."""
    return round(120 * min(max(score, 0.0), 1.0))
