"""KL divergence between the policy and the reference: estimators, reward-to-go, full vocabulary.

Departures from the papers and from TRL. DeepSeekMath (arXiv 2402.03300 eq. 4) puts k3 into the loss; the gradient of
that is the gradient of the *forward* KL on-policy and of nothing in particular off-policy, and like every loss-side
token estimator it drops a token's effect on later states. The functions here keep the pieces apart, so that each
combination's bias is known (`python -m trl_grpo_plus.algorithms.kl_table` prints it):

- estimators on the log-ratio k = log pi - log pi_ref, with the importance weight differentiable or stopped,
- coefficients of the score function, for the KL in the reward: token t pays for the k1 of every later token,
- the exact KL over the vocabulary at each visited state (arXiv 2504.10637).

Shapes: B sequences, T tokens, V vocabulary. `logps` (B, T) are log pi(y_t | s_t) with gradient, `ref_logps` those of
the reference and `old_logps` those of the policy that sampled. `mask` (B, T) is 1 on trained tokens: junk (even NaN)
elsewhere changes nothing. Gradients flow into `logps` only.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

ESTIMATORS = ("k1", "k2", "k3")


def _widen(x: torch.Tensor) -> torch.Tensor:
    """Half precision cannot hold k2 = k²/2 of a log-ratio of 1e4, nor the k3 of a small one: compute in float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _exp_bound(dtype: torch.dtype) -> float:
    # The product of two exponentials at the bound times a log-ratio of 1e4 still is finite in that dtype.
    return 300.0 if dtype == torch.float64 else 35.0


def _bounded_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x) up to the bound and its tangent beyond: finite and rising, so its gradient keeps the right sign."""
    bound = _exp_bound(x.dtype)
    return x.clamp(max=bound).exp() * (1 + (x - bound).clamp(min=0))


def _k3(k: torch.Tensor) -> torch.Tensor:
    # exp(-k) + k - 1 loses all digits of a small k to cancellation, in the value and in the gradient: use its series.
    small = k.abs() < (1e-2 if k.dtype == torch.float64 else 1e-1)
    x = -torch.where(small, k, 0)
    series = x * x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6))))
    large = torch.where(small, 1, k)
    return torch.where(small, series, _bounded_exp(-large) + large - 1)


def kl_estimate(
    logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str = "k3", gradient: str | None = None
) -> torch.Tensor:
    """
    Estimate of KL(pi || pi_ref) from samples of pi: with k = logps - ref_logps,

        k1 = k,    k2 = k² / 2,    k3 = exp(-k) + k - 1

    (http://joschu.net/blog/kl-approx.html). Finite, with finite gradients, for log-ratios of ±1e4 in float32 and
    bfloat16: beyond the exponent 35 (300 in float64) k3 goes on along its tangent.

    Args:
        logps (...): of the sampled tokens (or of whole sequences) under the policy.
        ref_logps (...): the same under the reference; no gradient flows into it.
        estimator: `"k1"`, `"k2"` or `"k3"`.
        gradient: straight-through form: the result has the value of `estimator` and the gradient of this estimator,
            for example `kl_estimate(lp, ref, "k3", gradient="k2")` shows k3 and is trained by k2.

    Returns:
        (...) estimates, in float32 for half-precision input.

    Raises:
        ValueError: for an unknown estimator.
    """
    k = _widen(logps) - _widen(ref_logps.detach())
    if gradient is not None and gradient != estimator:
        surrogate = kl_estimate(logps, ref_logps, gradient)
        return kl_estimate(logps.detach(), ref_logps, estimator) + (surrogate - surrogate.detach())
    if estimator == "k1":
        return k
    if estimator == "k2":
        return k.square() / 2
    if estimator == "k3":
        return _k3(k)
    raise ValueError(f"Unknown KL estimator {estimator!r}: choose one of {', '.join(ESTIMATORS)}.")


def importance_weights(log_ratio: torch.Tensor, truncation: float | None = None) -> torch.Tensor:
    """exp(log_ratio), at most `truncation` and at most the dtype's bound; above the cap it is a constant."""
    log_ratio = _widen(log_ratio)
    cap = torch.tensor(_exp_bound(log_ratio.dtype), dtype=log_ratio.dtype, device=log_ratio.device)
    if truncation is not None:
        cap = cap.clamp(max=torch.tensor(truncation, dtype=cap.dtype, device=cap.device).log())
    return torch.minimum(log_ratio, cap).exp()


def kl_loss(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    old_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    estimator: str = "k3",
    importance: str = "none",
    horizon: str = "token",
) -> torch.Tensor:
    """
    Per-token KL losses, for `kl_placement="loss"`.

    With w = exp(logps - old_logps): `importance="none"` gives est(k), `"differentiable"` w·est(k) with the gradient
    through w too, `"stopped"` sg(w)·est(k). `horizon="token"` treats each token as one categorical, and so drops its
    effect on later states; `"sequence"` treats the whole sequence as one: k and log w are summed over its tokens
    before the estimator, and each token gets 1/n of the result, so that sums over a sequence agree between the two
    forms. For one categorical, and hence for the sequence form of whole sequences, k1 and k3 with `"differentiable"`
    and k2 with `"stopped"` have the exact gradient of KL(pi || pi_ref) off-policy.

    Args:
        logps, ref_logps, old_logps, mask (B, T): see the module.
        estimator: as in `kl_estimate`.
        importance: `"none"`, `"differentiable"` or `"stopped"`.
        horizon: `"token"` or `"sequence"`.

    Returns:
        (B, T), 0 where the mask is 0.

    Raises:
        ValueError: for an unknown option.
    """
    logps, ref_logps, old_logps = _masked(mask, logps, ref_logps.detach(), old_logps.detach())
    log_ratio, log_weight = logps - ref_logps, logps - old_logps
    if horizon == "sequence":
        log_ratio, log_weight = log_ratio.sum(-1, keepdim=True), log_weight.sum(-1, keepdim=True)
    elif horizon != "token":
        raise ValueError(f"Unknown horizon {horizon!r} of a KL loss: choose 'token' or 'sequence'.")
    kl = kl_estimate(log_ratio, torch.zeros_like(log_ratio), estimator)
    if importance == "differentiable":
        kl = importance_weights(log_weight) * kl
    elif importance == "stopped":
        kl = importance_weights(log_weight).detach() * kl
    elif importance != "none":
        raise ValueError(f"Unknown importance {importance!r}: choose 'none', 'differentiable' or 'stopped'.")
    if horizon == "sequence":
        kl = kl / (mask != 0).sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask != 0, kl, 0)


