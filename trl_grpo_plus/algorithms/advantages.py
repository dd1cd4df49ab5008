"""Process-supervised advantages (DeepSeekMath, arXiv 2402.03300, §4.1.3).

Where this departs from the paper: the standard deviation is the sample one (ddof 1) with eps 1e-4 by default, as in
TRL's outcome advantages, so that one step per output gives TRL's numbers; `std="population"` and `eps=0` give the
paper's. Steps without a score (NaN or None) take part in nothing. The paper's form of credit is `sum`; `min` and
`mean` are ours to choose because the sum also rewards the number of steps.

Notation: B completions in groups of G contiguous rows, at most J steps each, T tokens. Raw step rewards are
`step_rewards`, (B, J) with NaN where there is no score; normalised ones are `normalized`. `step_ends`, (B, J), holds
index(j), the inclusive index of the last token of step j, and -1 where there is no step.
"""

from collections.abc import Sequence

import torch

CREDIT_FORMS = ("sum", "min", "mean")
STD_FORMS = ("sample", "population")
BASELINES = ("group", "leave_one_out")

StepRewards = Sequence[Sequence[float | None]] | torch.Tensor
StepEnds = Sequence[Sequence[int]] | torch.Tensor


def process_advantages(
    step_rewards: StepRewards,
    step_ends: StepEnds,
    group_size: int,
    num_tokens: int,
    *,
    credit: str = "sum",
    std: str = "sample",
    eps: float = 1e-4,
    gamma: float = 1.0,
    tau: float = 0.1,
    baseline: str = "group",
    zero_delimiters: bool = False,
) -> torch.Tensor:
    """Advantage of every completion token under process supervision (§4.1.3).

    Args:
        step_rewards: raw rewards, one list of float or None (not scored) per completion, or a (B, J) tensor with NaN
            for "no score".
        step_ends: inclusive token index of each step's end, one increasing list of int per completion, or a (B, J)
            tensor with -1 for "no step".
        group_size: G; rows `g*G ... (g+1)*G - 1` are the outputs of one prompt. G must divide B.
        num_tokens: T, the padded completion length.
        credit: how a token is charged with the rewards of the steps that end at or after it.
            `"sum"`: A[i,t] = sum of r~[i,j] over index(j) >= t, the paper's.
            `"min"`: the sum with each r~ weighted by softmax(-r / tau) over the completion's steps (arXiv 2504.15275,
            eq. 7); r~ is then centred and scaled by the group's soft minima, so that neither the number of steps nor
            of groups matters.
            `"mean"`: the sum to go divided by the number of scored steps to go.
        std: `"sample"` (ddof 1) or `"population"` (ddof 0).
        eps: added to the standard deviation.
        gamma: discount per step: the k-th step after the one a token is in counts gamma**k.
        tau: temperature of the soft minimum, in units of the reward; only for `credit="min"`.
        baseline: `"group"` leaves A as it is; `"leave_one_out"` subtracts at each token the mean advantage that the
            other outputs of the group have at the same position (0 past their end).
        zero_delimiters: if True, the token that ends a step (but not the completion's last step) gets 0, so that the
            policy is neither taught to split nor to stop splitting.

    Returns:
        (B, T) tensor, float32 for lists and of `step_rewards`' dtype for a floating tensor; 0 after the last scored
        end.

    Raises:
        ValueError: unknown option, B not divisible by `group_size`, a reward count that differs from the step count,
            an infinite reward, or step ends that do not increase within `range(num_tokens)`; the message names the
            completion.
    """
    _check_choice("credit", credit, CREDIT_FORMS)
    _check_choice("std", std, STD_FORMS)
    _check_choice("baseline", baseline, BASELINES)
    if credit == "min" and not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}.")
    rewards, ends, dtype = _as_tensors(step_rewards, step_ends)
    _check_shapes(rewards, ends, group_size, num_tokens)
    if rewards.numel() == 0:
        return torch.zeros(rewards.shape[0], num_tokens, dtype=dtype, device=rewards.device)

    if credit == "min":
        weights = min_form_weights(rewards, tau)
        soft_minima = torch.where(_is_scored(rewards).any(1), (weights * rewards.nan_to_num()).sum(1), torch.nan)
        mean, scale = group_statistics(soft_minima.unsqueeze(1), group_size, std)
        normalized = weights * _scaled(rewards, mean, scale, eps)
    else:
        mean, scale = group_statistics(rewards, group_size, std)
        normalized = _scaled(rewards, mean, scale, eps)
    to_go = discounted_to_go(normalized, gamma)
    if credit == "mean":
        to_go = to_go / discounted_to_go(_is_scored(rewards).to(rewards.dtype), gamma).clamp(
            min=torch.finfo(to_go.dtype).tiny
        )

    advantages = spread_over_tokens(to_go, ends, num_tokens)
    if baseline == "leave_one_out":
        advantages = _subtract_others_mean(advantages, group_size) * _before_last_scored_end(rewards, ends, num_tokens)
    if zero_delimiters:
        advantages = advantages.masked_fill(_delimiter_tokens(ends, num_tokens), 0.0)
    return advantages.to(dtype)


