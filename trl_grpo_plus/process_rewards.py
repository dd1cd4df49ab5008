"""Calling process reward functions and checking what they return."""

import asyncio
import functools
import inspect
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from numbers import Real

import torch

# Called with the keywords `prompts, completions, completion_ids, steps`, the data set's columns, and TRL's
# `trainer_state`, `log_extra`, `log_metric`; returns one list per completion with one float or None (not scored) per
# step.
ProcessRewardFunc = Callable[..., list[list[float | None]]]


def resolve_process_reward_funcs(funcs: "ProcessRewardFunc | str | list[ProcessRewardFunc | str]") -> list[Callable]:
    """Turns what a user may pass as `process_reward_funcs` into callables; a string is the path or hub id of a PRM.

    Raises:
        TypeError: an entry is neither callable nor a string, or is a bare `torch.nn.Module`.
    """
    resolved = []
    for func in funcs if isinstance(funcs, (list, tuple)) else [funcs]:
        if isinstance(func, str):
            from trl_grpo_plus.reward_models import ProcessRewardModel

            func = ProcessRewardModel.from_pretrained(func)
        if isinstance(func, torch.nn.Module) and "steps" not in inspect.signature(func.forward).parameters:
            raise TypeError(
                f"process_reward_funcs: {type(func).__name__} is a bare module. Wrap it in "
                "`trl_grpo_plus.ProcessRewardModel`, or pass a function that scores steps with it."
            )
        if not callable(func):
            raise TypeError(
                f"process_reward_funcs: {func!r} is not callable; pass a function, a ProcessRewardModel, or a "
                "model's path."
            )
        resolved.append(func)
    return resolved


def process_reward_names(funcs: list[Callable]) -> list[str]:
    """One name per function for logs: the function's, else its class's; a repeated name gets a number."""
    names = []
    for func in funcs:
        while isinstance(func, functools.partial):
            func = func.func
        name = getattr(func, "__name__", type(func).__name__)
        repeats = sum(existing == name or existing.startswith(f"{name}_") for existing in names)
        names.append(f"{name}_{repeats + 1}" if repeats else name)
    return names


def move_to_device(funcs: list[Callable], device: torch.device) -> None:
    """Moves reward models that still lie on the CPU to the trainer's device; one placed elsewhere stays there."""
    for func in funcs:
        if hasattr(func, "to") and torch.device(getattr(func, "device", device)).type == "cpu":
            func.to(device)


def call_process_reward(func: Callable, name: str, steps: list[list[str]], **columns) -> list[list[float | None]]:
    """Calls one process reward function (sync or async) and checks its result.

    Args:
        func: the function.
        name: its name in error messages.
        steps: the step texts of each completion.
        columns: all other keywords.

    Returns:
        One list per completion with one float or None per step.

    Raises:
        TypeError: the result is not a list of lists of numbers.
        ValueError: a wrong number of completions or steps, NaN or inf; the message names the function, the completion
            and both counts.
    """
    scores = func(steps=steps, **columns)
    if inspect.isawaitable(scores):
        scores = _wait_for(scores)
    return check_step_scores(scores, name, [len(completion) for completion in steps])


def check_step_scores(scores, name: str, num_steps: list[int]) -> list[list[float | None]]:
    """Checks the result of a process reward function; see [`call_process_reward`]."""
    if isinstance(scores, str) or not hasattr(scores, "__len__"):
        raise TypeError(
            f"Process reward function {name!r} returned {type(scores).__name__}; return a list per completion with "
            "one float or None per step."
        )
    if len(scores) != len(num_steps):
        raise ValueError(
            f"Process reward function {name!r} returned scores for {len(scores)} completions, but there are "
            f"{len(num_steps)}; return one list per completion, in order."
        )
    return [_check_row(row, name, i, count) for i, (row, count) in enumerate(zip(scores, num_steps, strict=True))]


def _check_row(row, name, index, count):
    if isinstance(row, torch.Tensor):
        row = row.tolist()
    if isinstance(row, str) or not hasattr(row, "__len__"):
        raise TypeError(
            f"Process reward function {name!r} returned {row!r} for completion {index}; return a list with one float "
            f"or None for each of its {count} steps."
        )
    if len(row) != count:
        raise ValueError(
            f"Process reward function {name!r} returned {len(row)} scores for completion {index}, which has {count} "
            "steps; return one float or None per step."
        )
    return [_check_score(score, name, index, step) for step, score in enumerate(row)]


def _check_score(score, name, index, step):
    if score is None:
        return None
    if isinstance(score, torch.Tensor) and score.numel() == 1:
        score = score.item()
    if not isinstance(score, Real):
        raise TypeError(
            f"Process reward function {name!r} returned {score!r} for step {step} of completion {index}; a score is "
            "a number, or None for a step that is not scored."
        )
    if not math.isfinite(score):
        raise ValueError(
            f"Process reward function {name!r} returned {float(score)} for step {step} of completion {index}; return "
            "a finite number, or None for a step that is not scored."
        )
    return float(score)


def _wait_for(awaitable):
    async def run():
        return await awaitable

    # A thread of its own: the caller's may already run an event loop (notebooks).
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(asyncio.run, run()).result()


class MeanStepReward:
    """Stands in for the outcome reward when there is none: each completion's mean step score, 0 with no scored step.

    It exists because TRL needs a reward function and logs its `reward` curve; its advantage has weight 0. Reads the
    scores that the trainer has just collected.
    """

    __name__ = "mean_step_reward"

    def __init__(self, read_scores: Callable[[], torch.Tensor]):
        self._read_scores = read_scores

    def __call__(self, completions, **kwargs) -> list[float]:
        return self._read_scores().nanmean(1).nan_to_num().tolist()