def reward_to_go(values: torch.Tensor, mask: torch.Tensor | None = None, inclusive: bool = True) -> torch.Tensor:
    """
    Sum over t' >= t (t' > t when not `inclusive`) of values[:, t'], over trained tokens.

    Args:
        values (B, T).
        mask (B, T): tokens with 0 add nothing and get 0.
        inclusive: whether the token itself is in its sum.

    Returns:
        (B, T)
    """
    if mask is not None:
        (values,) = _masked(mask, values)
    to_go = values.flip(-1).cumsum(-1).flip(-1)
    if not inclusive:
        to_go = to_go - values
    return to_go if mask is None else torch.where(mask != 0, to_go, 0)


def per_decision_weights(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    mask: torch.Tensor,
    truncation: float | None = None,
    inclusive: bool = True,
) -> torch.Tensor:
    """
    Products of importance weights along the prefix: prod over s <= t of w_s (s < t when not `inclusive`), without
    gradient.

    The product is taken as a sum of logarithms. `truncation` caps it, which bounds the variance and biases the result.

    Args:
        logps, old_logps, mask (B, T): see the module. Tokens with mask 0 count as w = 1.
        truncation: largest allowed product.
        inclusive: whether w_t itself is in the product.

    Returns:
        (B, T)
    """
    logps, old_logps = _masked(mask, logps.detach(), old_logps.detach())
    log_ratio = logps - old_logps
    total = log_ratio.cumsum(-1)
    return importance_weights(total if inclusive else total - log_ratio, truncation)