def mix_advantages(
    outcome: torch.Tensor, process: torch.Tensor, outcome_weight: float = 1.0, process_weight: float = 1.0
) -> torch.Tensor:
    """A = outcome_weight * A_outcome + process_weight * A_process, each normalised on its own.

    Args:
        outcome: (B,) one advantage per completion.
        process: (B, T) one per token.

    Returns:
        (B, T).
    """
    return outcome_weight * outcome.unsqueeze(1) + process_weight * process


def group_statistics(rewards: torch.Tensor, group_size: int, std: str = "sample") -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of all scored rewards of each row's group.

    Args:
        rewards: (B, J), NaN where not scored.

    Returns:
        Two (B, 1) tensors. The standard deviation is exactly 0 where a group's rewards are all equal or fewer than
        two.
    """
    grouped = rewards.view(rewards.shape[0] // group_size, -1)
    scored = _is_scored(grouped)
    count = scored.sum(1, keepdim=True)
    mean = torch.where(scored, grouped, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    squares = torch.where(scored, (grouped - mean) ** 2, 0.0).sum(1, keepdim=True)
    deviation = (squares / (count - int(std == "sample")).clamp(min=1)).sqrt()
    highest = torch.where(scored, grouped, -torch.inf).amax(1, keepdim=True)
    lowest = torch.where(scored, grouped, torch.inf).amin(1, keepdim=True)
    deviation = torch.where(highest > lowest, deviation, 0.0)
    return mean.repeat_interleave(group_size, 0), deviation.repeat_interleave(group_size, 0)


def min_form_weights(rewards: torch.Tensor, tau: float) -> torch.Tensor:
    """softmax(-r / tau) over the scored steps of each row (arXiv 2504.15275, eq. 7); 0 where not scored.

    Args:
        rewards: (B, J), NaN where not scored.

    Returns:
        (B, J); the sum of weights * rewards tends to the smallest reward of the row as tau goes to 0.
    """
    return torch.softmax(torch.where(_is_scored(rewards), -rewards / tau, -torch.inf), dim=1).nan_to_num()


def discounted_to_go(values: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """(B, J) -> (B, J): sum over k >= j of gamma**(k - j) * values[:, k]."""
    if gamma == 1.0:
        return values.flip(1).cumsum(1).flip(1)
    steps = torch.arange(values.shape[1], device=values.device)
    lag = steps.unsqueeze(1) - steps
    return values @ torch.where(lag >= 0, gamma ** lag.clamp(min=0).to(values.dtype), 0.0)


def spread_over_tokens(step_values: torch.Tensor, step_ends: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Gives each token the value of the step it lies in, 0 after the last step.

    Args:
        step_values: (B, J).
        step_ends: (B, J) inclusive ends, -1 where there is no step.

    Returns:
        (B, T).
    """
    is_end = _end_marks(step_ends, num_tokens)
    step_of_token = is_end.cumsum(1) - is_end
    return torch.nn.functional.pad(step_values, (0, 1)).gather(1, step_of_token)


