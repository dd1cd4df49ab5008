"""Weights of the per-token losses: `loss = sum(weights * per_token_loss)`.

Departure from TRL: its `loss_type` names the surrogate *and* its normaliser, and takes the mean of each micro-batch
on its
own, so the gradient depends on how a batch is cut. Here the normaliser is chosen on its own, and it is a property of
the whole optimizer window (every micro-batch of one optimizer step, on every rank): the functions take the token
counts of all of the window's sequences and give each sequence the weight of one of its tokens.

| mode | loss | paper |
|---|---|---|
| `sequence` | mean over sequences of the mean over their tokens | GRPO, arXiv 2402.03300 eq. 3 |
| `token` | mean over all tokens | DAPO as implemented (arXiv 2503.14476), SimpleRL |
| `group_token` | mean over groups of the mean over the group's tokens | DAPO as written, arXiv 2503.14476 eq. 8 |
| `constant` | sum over tokens / (number of sequences * `max_length`) | Dr. GRPO, arXiv 2503.20783 |
"""

import torch

LOSS_NORMALIZATIONS = ("sequence", "token", "group_token", "constant")


def sequence_scales(
    token_counts: torch.Tensor,
    mode: str,
    group_ids: torch.Tensor | None = None,
    max_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """
    Weight of one trained token of each sequence of an optimizer window. All four normalisers are constant along a
    sequence, so the (B, T) weights are `mask * scales[:, None]`.

    A sequence (or group) without a single trained token is in no denominator of `sequence`, `token` and `group_token`,
    and its scale is 0. `constant` divides by the number of sequences that were sampled, whatever their masks are: it
    is the one that does not depend on the data.

    Args:
        token_counts (N,): number of trained tokens of each of the window's sequences.
        mode: one of `LOSS_NORMALIZATIONS`.
        group_ids (N,): integer that is the same for the sequences of one group and different between groups; needed by
            `group_token` only. The rows may be in any order.
        max_length: the L of `constant`.
        dtype: of the result.

    Returns:
        (N,) scales.

    Raises:
        ValueError: for an unknown mode, or when the mode's `group_ids` or `max_length` is missing.
    """
    counts = token_counts.to(dtype)
    present = token_counts > 0
    if mode == "sequence":
        return torch.where(present, 1 / (counts.clamp(min=1) * present.sum().clamp(min=1)), 0)
    if mode == "token":
        return torch.where(present, 1 / counts.sum().clamp(min=1), 0)
    if mode == "group_token":
        if group_ids is None:
            raise ValueError("loss_normalization='group_token' needs the group of every sequence (`group_ids`).")
        _, group = torch.unique(group_ids, return_inverse=True)
        group_counts = counts.new_zeros(len(counts)).index_add_(0, group, counts)
        num_groups = (group_counts > 0).sum().clamp(min=1)
        return torch.where(present, 1 / (group_counts[group].clamp(min=1) * num_groups), 0)
    if mode == "constant":
        if max_length is None or max_length <= 0:
            raise ValueError(
                f"loss_normalization='constant' needs a positive `max_length` (its L, the longest completion), got "
                f"{max_length}."
            )
        return present.to(dtype) / (len(counts) * max_length)
    raise ValueError(f"Unknown loss_normalization {mode!r}: choose one of {', '.join(LOSS_NORMALIZATIONS)}.")


def token_weights(
    mask: torch.Tensor, mode: str, group_size: int | None = None, max_length: int | None = None
) -> torch.Tensor:
    """
    Weights of a window that is one tensor: `loss = (token_weights(mask, mode, G) * per_token_loss).sum()`.

    Args:
        mask (B, T): 1 on trained tokens, 0 elsewhere.
        mode: `"sequence"`, `"token"`, `"group_token"` or `"constant"` (see the module's table).
        group_size: G; the groups are contiguous rows. Needed by `group_token` only.
        max_length: the L of `constant`, needed by it only. T would be the wrong default: it is the longest completion
            of this tensor, so the weights would depend on how the batch is cut.

    Returns:
        (B, T) weights, 0 where the mask is 0, in float32 (float64 for a float64 mask).

    Raises:
        ValueError: for an unknown mode, for `constant` without `max_length`, or for `group_token` when B is not a
            multiple of `group_size`.
    """
    dtype = torch.promote_types(mask.dtype, torch.float32)
    group_ids = None
    if mode == "group_token":
        if not group_size or mask.shape[0] % group_size:
            raise ValueError(
                f"loss_normalization='group_token' needs whole groups: {mask.shape[0]} sequences cannot be cut into "
                f"groups of {group_size}."
            )
        group_ids = torch.arange(mask.shape[0], device=mask.device) // group_size
    trained = mask != 0
    scales = sequence_scales(trained.sum(dim=1), mode, group_ids, max_length, dtype=dtype)
    return trained.to(dtype) * scales.unsqueeze(1)
