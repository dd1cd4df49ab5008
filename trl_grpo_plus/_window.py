"""The optimizer window: all micro-batches of one optimizer step, on all ranks, and the loss weights that it gives."""

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
from accelerate import Accelerator

from trl_grpo_plus.algorithms.normalization import sequence_scales

SCALE, GROUP = "plus_loss_scale", "plus_group"


def trained_tokens(inputs: dict[str, Any]) -> torch.Tensor:
    """(B, T) 1 on the tokens that TRL trains on."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


class OptimizerWindow:
    """
    Prepares the micro-batches of a whole window at its first step, so that their token totals are known before the
    first loss is computed, and gives each sequence its weight.

    This is no more generation than before: the policy does not change inside a window. What the window prepares is
    what TRL's `_prepare_inputs` returns step by step, so `steps_per_generation` may be equal to, above or below
    `gradient_accumulation_steps`, and the last window of an epoch may be short.

    Args:
        mode: one of `LOSS_NORMALIZATIONS`.
        max_length: L of `constant`.
        accelerator: of the trainer.
    """

    def __init__(self, mode: str, max_length: int | None, accelerator: Accelerator):
        self.mode, self.max_length, self.accelerator = mode, max_length, accelerator
        self._raw: list | None = None
        self._ready: dict[int, dict] = {}
        self._generations = 0

    def begin(self, batches: list) -> None:
        """The trainer has fetched the raw batches of the next window."""
        self._raw, self._ready = batches, {}

    def label_groups(self, output: dict[str, Any], group_size: int) -> None:
        """Marks the local rows of a generation batch with their group, before TRL shuffles them."""
        local = len(output["completion_ids"])
        row = self.accelerator.process_index * local + torch.arange(local, device=output["completion_ids"].device)
        offset = self._generations * self.accelerator.num_processes * local
        output[GROUP] = offset + torch.div(row, group_size, rounding_mode="floor")
        self._generations += 1

    def next(self, trainer, batch, prepare: Callable) -> dict[str, Any]:
        """The prepared micro-batch of the trainer's current step; `prepare` is TRL's `_prepare_inputs`."""
        if trainer._step not in self._ready:
            self._prepare_window(trainer, batch, prepare)
        return self._ready.pop(trainer._step)

    def _prepare_window(self, trainer, batch, prepare):
        raw = self._raw or [batch] + [None] * (trainer.current_gradient_accumulation_steps - 1)
        first, micro_batches = trainer._step, []
        generate_every = trainer.args.steps_per_generation * trainer.num_iterations
        try:
            for offset, raw_batch in enumerate(raw):
                trainer._step = first + offset
                if raw_batch is None and trainer._step % generate_every == 0:
                    raise RuntimeError(
                        "loss_normalization needs the whole optimizer window, but its next generation batch is not "
                        "known: `get_batch_samples` was not called for this window. Drive the trainer by `train()`."
                    )
                micro_batches.append(prepare(raw_batch))
        finally:
            trainer._step = first
        self._raw = None
        scales = self.scales(micro_batches)
        self._ready = {
            first + offset: {**inputs, SCALE: scale}
            for offset, (inputs, scale) in enumerate(zip(micro_batches, scales, strict=True))
        }

    def scales(self, micro_batches: list[dict[str, Any]], group_size: int | None = None) -> list[torch.Tensor]:
        """
        The (B,) weight of a token of each sequence of each micro-batch, such that the sum over all micro-batches and
        ranks of weight times per-token loss is the loss of the window.
        """
        counts = torch.cat([trained_tokens(inputs).sum(dim=1) for inputs in micro_batches])
        groups = torch.zeros_like(counts)
        if self.mode == "group_token":
            groups = torch.cat([self._groups(inputs, group_size) for inputs in micro_batches])
        table = self.accelerator.gather(torch.stack([counts.long(), groups.long()], dim=1))
        # MPS has no float64.
        dtype = torch.float32 if table.device.type == "mps" else torch.float64
        scales = sequence_scales(table[:, 0], self.mode, table[:, 1], self.max_length, dtype)
        first = self.accelerator.process_index * len(counts)
        return list(scales[first : first + len(counts)].split([len(i["completion_mask"]) for i in micro_batches]))

    def _groups(self, inputs, group_size):
        if GROUP in inputs:
            return inputs[GROUP]
        if group_size is None:
            # Made by another `_generate_and_score_completions`, and shuffled: those of one prompt are a group.
            rows = zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
            digests = [blake2b(bytes(str(ids[mask.bool()].tolist()), "ascii"), digest_size=7) for ids, mask in rows]
            return inputs["prompt_ids"].new_tensor([int.from_bytes(digest.digest()) for digest in digests])
        local = len(inputs["completion_mask"])
        row = self.accelerator.process_index * local + torch.arange(local, device=inputs["completion_mask"].device)
        return torch.div(row, group_size, rounding_mode="floor")