def kl_score_coefficients(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    old_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    coefficient: str = "current",
    importance: str = "none",
    horizon: str = "to_go",
    truncation: float | None = None,
) -> torch.Tensor:
    """
    C_t of the score function, for `kl_placement="reward"`: the KL's part of the loss is sum over t of sg(C_t)·log
    pi_t.

    With k1_t = log pi_t - log pi_ref,t (or log pi_old,t - log pi_ref,t for `coefficient="old"`), w_t = pi_t /
    pi_old,t and rho_t = prod over s <= t of w_s:

    | importance | horizon | C_t | exact gradient of the sequence KL |
    |---|---|---|---|
    | none | token | k1_t | no: drops the effect on later states |
    | none | to_go | sum over t' >= t of k1_t' | on-policy |
    | none | sequence | sum over all t' of k1_t' | on-policy, with more variance |
    | token | to_go | w_t · sum over t' >= t of k1_t' | on-policy, and for sequences of one token |
    | per_decision | to_go | sum over t' >= t of rho_t' · k1_t' | on- and off-policy |
    | per_decision | sequence | sum over all t' of rho_max(t, t') · k1_t' | on- and off-policy, with more variance |

    A token that was sampled from pi_old and precedes t' is in the weight of k1_t', and so is t itself: hence the
    maximum in the last line. `truncation` caps w_t or rho_t and biases the off-policy gradient.

    Args:
        logps, ref_logps, old_logps, mask (B, T): see the module.
        coefficient: `"current"` or `"old"`.
        importance: `"none"`, `"token"` or `"per_decision"`.
        horizon: `"token"`, `"to_go"` or `"sequence"`.
        truncation: cap of the importance weights.

    Returns:
        (B, T) without gradient, 0 where the mask is 0.

    Raises:
        ValueError: for an unknown option.
    """
    logps, ref_logps, old_logps = _masked(mask, logps.detach(), ref_logps.detach(), old_logps.detach())
    if coefficient not in ("current", "old"):
        raise ValueError(f"Unknown coefficient {coefficient!r}: choose 'current' or 'old'.")
    k1 = (logps if coefficient == "current" else old_logps) - ref_logps
    if importance not in ("none", "token", "per_decision"):
        raise ValueError(f"Unknown importance {importance!r}: choose 'none', 'token' or 'per_decision'.")
    if horizon not in ("token", "to_go", "sequence"):
        raise ValueError(f"Unknown horizon {horizon!r}: choose 'token', 'to_go' or 'sequence'.")

    if importance == "per_decision":
        rho = per_decision_weights(logps, old_logps, mask, truncation)
        weighted = rho * k1
        if horizon == "token":
            coefficients = weighted
        else:
            coefficients = reward_to_go(weighted)
            if horizon == "sequence":
                coefficients = coefficients + rho * (k1.cumsum(-1) - k1)
    else:
        if horizon == "token":
            coefficients = k1
        elif horizon == "to_go":
            coefficients = reward_to_go(k1)
        else:
            coefficients = k1.sum(-1, keepdim=True).expand_as(k1)
        if importance == "token":
            coefficients = importance_weights(logps - old_logps, truncation) * coefficients
    return torch.where(mask != 0, coefficients, 0)


