"""KL functions against hand numbers and float64 references; test_kl_enumeration.py checks their expectations."""

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_grpo_plus.algorithms.kl import (
    AdaptiveKLController,
    VocabHead,
    full_vocab_kl,
    full_vocab_score_coefficients,
    importance_weights,
    kl_estimate,
    kl_loss,
    kl_score_coefficients,
    per_decision_weights,
    reference_top_k,
    reward_to_go,
    top_k_kl,
    weighted_full_vocab_kl,
)

F64 = torch.float64


class PeakMemory(TorchDispatchMode):
    """Bytes of the storages that were allocated inside the context and alive at once, at their peak."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, set()

    def _freed(self, key, size):
        self.live -= size
        self.seen.discard(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in inputs and key not in self.seen:
                    self.seen.add(key)
                    self.live += size
                    weakref.finalize(storage, self._freed, key, size)
        self.peak = max(self.peak, self.live)
        return out


# --- Estimators ------------------------------------------------------------------------------------------------------


def test_estimators_by_hand():
    k = torch.tensor([[0.0, 0.5, -0.25]], dtype=F64)
    zero = torch.zeros_like(k)
    torch.testing.assert_close(kl_estimate(k, zero, "k1"), k)
    torch.testing.assert_close(kl_estimate(k, zero, "k2"), torch.tensor([[0, 0.125, 0.03125]], dtype=F64))
    expected = torch.tensor([[0, math.exp(-0.5) - 0.5, math.exp(0.25) - 1.25]], dtype=F64)
    torch.testing.assert_close(kl_estimate(k, zero, "k3"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("importance", ["none", "differentiable", "stopped"])
@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_huge_log_ratios_stay_finite(dtype, estimator, importance, horizon):
    extremes = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    lp, ref, old = (x.flatten().unsqueeze(1) for x in torch.meshgrid(extremes, extremes, extremes, indexing="ij"))
    lp = lp.to(dtype).requires_grad_()
    value = kl_loss(
        lp,
        ref.to(dtype),
        old.to(dtype),
        torch.ones(len(lp), 1),
        estimator=estimator,
        importance=importance,
        horizon=horizon,
    )
    assert value.isfinite().all()
    # float16 cannot hold the gradient of its own cast, so it is asked of the widened tensor.
    if dtype != torch.float16:
        (grad,) = torch.autograd.grad(value.sum(), lp)
        assert grad.isfinite().all()
    if estimator != "k1":
        assert (value >= 0).all()


def test_k3_keeps_the_sign_of_its_gradient_beyond_the_bound():
    lp = torch.tensor([-1e4, -50.0, -36.0, -34.0, -1.0, 1.0, 1e4], requires_grad=True)
    value = kl_estimate(lp, torch.zeros(7), "k3")
    (grad,) = torch.autograd.grad(value.sum(), lp)
    assert (grad[:5] < 0).all() and (grad[5:] > 0).all()
    assert (value.diff()[:4] < 0).all()


@pytest.mark.parametrize("k", [1e-6, 1e-4, 1e-2, 0.0999, 0.1001, 0.5, -1e-5, -0.05, -0.1001, -3.0])
def test_k3_is_accurate_for_small_log_ratios(k):
    lp = torch.tensor([k], dtype=torch.float32, requires_grad=True)
    value = kl_estimate(lp, torch.zeros(1), "k3")
    (grad,) = torch.autograd.grad(value.sum(), lp)
    x = float(lp.detach())
    exact = sum((-x) ** n / math.factorial(n) for n in range(2, 30))
    assert float(value.detach()) == pytest.approx(exact, rel=2e-6)
    assert float(grad) == pytest.approx(-math.expm1(-x), rel=2e-6)


def test_k3_branches_join_in_float64():
    k = torch.tensor([0.01 - 1e-9, 0.01 + 1e-9, -0.01 - 1e-9, -0.01 + 1e-9], dtype=F64, requires_grad=True)
    value = kl_estimate(k, torch.zeros(4, dtype=F64), "k3")
    (grad,) = torch.autograd.grad(value.sum(), k)
    torch.testing.assert_close(value, torch.exp(-k) + k - 1, rtol=0, atol=1e-15)
    torch.testing.assert_close(grad, -torch.expm1(-k), rtol=1e-11, atol=0)


def test_straight_through_has_the_value_of_one_and_the_gradient_of_the_other():
    lp = torch.tensor([-1.0, -0.2, -3.0], dtype=F64, requires_grad=True)
    ref = torch.tensor([-1.5, -0.4, -2.0], dtype=F64, requires_grad=True)
    value = kl_estimate(lp, ref, "k3", gradient="k2")
    torch.testing.assert_close(value, kl_estimate(lp, ref, "k3"))
    value.sum().backward()
    torch.testing.assert_close(lp.grad, (lp - ref).detach())
    assert ref.grad is None


def test_half_precision_is_widened():
    lp = torch.tensor([-300.0], dtype=torch.float16)
    assert float(kl_estimate(lp, torch.zeros(1, dtype=torch.float16), "k2")) == 45000.0
    assert kl_estimate(lp, torch.zeros(1, dtype=torch.float16), "k2").dtype == torch.float32


def test_unknown_options_are_named():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3"):
        kl_estimate(x, x, "k4")
    with pytest.raises(ValueError, match="importance 'token'"):
        kl_loss(x, x, x, x, importance="token")
    with pytest.raises(ValueError, match="horizon 'to_go'"):
        kl_loss(x, x, x, x, horizon="to_go")
    with pytest.raises(ValueError, match="importance 'stopped'"):
        kl_score_coefficients(x, x, x, x, importance="stopped")
    with pytest.raises(ValueError, match="coefficient 'new'"):
        kl_score_coefficients(x, x, x, x, coefficient="new")
    with pytest.raises(ValueError, match="direction 'sideways'"):
        full_vocab_kl(torch.zeros(1, 3), torch.zeros(1, 3), "sideways")


# --- Weights, reward-to-go, coefficients -----------------------------------------------------------------------------


def test_reward_to_go_by_hand():
    values = torch.tensor([[1.0, 2.0, 4.0, 100.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    assert reward_to_go(values, mask).tolist() == [[7, 6, 4, 0]]
    assert reward_to_go(values, mask, inclusive=False).tolist() == [[6, 4, 0, 0]]
    holes = torch.tensor([[1, 0, 1, 1]])
    assert reward_to_go(values, holes).tolist() == [[105, 0, 104, 100]]


def test_per_decision_weights_by_hand():
    logps = torch.log(torch.tensor([[0.5, 0.2, 0.9]]))
    old = torch.log(torch.tensor([[0.25, 0.4, 0.3]]))
    mask = torch.ones(1, 3)
    torch.testing.assert_close(per_decision_weights(logps, old, mask), torch.tensor([[2.0, 1.0, 3.0]]))
    torch.testing.assert_close(
        per_decision_weights(logps, old, mask, inclusive=False), torch.tensor([[1.0, 2.0, 1.0]])
    )
    torch.testing.assert_close(per_decision_weights(logps, old, mask, truncation=1.5), torch.tensor([[1.5, 1.0, 1.5]]))
    skip = torch.tensor([[1, 0, 1]])
    torch.testing.assert_close(per_decision_weights(logps, old, skip), torch.tensor([[2.0, 2.0, 6.0]]))


def test_a_product_that_leaves_the_bound_can_come_back():
    log_ratio = torch.tensor([[1000.0, -1000.0, 0.5]])
    weights = per_decision_weights(log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio))
    assert weights.isfinite().all()
    torch.testing.assert_close(weights[0, 1:], torch.tensor([1.0, math.exp(0.5)]))


def test_importance_weights_above_the_cap_are_constant():
    log_ratio = torch.tensor([0.5, 2.0, 1e4], requires_grad=True)
    weights = importance_weights(log_ratio, truncation=3.0)
    weights.sum().backward()
    torch.testing.assert_close(weights.detach(), torch.tensor([math.exp(0.5), 3.0, 3.0]))
    torch.testing.assert_close(log_ratio.grad, torch.tensor([math.exp(0.5), 0.0, 0.0]))


def test_score_coefficients_by_hand():
    # k1 = [.1, .2, -.4], w = [2, .5, 3] -> rho = [2, 1, 3]
    ref = torch.tensor([[-1.0, -2.0, -0.5]], dtype=F64)
    logps = ref + torch.tensor([[0.1, 0.2, -0.4]], dtype=F64)
    old = logps - torch.log(torch.tensor([[2.0, 0.5, 3.0]], dtype=F64))
    mask = torch.ones(1, 3)

    def coefficients(**kwargs):
        return kl_score_coefficients(logps, ref, old, mask, **kwargs)[0].tolist()

    assert coefficients(horizon="token") == pytest.approx([0.1, 0.2, -0.4])
    assert coefficients(horizon="to_go") == pytest.approx([-0.1, -0.2, -0.4])
    assert coefficients(horizon="sequence") == pytest.approx([-0.1] * 3)
    assert coefficients(importance="token") == pytest.approx([-0.2, -0.1, -1.2])
    # rho * k1 = [.2, .2, -1.2]
    assert coefficients(importance="per_decision") == pytest.approx([-0.8, -1.0, -1.2])
    # t=0: the same; t=1: + rho_1·.1; t=2: + rho_2·(.1 + .2)
    assert coefficients(importance="per_decision", horizon="sequence") == pytest.approx([-0.8, -0.9, -0.3])
    assert coefficients(importance="per_decision", truncation=2.0) == pytest.approx([-0.4, -0.6, -0.8])
    expected_old = (old - ref)[0]
    assert coefficients(coefficient="old") == pytest.approx(expected_old.flip(0).cumsum(0).flip(0).tolist())


def test_on_policy_all_importance_weights_agree():
    torch.manual_seed(0)
    logps, ref = torch.randn(2, 4, 7, dtype=F64)
    mask = (torch.rand(4, 7) > 0.3).long()
    base = {
        horizon: kl_score_coefficients(logps, ref, logps, mask, horizon=horizon)
        for horizon in ("token", "to_go", "sequence")
    }
    for horizon, expected in base.items():
        for importance in ("token", "per_decision"):
            got = kl_score_coefficients(logps, ref, logps, mask, importance=importance, horizon=horizon)
            torch.testing.assert_close(got, expected)
        got = kl_score_coefficients(logps, ref, logps, mask, coefficient="old", horizon=horizon)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("junk", [1e9, float("nan"), float("-inf")])
def test_junk_at_padded_positions_changes_nothing(junk):
    torch.manual_seed(0)
    clean = torch.randn(3, 2, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 0]])
    dirty = torch.where(mask.bool(), clean, junk)

    def everything(tensors):
        lp, ref, old = tensors
        lp = lp.clone().requires_grad_()
        out = [
            kl_loss(lp, ref, old, mask, estimator=e, importance="differentiable", horizon=h)
            for e in ("k1", "k2", "k3")
            for h in ("token", "sequence")
        ]
        grads = torch.autograd.grad(sum(x.sum() for x in out), lp)
        coefficients = [
            kl_score_coefficients(lp, ref, old, mask, importance=i, horizon=h)
            for i in ("none", "token", "per_decision")
            for h in ("token", "to_go", "sequence")
        ]
        return [*out, *grads, *coefficients, full_vocab_score_coefficients(ref, torch.ones(2, 5), mask)]

    for got, expected in zip(everything(dirty), everything(clean), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


# --- Over the whole vocabulary ---------------------------------------------------------------------------------------


def plain_kl(logits, ref_logits, direction):
    lp, lq = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (lp.exp() * (lp - lq)).sum(-1) if direction == "reverse" else (lq.exp() * (lq - lp)).sum(-1)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("chunk_size", [1, 4, 128])
def test_full_vocab_kl_equals_the_plain_sum(direction, chunk_size):
    torch.manual_seed(0)
    logits = (5 * torch.randn(2, 5, 11, dtype=F64)).requires_grad_()
    ref = 5 * torch.randn(2, 5, 11, dtype=F64)
    weights = torch.randn(2, 5, dtype=F64)
    expected = plain_kl(logits, ref, direction)
    got = full_vocab_kl(logits, ref, direction, chunk_size)
    torch.testing.assert_close(got, expected)
    (expected_grad,) = torch.autograd.grad((weights * expected).sum(), logits)
    (grad,) = torch.autograd.grad((weights * got).sum(), logits)
    torch.testing.assert_close(grad, expected_grad)
    assert (got >= 0).all()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_full_vocab_kl_of_far_apart_distributions_stays_finite(direction):
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    kl = full_vocab_kl(logits, -logits.detach(), direction)
    (grad,) = torch.autograd.grad(kl.sum(), logits)
    assert kl.isfinite().all() and grad.isfinite().all()


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_top_k_is_a_lower_bound_and_exact_when_one_token_is_left(k, direction):
    torch.manual_seed(0)
    logits, ref = 3 * torch.randn(2, 6, 11, dtype=F64)
    full, bound = full_vocab_kl(logits, ref, direction), top_k_kl(logits, ref, k, direction)
    assert (bound <= full + 1e-12).all() and (bound >= -1e-12).all()
    if k == 10:
        torch.testing.assert_close(bound, full)
    else:
        assert (bound < full - 1e-6).any()


def test_top_k_by_hand():
    ref = torch.log(torch.tensor([[0.5, 0.3, 0.1, 0.1]], dtype=F64))
    policy = torch.log(torch.tensor([[0.25, 0.25, 0.4, 0.1]], dtype=F64))
    expected = 0.25 * math.log(0.25 / 0.5) + 0.25 * math.log(0.25 / 0.3) + 0.5 * math.log(0.5 / 0.2)
    assert float(top_k_kl(policy, ref, 2)) == pytest.approx(expected)
    with pytest.raises(ValueError, match="1 <= k < 4"):
        top_k_kl(policy, ref, 4)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("vocab_chunk", [None, 7, 50])
@pytest.mark.parametrize(
    ("bias", "temperature", "scale", "softcap"),
    [(False, 1.0, 1.0, None), (True, 0.7, 0.5, None), (True, 0.7, 2.0, 3.0)],
)
def test_weighted_kl_from_hidden_states(direction, vocab_chunk, bias, temperature, scale, softcap):
    torch.manual_seed(0)
    n, h, h_ref, vocab = 9, 6, 4, 23
    hidden = torch.randn(n, h, dtype=F64, requires_grad=True)
    weight = torch.randn(vocab, h, dtype=F64, requires_grad=True)
    b = torch.randn(vocab, dtype=F64, requires_grad=True) if bias else None
    ref_hidden, ref_weight = torch.randn(n, h_ref, dtype=F64), torch.randn(vocab, h_ref, dtype=F64)
    coefficients = torch.randn(n, dtype=F64)

    def scaled(z):
        z = z * scale
        return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature

    expected_kl = plain_kl(
        scaled(hidden @ weight.T + (b if bias else 0)), scaled(ref_hidden @ ref_weight.T), direction
    )
    leaves = [hidden, weight, *([b] if bias else [])]
    expected_grads = torch.autograd.grad(3 * (coefficients * expected_kl).sum(), leaves)

    loss, kl = weighted_full_vocab_kl(
        hidden,
        VocabHead(weight, b, temperature, scale, softcap),
        coefficients,
        ref_hidden=ref_hidden,
        ref_head=VocabHead(ref_weight, None, temperature, scale, softcap),
        direction=direction,
        token_chunk=4,
        vocab_chunk=vocab_chunk,
    )
    torch.testing.assert_close(kl, expected_kl)
    torch.testing.assert_close(loss, (coefficients * expected_kl).sum())
    for got, expected in zip(torch.autograd.grad(3 * loss, leaves), expected_grads, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_weighted_top_k_from_hidden_states(direction, softcap):
    torch.manual_seed(0)
    hidden = torch.randn(9, 6, dtype=F64, requires_grad=True)
    weight = torch.randn(23, 6, dtype=F64, requires_grad=True)
    ref_logits, coefficients = 2 * torch.randn(9, 23, dtype=F64), torch.randn(9, dtype=F64)
    logits = hidden @ weight.T / 0.7 if softcap is None else softcap * torch.tanh(hidden @ weight.T / softcap) / 0.7
    expected = top_k_kl(logits, ref_logits, 5, direction)
    expected_grads = torch.autograd.grad((coefficients * expected).sum(), [hidden, weight])
    loss, kl = weighted_full_vocab_kl(
        hidden,
        VocabHead(weight, temperature=0.7, softcap=softcap),
        coefficients,
        ref_top_k=reference_top_k(ref_logits, 5),
        direction=direction,
        token_chunk=4,
    )
    torch.testing.assert_close(kl, expected)
    for got, want in zip(torch.autograd.grad(loss, [hidden, weight]), expected_grads, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("top_k", [False, True])
def test_weighted_kl_in_bfloat16(top_k):
    torch.manual_seed(0)
    hidden, ref_hidden = torch.randn(2, 9, 16)
    weight = torch.randn(31, 16)
    coefficients = torch.rand(9)

    def grads(dtype):
        leaves = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        ref_head = VocabHead(weight.to(dtype))
        if top_k:
            reference = {"ref_top_k": reference_top_k(ref_head.logits(ref_hidden.to(dtype)), 5)}
        else:
            reference = {"ref_hidden": ref_hidden.to(dtype), "ref_head": ref_head}
        loss, kl = weighted_full_vocab_kl(leaves[0], VocabHead(leaves[1]), coefficients, **reference, token_chunk=4)
        assert loss.dtype == kl.dtype == torch.float32
        return torch.autograd.grad(loss, leaves)

    for half, single in zip(grads(torch.bfloat16), grads(torch.float32), strict=True):
        assert half.dtype == torch.bfloat16
        assert (half.float() - single).norm() < 0.03 * single.norm()


def test_weighted_kl_of_a_frozen_head_and_without_grad():
    torch.manual_seed(0)
    hidden = torch.randn(4, 3, requires_grad=True)
    head = VocabHead(torch.randn(7, 3))
    loss, _ = weighted_full_vocab_kl(hidden, head, torch.ones(4), ref_hidden=torch.randn(4, 3), ref_head=head)
    loss.backward()
    assert hidden.grad.norm() > 0 and head.weight.grad is None
    with torch.no_grad():
        loss, _ = weighted_full_vocab_kl(hidden, head, torch.ones(4), ref_hidden=torch.randn(4, 3), ref_head=head)
    assert not loss.requires_grad
    with pytest.raises(ValueError, match="not both"):
        weighted_full_vocab_kl(hidden, head, torch.ones(4))


@pytest.mark.parametrize(("vocab_chunk", "width"), [(None, 5000), (1250, 1250)])
def test_peak_memory_is_two_tensors_of_a_chunk(vocab_chunk, width):
    torch.manual_seed(0)
    n, h, vocab, token_chunk = 1024, 4, 5000, 32
    hidden = torch.randn(n, h, requires_grad=True)
    weight = torch.randn(vocab, h, requires_grad=True)
    ref_hidden, coefficients = torch.randn(n, h), torch.ones(n)
    with PeakMemory() as memory:
        loss, kl = weighted_full_vocab_kl(
            hidden,
            VocabHead(weight),
            coefficients,
            ref_hidden=ref_hidden,
            ref_head=VocabHead(weight.detach()),
            token_chunk=token_chunk,
            vocab_chunk=vocab_chunk,
        )
    gradients = 4 * (n * h + vocab * h)
    chunk = 4 * token_chunk * width
    assert memory.peak - gradients < 2.3 * chunk  # the logits of both models
    assert memory.peak < 0.15 * 4 * n * vocab  # the (N, V) logits
    del loss, kl


def test_score_coefficients_of_full_vocab_by_hand():
    kl = torch.tensor([[1.0, 2.0, 4.0, 50.0]])
    weights = torch.tensor([[1.0, 0.5, 2.0, 7.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    assert full_vocab_score_coefficients(kl, weights, mask).tolist() == [[9, 8, 0, 0]]


# --- Adaptive coefficient --------------------------------------------------------------------------------------------


def test_controller_moves_towards_its_target():
    controller = AdaptiveKLController(coefficient=0.1, target=6.0, horizon=1000)
    assert controller.update(6.0, 100) == pytest.approx(0.1)
    assert controller.update(6.6, 100) == pytest.approx(0.1 * 1.01)
    assert controller.update(60.0, 100) == pytest.approx(0.1 * 1.01 * 1.02)
    assert controller.update(0.0, 100) == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)