def _scaled(rewards, mean, deviation, eps):
    """(r - mean) / (std + eps) with 0 for steps that are not scored and for groups with std 0."""
    usable = _is_scored(rewards) & (deviation > 0)
    return torch.where(usable, (rewards - mean) / torch.where(deviation > 0, deviation + eps, 1.0), 0.0)


def _is_scored(rewards):
    return ~torch.isnan(rewards)


def _end_marks(step_ends, num_tokens):
    """(B, T) long: 1 at the last token of each step. Missing steps (-1) land in an extra column that is cut off."""
    marks = torch.zeros(step_ends.shape[0], num_tokens + 1, dtype=torch.long, device=step_ends.device)
    marks.scatter_(1, torch.where(step_ends < 0, num_tokens, step_ends), 1)
    return marks[:, :num_tokens]


def _before_last_scored_end(rewards, step_ends, num_tokens):
    last = torch.where(_is_scored(rewards), step_ends, -1).amax(1, keepdim=True)
    return torch.arange(num_tokens, device=rewards.device) <= last


def _delimiter_tokens(step_ends, num_tokens):
    last = step_ends.amax(1, keepdim=True)
    return _end_marks(torch.where(step_ends == last, -1, step_ends), num_tokens).bool()


def _subtract_others_mean(advantages, group_size):
    if group_size < 2:
        raise ValueError("baseline='leave_one_out' needs groups of at least 2 outputs.")
    grouped = advantages.view(-1, group_size, advantages.shape[1])
    others = (grouped.sum(1, keepdim=True) - grouped) / (group_size - 1)
    return (grouped - others).view_as(advantages)


def _as_tensors(step_rewards, step_ends):
    """(B, J) rewards (NaN = no score), (B, J) ends (-1 = no step) and the dtype of the result."""
    if isinstance(step_rewards, torch.Tensor):
        dtype = step_rewards.dtype if step_rewards.is_floating_point() else torch.float32
        rewards = step_rewards.to(dtype)
    else:
        dtype = torch.float32
        rewards = pad_step_values(step_rewards, torch.nan, torch.float64)
    if isinstance(step_ends, torch.Tensor):
        ends = step_ends.long()
    else:
        ends = pad_step_values(step_ends, -1, torch.long)
        if not isinstance(step_rewards, torch.Tensor):
            for i, (row_rewards, row_ends) in enumerate(zip(step_rewards, step_ends, strict=False)):
                if len(row_rewards) != len(row_ends):
                    raise ValueError(
                        f"Completion {i} has {len(row_rewards)} step rewards but {len(row_ends)} step ends; give one "
                        "reward (or None) per step."
                    )
    return rewards, ends.to(rewards.device), dtype


def pad_step_values(rows: Sequence[Sequence], padding_value: float, dtype: torch.dtype) -> torch.Tensor:
    """Lists of different lengths -> (B, J) tensor padded on the right; None becomes the padding value."""
    width = max((len(row) for row in rows), default=0)
    padded = [[padding_value if x is None else x for x in row] + [padding_value] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=dtype).view(len(rows), width)


def _check_choice(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def _check_shapes(rewards, ends, group_size, num_tokens):
    if rewards.shape != ends.shape:
        raise ValueError(
            f"step_rewards {tuple(rewards.shape)} and step_ends {tuple(ends.shape)} differ; both have one row per "
            "completion and one entry per step."
        )
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(f"{rewards.shape[0]} completions cannot be cut into groups of {group_size}.")
    if torch.isinf(rewards).any():
        raise ValueError(f"Completion {torch.isinf(rewards).any(1).nonzero()[0].item()} has an infinite step reward.")
    previous = torch.nn.functional.pad(ends[:, :-1], (1, 0), value=-1)
    bad = (ends >= 0) & (ends <= previous) | (ends >= num_tokens) | (_is_scored(rewards) & (ends < 0))
    if bad.any():
        row = bad.any(1).nonzero()[0].item()
        raise ValueError(
            f"Step ends of completion {row} must increase within 0 ... {num_tokens - 1} and exist for every reward; "
            f"got {[end for end in ends[row].tolist() if end >= 0]}."
        )