def _masked(mask: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # `where`, not a product: 0 * NaN is NaN.
    return tuple(torch.where(mask != 0, _widen(x), 0) for x in tensors)


# --- Over the whole vocabulary ---------------------------------------------------------------------------------------


def _logsumexp(z: torch.Tensor) -> torch.Tensor:
    """(n, v) -> (n,), by column blocks: `logsumexp` makes a temporary as large as its input."""
    return torch.stack([z[:, columns].logsumexp(-1) for columns in _blocks(z)]).logsumexp(0)


def _mean_difference(weights: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(n, v) each -> (n,) sum over v of exp(weights)·(a - b), by column blocks; any two may be the same tensor."""
    return sum((weights[:, c].exp() * (a[:, c] - b[:, c])).sum(-1) for c in _blocks(weights))


def _blocks(z: torch.Tensor):
    return _chunks(z.shape[1], max(64, z.shape[1] // 32))


def _kl_and_grad(z: torch.Tensor, z_ref: torch.Tensor, direction: str, want_grad: bool) -> torch.Tensor:
    """
    KL of one chunk of scaled logits, and its gradient with respect to `z` written into `z`. Both are overwritten, and
    nothing else of their size is made.

    reverse: KL = sum_v p_v (log p_v - log q_v),  dKL/dz_v = p_v (log p_v - log q_v - KL)
    forward: KL = sum_v q_v (log q_v - log p_v),  dKL/dz_v = p_v - q_v
    """
    z.sub_(_logsumexp(z).unsqueeze(-1))
    z_ref.sub_(_logsumexp(z_ref).unsqueeze(-1))
    kl = _mean_difference(z, z, z_ref) if direction == "reverse" else _mean_difference(z_ref, z_ref, z)
    if want_grad:
        _grad_from_logps_(z, z_ref, kl, direction)
    return kl


def _grad_from_logps_(logp: torch.Tensor, logq: torch.Tensor, kl: torch.Tensor, direction: str) -> torch.Tensor:
    """Overwrites `logp` (n, v) with dKL/dz, and spoils `logq`."""
    if direction == "reverse":
        logq.sub_(logp).neg_().sub_(kl.unsqueeze(-1))
        return logp.exp_().mul_(logq)
    return logp.exp_().sub_(logq.exp_())


def _check_direction(direction: str) -> None:
    if direction not in ("reverse", "forward"):
        raise ValueError(f"Unknown direction {direction!r}: choose 'reverse' (policy || reference) or 'forward'.")


class _FullVocabKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ref_logits, direction, chunk_size):
        ctx.save_for_backward(logits, ref_logits)
        ctx.direction, ctx.chunk_size = direction, chunk_size
        out = logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))
        for rows in _chunks(len(logits), chunk_size):
            z, z_ref = _widen(logits[rows]).clone(), _widen(ref_logits[rows]).clone()
            out[rows] = _kl_and_grad(z, z_ref, direction, want_grad=False)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        logits, ref_logits = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for rows in _chunks(len(logits), ctx.chunk_size):
            z, z_ref = _widen(logits[rows]).clone(), _widen(ref_logits[rows]).clone()
            _kl_and_grad(z, z_ref, ctx.direction, want_grad=True)
            grad[rows] = z.mul_(grad_out[rows].unsqueeze(-1)).to(grad.dtype)
        return grad, None, None, None


def _chunks(length: int, size: int):
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def full_vocab_kl(
    logits: torch.Tensor, ref_logits: torch.Tensor, direction: str = "reverse", chunk_size: int = 128
) -> torch.Tensor:
    """
    Exact KL between two categorical distributions over the vocabulary, from their logits.

    Walks over the positions in chunks and recomputes them in the backward pass: beside the logits and their gradient,
    no
    more than two tensors of `chunk_size` x V are alive.

    Args:
        logits (..., V): of the policy, already divided by the temperature.
        ref_logits (..., V): of the reference; no gradient flows into it.
        direction: `"reverse"` is KL(pi || pi_ref), `"forward"` KL(pi_ref || pi).
        chunk_size: positions in a chunk.

    Returns:
        (...) KL in nats, float32 for half-precision input.

    Raises:
        ValueError: for an unknown direction.
    """
    _check_direction(direction)
    flat = _FullVocabKL.apply(
        logits.reshape(-1, logits.shape[-1]),
        ref_logits.detach().reshape(-1, logits.shape[-1]),
        direction,
        chunk_size,
    )
    return flat.view(logits.shape[:-1])


@dataclass
class VocabHead:
    """
    Projection from hidden states to scaled logits: `softcap·tanh(scale·(h W^T + b) / softcap) / temperature`.

    Args:
        weight (V, H), bias (V,) or None.
        temperature: sampling temperature.
        scale: factor on the raw logits (Cohere, Granite, ...).
        softcap: final logit soft-capping (Gemma) or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: torch.Tensor, columns: slice = slice(None)) -> torch.Tensor:
        """(n, H) -> (n, columns) scaled logits in float32 (float64 for a float64 head), a fresh tensor."""
        bias = None if self.bias is None else self.bias[columns]
        z = F.linear(hidden.to(self.weight.dtype), self.weight[columns], bias)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if self.softcap is not None:
            return z.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        factor = self.scale / self.temperature
        return z if factor == 1.0 else z.mul_(factor)

    def raw_grad_(self, grad: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
        """Turns, in place, the gradient with respect to the scaled logits `z` into that of `h W^T + b`."""
        factor = self.scale / self.temperature
        if self.softcap is not None:
            grad.mul_(1 - (z * (self.temperature / self.softcap)).square_())
        return grad if factor == 1.0 else grad.mul_(factor)


class _WeightedVocabKL(torch.autograd.Function):
    """sum over n of coefficients[n]·KL_n; the coefficients are known, so the forward pass makes the gradients."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, coefficients, head, reference, direction, token_chunk, vocab_chunk, grads):
        want_hidden, want_weight, want_bias = (g and grads for g in ctx.needs_input_grad[:3])
        acc = torch.promote_types(weight.dtype, torch.float32)
        kl = torch.empty(len(hidden), dtype=acc, device=hidden.device)
        d_hidden = torch.zeros(hidden.shape, dtype=acc, device=hidden.device) if want_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=acc, device=weight.device) if want_weight else None
        d_bias = torch.zeros(bias.shape, dtype=acc, device=weight.device) if want_bias else None
        head = VocabHead(weight, bias, head.temperature, head.scale, head.softcap)
        want = want_hidden or want_weight or want_bias

        def accumulate(rows, columns, grad, z):
            """`grad` (n, v): gradient of the scaled logits `z`, already times the coefficients."""
            grad = head.raw_grad_(grad, z)
            if want_bias:
                d_bias[columns] += grad.sum(0)
            h = hidden[rows]
            if want_hidden:
                d_hidden[rows] += (grad.to(weight.dtype) @ weight[columns]).to(acc)
            if want_weight:
                d_weight[columns].addmm_(grad.t(), h.to(acc))

        for rows in _chunks(len(hidden), token_chunk):
            scale = coefficients[rows].to(acc).unsqueeze(-1)
            kl[rows] = reference.chunk(head, hidden[rows], rows, scale, direction, vocab_chunk, want, accumulate)
        ctx.has = (want_hidden, want_weight, want_bias)
        ctx.save_for_backward(*(g for g in (d_hidden, d_weight, d_bias) if g is not None))
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(kl)
        return (coefficients.to(acc) * kl).sum(), kl

    @staticmethod
    def backward(ctx, grad_loss, _):
        saved = iter(ctx.saved_tensors)
        grads = [
            (next(saved) * grad_loss).to(dtype) if has else None
            for has, dtype in zip(ctx.has, ctx.dtypes, strict=True)
        ]
        return (*grads, *[None] * 7)


@dataclass
class _HiddenReference:
    """The reference by its hidden states (N, H): its logits are made chunk by chunk."""

    hidden: torch.Tensor
    head: VocabHead

    def chunk(self, head, hidden, rows, scale, direction, vocab_chunk, want, accumulate):
        vocab = len(head.weight)
        if vocab_chunk is None or vocab_chunk >= vocab:
            z = head.logits(hidden)
            scaled = z.clone() if want and head.softcap is not None else None
            kl = _kl_and_grad(z, self.head.logits(self.hidden[rows]), direction, want)
            if want:
                accumulate(rows, slice(None), z.mul_(scale), scaled)
            return kl
        return self._two_passes(head, hidden, rows, scale, direction, vocab_chunk, want, accumulate)

    def _two_passes(self, head, hidden, rows, scale, direction, vocab_chunk, want, accumulate):
        # Pass 1: both logsumexps online, and E[z - z_ref] under the distribution that the KL averages over.
        vocab, ref_hidden = len(head.weight), self.hidden[rows]
        lse = lse_ref = torch.full((len(hidden),), -torch.inf, device=hidden.device)
        mean = torch.zeros((), device=hidden.device)
        for columns in _chunks(vocab, vocab_chunk):
            z, z_ref = head.logits(hidden, columns), self.head.logits(ref_hidden, columns)
            new, new_ref = torch.logaddexp(lse, _logsumexp(z)), torch.logaddexp(lse_ref, _logsumexp(z_ref))
            before, after = (lse, new) if direction == "reverse" else (lse_ref, new_ref)
            z.sub_(new.unsqueeze(-1))
            z_ref.sub_(new_ref.unsqueeze(-1))
            part = _mean_difference(z if direction == "reverse" else z_ref, z, z_ref)
            # `part` measures from the new logsumexps; what is in `mean` still measures from the ones before.
            shift = torch.where(lse.isfinite(), (new - lse) - (new_ref - lse_ref), 0)
            mean = (before - after).exp() * (mean - shift) + part
            lse, lse_ref = new, new_ref
            del z, z_ref
        kl = mean if direction == "reverse" else -mean
        # Pass 2: the gradient, with the logits made again.
        for columns in _chunks(vocab, vocab_chunk) if want else ():
            z, z_ref = head.logits(hidden, columns), self.head.logits(ref_hidden, columns)
            scaled = z.clone() if head.softcap is not None else None
            grad = _grad_from_logps_(z.sub_(lse.unsqueeze(-1)), z_ref.sub_(lse_ref.unsqueeze(-1)), kl, direction)
            accumulate(rows, columns, grad.mul_(scale), scaled)
            del z, z_ref, grad, scaled
        return kl


@dataclass
class _TopKReference:
    """The reference by its k most likely tokens and one bucket for all others."""

    ids: torch.Tensor
    logps: torch.Tensor

    def chunk(self, head, hidden, rows, scale, direction, vocab_chunk, want, accumulate):
        ids, ref_logps = self.ids[rows], _widen(self.logps[rows])
        z = head.logits(hidden)
        scaled = z.clone() if want and head.softcap is not None else None
        z.sub_(z.logsumexp(-1, keepdim=True))
        buckets = _with_tail(z.gather(-1, ids))
        ref_buckets = _with_tail(ref_logps)
        kl, slope = _bucket_kl(buckets, ref_buckets, direction)
        if want:
            # dKL/dz_v = p_v · (slope of v's bucket - mean slope), slope_b = dKL/dP_b
            mean_slope = (buckets.exp() * slope).sum(-1, keepdim=True)
            top = z.gather(-1, ids).exp_() * (slope[:, :-1] - mean_slope)
            z.exp_().mul_(slope[:, -1:] - mean_slope)
            z.scatter_(-1, ids, top)
            accumulate(rows, slice(None), z.mul_(scale), scaled)
        return kl


def _with_tail(top_logps: torch.Tensor) -> torch.Tensor:
    """(n, k) log-probabilities of k tokens -> (n, k + 1) with log(1 - their sum) behind them."""
    tail = (1 - top_logps.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(top_logps.dtype).eps)
    return torch.cat([top_logps, tail.log()], dim=-1)


def _bucket_kl(logp: torch.Tensor, logq: torch.Tensor, direction: str) -> tuple[torch.Tensor, torch.Tensor]:
    if direction == "reverse":
        return (logp.exp() * (logp - logq)).sum(-1), logp - logq
    return (logq.exp() * (logq - logp)).sum(-1), -(logq - logp).exp()


def top_k_kl(logits: torch.Tensor, ref_logits: torch.Tensor, k: int, direction: str = "reverse") -> torch.Tensor:
    """
    KL between the distributions over k + 1 buckets: the reference's k most likely tokens, and all others together.

    Merging tokens can only lose divergence, so this is a lower bound of `full_vocab_kl`; it needs of the reference
    only k numbers a position. At k = V - 1 it is exact.

    Args:
        logits (..., V), ref_logits (..., V): scaled logits; no gradient flows into `ref_logits`.
        k: number of tokens with a bucket of their own, below V.
        direction: as in `full_vocab_kl`.

    Returns:
        (...) KL in nats.

    Raises:
        ValueError: for an unknown direction, or k outside 1 <= k < V.
    """
    _check_direction(direction)
    ids, ref_top = reference_top_k(ref_logits.detach(), k)
    top = _widen(logits).log_softmax(-1).gather(-1, ids)
    return _bucket_kl(_with_tail(top), _with_tail(_widen(ref_top)), direction)[0]


def reference_top_k(ref_logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities (..., k) of the k most likely tokens of `ref_logits` (..., V)."""
    if not 1 <= k < ref_logits.shape[-1]:
        raise ValueError(f"top-k KL needs 1 <= k < {ref_logits.shape[-1]} (the vocabulary), got k={k}.")
    logps, ids = _widen(ref_logits).log_softmax(-1).topk(k, dim=-1)
    return ids, logps


def weighted_full_vocab_kl(
    hidden: torch.Tensor,
    head: VocabHead,
    coefficients: torch.Tensor,
    *,
    ref_hidden: torch.Tensor | None = None,
    ref_head: VocabHead | None = None,
    ref_top_k: tuple[torch.Tensor, torch.Tensor] | None = None,
    direction: str = "reverse",
    token_chunk: int = 128,
    vocab_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    sum over n of coefficients[n]·KL_n from hidden states, without ever holding the (N, V) logits.

    The gradients of `hidden` and of the head are accumulated while the KL is computed, so each position is projected
    once; at most two tensors of `token_chunk` x V (x `vocab_chunk` when given; the logits are then made twice) are
    alive.

    Args:
        hidden (N, H): hidden states before the policy's head, with gradient.
        head: the policy's head; its weight and bias get gradients when they require them.
        coefficients (N,): constant weight of each position's KL. A position with coefficient 0 still is computed.
        ref_hidden (N, H_ref), ref_head: the reference, or
        ref_top_k: (N, k) token ids and log-probabilities of the reference: bucket KL as in `top_k_kl`.
        direction: as in `full_vocab_kl`.
        token_chunk, vocab_chunk: sizes of a chunk; None takes the whole vocabulary.

    Returns:
        The weighted sum (scalar, with gradient) and the KL of every position (N,), without gradient.

    Raises:
        ValueError: when not exactly one form of the reference is given, or for an unknown direction.
    """
    _check_direction(direction)
    if (ref_hidden is None) == (ref_top_k is None) or (ref_hidden is not None and ref_head is None):
        raise ValueError("Give the reference as ref_hidden with ref_head, or as ref_top_k, and not both.")
    if ref_hidden is not None:
        frozen = VocabHead(
            ref_head.weight.detach(),
            None if ref_head.bias is None else ref_head.bias.detach(),
            ref_head.temperature,
            ref_head.scale,
            ref_head.softcap,
        )
        reference = _HiddenReference(ref_hidden.detach(), frozen)
    else:
        reference = _TopKReference(ref_top_k[0], ref_top_k[1].detach())
    return _WeightedVocabKL.apply(
        hidden,
        head.weight,
        head.bias,
        coefficients.detach(),
        head,
        reference,
        direction,
        token_chunk,
        vocab_chunk,
        torch.is_grad_enabled(),
    )


def full_vocab_score_coefficients(kl: torch.Tensor, prefix_weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Coefficients of the score term that joins `sum over t of rho_t·KL_t(s_t)`: token t pays for the states after it,

        C_t = sum over t' > t of rho_t' · KL_t'(s_t'),    rho_t' = prod over s < t' of w_s

    (arXiv 2504.10637, the Rao-Blackwellised gradient). With the prefix weights the sum of both is the exact gradient
    of the sequence KL off-policy too; on-policy they are 1.

    Args:
        kl (B, T): KL at each visited state.
        prefix_weights (B, T): `per_decision_weights(..., inclusive=False)`, or ones.
        mask (B, T).

    Returns:
        (B, T) without gradient.
    """
    return reward_to_go(kl.detach() * prefix_weights, mask, inclusive=False)


# --- Adaptive coefficient --------------------------------------------------------------------------------------------


@dataclass
class AdaptiveKLController:
    """
    Proportional controller of the KL coefficient (arXiv 1909.08593 §2.2, the one of PPO for language models).

    `update(kl, n)` multiplies the coefficient by 1 + clip(kl / target - 1, ±0.2)·n / horizon.

    Args:
        coefficient: starts here.
        target: wanted KL, in the unit of the values given to `update`.
        horizon: number of sequences over which an error of 20 % changes the coefficient by 20 %.
    """

    coefficient: float
    target: float
    horizon: int = 10_000

    def update(self, kl: float, num_sequences: int) -> float:
        """Returns the new coefficient after `num_sequences` sequences with a mean KL of `kl`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_sequences / self.horizon
        return self.coefficient
