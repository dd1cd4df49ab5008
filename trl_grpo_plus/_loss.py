"""What GRPOPlusTrainer adds to TRL's `_compute_loss`: the weights of the tokens and the KL term.

TRL's loss is linear in the per-token losses, and each surrogate is positively homogeneous in the advantage, so a
token's weight is changed by scaling its advantage: no TRL body is copied, and TRL's own normaliser cancels. The KL
term is added outside, from the log-probabilities that TRL's forward pass has just made.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from trl_grpo_plus import _compat
from trl_grpo_plus._kl_plan import KLPlan
from trl_grpo_plus._window import SCALE, OptimizerWindow, trained_tokens
from trl_grpo_plus.algorithms.kl import (
    AdaptiveKLController,
    full_vocab_score_coefficients,
    kl_estimate,
    kl_loss,
    kl_score_coefficients,
    per_decision_weights,
    reference_top_k,
    reward_to_go,
    weighted_full_vocab_kl,
)

_SEE = "this TRL is not among trl_grpo_plus._compat.TESTED_VERSIONS."
REF_HIDDEN, REF_TOP_IDS, REF_TOP_LOGPS = "plus_ref_hidden", "plus_ref_top_ids", "plus_ref_top_logps"


class LossInputs(dict):
    """
    The inputs of one micro-batch, whose `advantages` are made when TRL reads them: by then its forward pass must have
    made the log-probabilities.
    """

    def __init__(self, inputs: dict[str, Any], advantages: Callable[[], torch.Tensor]):
        super().__init__(inputs)
        self._advantages = advantages
        self.were_read = False

    def __getitem__(self, key):
        if key == "advantages":
            self.were_read = True
            return self._advantages()
        return super().__getitem__(key)


class LossTerms:
    """
    The token weights and the KL term of one trainer.

    Args:
        trainer: the `GRPOPlusTrainer`.
        plan: the KL, or None for TRL's own.
        window: the loss normalisation, or None for TRL's own.
        controller: moves the KL coefficient, or None for a fixed `beta`.
    """

    def __init__(
        self,
        trainer,
        plan: KLPlan | None,
        window: OptimizerWindow | None,
        controller: AdaptiveKLController | None = None,
    ):
        self.trainer, self.plan, self.window, self.controller = trainer, plan, window, controller
        self._forward: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._capture, self._only = False, None
        self._head_checked = False
        self._window_totals = torch.zeros(3, dtype=torch.float64)

    @property
    def coefficient(self) -> float:
        """The KL coefficient of the current step."""
        return self.trainer.beta if self.controller is None else self.controller.coefficient

    # --- Forward passes ---------------------------------------------------------------------------------------------

    def log_probs(self, compute: Callable, model, *args, **kwargs):
        """TRL's `_get_per_token_logps_and_entropies`, remembering what the KL term needs of it."""
        if not self._capture or (self._only is not None and model is not self._only):
            return compute(model, *args, **kwargs)
        if not self._needs_hidden:
            out = compute(model, *args, **kwargs)
            self._forward = (out[0], None)
            return out
        logits_to_keep = kwargs["logits_to_keep"] if "logits_to_keep" in kwargs else args[2]
        with _compat.hidden_states(self.trainer.accelerator, model, logits_to_keep) as chunks:
            out = compute(model, *args, **kwargs)
        self._forward = (out[0], torch.cat(chunks))
        return out

    @property
    def _needs_hidden(self) -> bool:
        return self.plan is not None and self.plan.placement == "full_vocab"

    @contextmanager
    def _capturing(self, only=None):
        """Remembers the last forward pass, of the model `only` if one is given."""
        self._forward, self._capture, self._only = None, True, only
        try:
            yield
        finally:
            self._capture = False

    def generate(self, compute: Callable, inputs) -> dict[str, Any]:
        """
        TRL's `_generate_and_score_completions`; for the full vocabulary its reference pass leaves the reference's
        hidden states, or its top-k, in the output, so that the loss needs no second one.
        """
        if not self._needs_hidden:
            return compute(inputs)
        with self._capturing(only=self.trainer.ref_model):
            output = compute(inputs)
        logps, hidden = self._forward or (None, None)
        self._forward = None
        # The reference pass is the last one of the generation step.
        if logps is None or output.get("ref_per_token_logps") is not logps:
            raise RuntimeError(
                "TRL did not compute the reference's log-probabilities last, so kl_placement='full_vocab' has no "
                f"hidden states of the reference; {_SEE}"
            )
        output.update(self._reference_entries(hidden))
        return output

    def _reference_entries(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the loss needs of the reference's hidden states (B, T, H)."""
        if self.plan.top_k is None:
            return {REF_HIDDEN: hidden}
        with torch.no_grad(), _no_autocast(hidden):
            head = _compat.reference_head(self.trainer, hidden.dtype)
            parts = hidden.flatten(0, 1).split(self.plan.token_chunk)
            chunks = [reference_top_k(head.logits(part), self.plan.top_k) for part in parts]
        shape = (*hidden.shape[:2], self.plan.top_k)
        return {
            REF_TOP_IDS: torch.cat([ids for ids, _ in chunks]).view(shape),
            REF_TOP_LOGPS: torch.cat([logps for _, logps in chunks]).view(shape),
        }

    # --- Loss -------------------------------------------------------------------------------------------------------

    def loss(self, compute: Callable, model, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's `_compute_loss` of one micro-batch under our token weights, plus the KL term."""
        trainer, mask = self.trainer, trained_tokens(inputs)
        trl_scale, coefficient = _compat.token_scale(trainer, inputs, mask), self.coefficient
        scale = trl_scale if self.window is None else self._scale(inputs)

        def advantages():
            values = inputs["advantages"]
            if self._forward is None:
                raise RuntimeError(f"TRL's `_compute_loss` reads `advantages` before its forward pass; {_SEE}")
            if self.plan is not None and self.plan.in_advantages:
                values = values.unsqueeze(1) if values.dim() == 1 else values
                values = values - coefficient * self._score_coefficients(inputs, mask)
            if self.window is not None:
                ratio = (scale / trl_scale).to(values.dtype)
                values = values * (ratio if values.dim() == 1 else ratio.unsqueeze(1))
            return values

        view = LossInputs(inputs, advantages)
        beta = trainer.beta
        if self.plan is not None:
            trainer.beta = 0.0
        try:
            with self._capturing():
                loss = compute(model, view)
        finally:
            trainer.beta = beta
        if self._forward is None or not view.were_read:
            raise RuntimeError(
                "TRL's `_compute_loss` no longer makes its log-probabilities by `_get_per_token_logps_and_entropies`, "
                f"or no longer reads `advantages`; {_SEE}"
            )
        if self.plan is not None:
            term, metrics = self._kl_term(model, inputs, mask, scale)
            loss = loss + coefficient * term
            self._log(mask, coefficient, metrics)
        self._forward = None
        return loss

    def _scale(self, inputs) -> torch.Tensor:
        """(B,) weight of one token of each sequence, times the number of ranks over which gradients are averaged."""
        trainer = self.trainer
        if SCALE in inputs:
            return inputs[SCALE] * trainer.accelerator.num_processes
        # Evaluation, or a direct call: the batch is a window of its own.
        training = trainer.model.training
        group_size = trainer.num_generations if training else trainer.num_generations_eval
        (scale,) = self.window.scales([inputs], group_size)
        share = trainer.current_gradient_accumulation_steps if training else 1
        return scale * trainer.accelerator.num_processes / share

    def _logps(self, inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Policy (with gradient), reference, and the policy that sampled, each (B, T)."""
        logps = self._forward[0]
        old = inputs.get("old_per_token_logps")
        return logps, inputs["ref_per_token_logps"], logps.detach() if old is None else old

    def _behaviour(self, inputs, old: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the distribution that the tokens came from: vLLM's own where it has given them."""
        sampling = inputs.get("sampling_per_token_logps")
        trainer = self.trainer
        if sampling is None or (trainer.use_vllm and not trainer.vllm_importance_sampling_correction):
            return old
        # vLLM marks tokens that it could not score with NaN.
        return torch.where(sampling.isnan(), old, sampling)

    def _score_coefficients(self, inputs, mask) -> torch.Tensor:
        logps, ref, old = self._logps(inputs)
        plan = self.plan
        if plan.coefficient == "current":
            old = self._behaviour(inputs, old)
        return kl_score_coefficients(
            logps,
            ref,
            old,
            mask,
            coefficient=plan.coefficient,
            importance=plan.importance,
            horizon=plan.horizon,
            truncation=plan.truncation,
        )

    def _kl_term(self, model, inputs, mask, scale) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The weighted KL loss before the coefficient, and (B, T) values of which the means over tokens are logged."""
        logps, ref, old = self._logps(inputs)
        plan, old = self.plan, self._behaviour(inputs, old)
        weights = torch.where(mask != 0, scale.unsqueeze(1), 0).to(torch.promote_types(logps.dtype, torch.float32))
        safe = torch.where(mask != 0, logps, 0)
        full_kl = to_go = None
        if plan.placement == "loss":
            kl = kl_loss(
                logps, ref, old, mask, estimator=plan.estimator, importance=plan.importance, horizon=plan.horizon
            )
            term = (weights * kl).sum()
        elif plan.placement == "reward":
            to_go = self._score_coefficients(inputs, mask)
            term = logps.new_zeros(()) if plan.in_advantages else (weights * to_go * safe).sum()
        else:
            prefix = torch.ones_like(weights)
            if plan.importance == "per_decision":
                prefix = per_decision_weights(logps, old, mask, plan.truncation, inclusive=False)
            term, full_kl = self._full_vocab(model, inputs, mask, weights * prefix)
            if plan.horizon == "to_go":
                to_go = full_vocab_score_coefficients(full_kl, prefix, mask)
                term = term + (weights * to_go * safe).sum()
        with torch.no_grad():
            safe_ref = torch.where(mask != 0, ref, 0)
            k1 = kl_estimate(safe, safe_ref, "k1")
            metrics = {
                "kl": kl_estimate(safe, safe_ref, "k3"),
                "kl/k1": k1,
                "kl/reward_to_go_mean": reward_to_go(k1, mask) if to_go is None else to_go,
                **({} if full_kl is None else {"kl/full_vocab": full_kl}),
            }
        return term, metrics

    def _full_vocab(self, model, inputs, mask, coefficients) -> tuple[torch.Tensor, torch.Tensor]:
        plan, trained = self.plan, mask != 0
        hidden = self._forward[1][trained]
        with _no_autocast(hidden):
            head = _compat.policy_head(self.trainer, model, hidden.dtype)
            self._check_head(head, inputs, hidden, trained)
            if REF_HIDDEN not in inputs and REF_TOP_IDS not in inputs:
                # Inputs that were made elsewhere: only then does the loss cost a pass of the reference.
                inputs = {**inputs, **self._reference_entries(_compat.reference_hidden_states(self.trainer, inputs))}
            if plan.top_k is None:
                ref_hidden = inputs[REF_HIDDEN][trained]
                ref_head = _compat.reference_head(self.trainer, ref_hidden.dtype)
                reference = {"ref_hidden": ref_hidden, "ref_head": ref_head}
            else:
                reference = {"ref_top_k": (inputs[REF_TOP_IDS][trained], inputs[REF_TOP_LOGPS][trained])}
            term, flat = weighted_full_vocab_kl(
                hidden,
                head,
                coefficients[trained],
                **reference,
                token_chunk=plan.token_chunk,
                vocab_chunk=plan.vocab_chunk,
            )
        return term, torch.zeros_like(coefficients).masked_scatter(trained, flat.to(coefficients.dtype))

    def _check_head(self, head, inputs, hidden, trained) -> None:
        """Once: that our projection gives the log-probabilities that TRL has computed."""
        if self._head_checked or len(hidden) == 0:
            return
        with torch.no_grad():
            few = slice(0, 8)
            ids = inputs["completion_ids"][trained][few].unsqueeze(-1)
            ours = head.logits(hidden[few]).log_softmax(-1).gather(-1, ids).squeeze(-1)
            error = (ours - self._forward[0][trained][few]).abs().max()
        tolerance = 1e-3 if hidden.dtype in (torch.float32, torch.float64) else 0.2
        if not error <= tolerance:
            raise ValueError(
                f"kl_placement='full_vocab' projects hidden states by the model's output embeddings, but gets log-"
                f"probabilities that differ by {error:.3g} from the model's own: its head is not a plain projection. "
                "Use kl_placement='reward'."
            )
        self._head_checked = True

    def state_dict(self) -> dict[str, float]:
        """What moves: the coefficient of the adaptive controller."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.controller.coefficient = state["coefficient"]

    # --- Metrics and the adaptive coefficient ------------------------------------------------------------------------

    @torch.no_grad()
    def _log(self, mask, coefficient: float, values: dict[str, torch.Tensor]) -> None:
        trainer, trained = self.trainer, mask != 0
        mode = "train" if trainer.model.training else "eval"
        counts = [trained.sum(), trained.any(1).sum()]
        local = torch.stack([x.sum().float() for x in (*values.values(), *counts)])
        *sums, tokens, sequences = trainer.accelerator.reduce(local, reduction="sum").tolist()
        for name, total in zip(values, sums, strict=True):
            trainer._metrics[mode][name].append(total / max(tokens, 1.0))
        trainer._metrics[mode]["kl/coef"].append(coefficient)
        if self.controller is not None and mode == "train":
            self._window_totals += torch.tensor([sums[0], tokens, sequences], dtype=torch.float64)
            if trainer.accelerator.sync_gradients:
                total, tokens, sequences = self._window_totals.tolist()
                self.controller.update(total / max(tokens, 1.0), int(sequences))
                self._window_totals.zero_()


def _no_autocast(tensor: torch.Tensor):
    # The head's dtype is chosen by hand; autocast would round the float32 sums of the chunks.
    return torch.autocast(tensor.device.type, enabled=False)
