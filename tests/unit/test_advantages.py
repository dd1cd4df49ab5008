"""Process advantages against hand-computed numbers and their invariants."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_plus.algorithms.advantages import (
    discounted_to_go,
    group_statistics,
    min_form_weights,
    mix_advantages,
    process_advantages,
)

REWARDS = [[0.9, 0.1], [0.5, 0.5, 1.0]]
ENDS = [[2, 5], [1, 3, 4]]


def assert_rows(actual, expected, atol=1e-4):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), atol=atol, rtol=0)


def test_worked_example_with_sample_std():
    # R = .9, .1, .5, .5, 1.0: mean .6, ddof-1 std .3606; r~ = .8321, -1.3868 and -.2774, -.2774, 1.1094.
    advantages = process_advantages(REWARDS, ENDS, 2, 6, eps=0.0)
    assert advantages.dtype == torch.float32
    assert_rows(advantages, [[-0.5547] * 3 + [-1.38675] * 3, [0.5547] * 2 + [0.83205] * 2 + [1.1094, 0.0]])


def test_worked_example_with_population_std():
    # The ddof-0 std is .3606 * sqrt(4 / 5) = .3225, so each number grows by sqrt(5 / 4).
    advantages = process_advantages(REWARDS, ENDS, 2, 6, std="population", eps=0.0)
    assert_rows(advantages, [[-0.6202] * 3 + [-1.5504] * 3, [0.6202] * 2 + [0.9303] * 2 + [1.2403, 0.0]])


def test_eps_is_added_to_the_std():
    with_eps = process_advantages(REWARDS, ENDS, 2, 6, eps=0.3605551)
    assert_rows(with_eps[0], [-0.27735] * 3 + [-0.693375] * 3)


def test_discount_per_step():
    # r~ = .83205, -1.38675: first step .83205 - .5 * 1.38675.
    advantages = process_advantages(REWARDS, ENDS, 2, 6, eps=0.0, gamma=0.5)
    assert_rows(advantages[0], [0.138675] * 3 + [-1.38675] * 3)
    # -.27735 + .5 * (-.27735 + .5 * 1.1094) = -.138675; -.27735 + .5 * 1.1094 = .27735.
    assert_rows(advantages[1], [-0.138675] * 2 + [0.27735] * 2 + [1.1094, 0.0])


def test_mean_form_divides_by_the_steps_to_go():
    advantages = process_advantages(REWARDS, ENDS, 2, 6, eps=0.0, credit="mean")
    assert_rows(advantages, [[-0.27735] * 3 + [-1.38675] * 3, [0.1849] * 2 + [0.416025] * 2 + [1.1094, 0.0]])


def test_min_form_weights_of_the_pure_paper():
    rewards = torch.tensor([[0.9, 0.8, 0.7]], dtype=torch.float64)
    assert_rows(min_form_weights(rewards, tau=0.1) * rewards, [[0.0810, 0.1958, 0.4657]])


def test_min_form_by_hand():
    # tau -> 0 picks each output's smallest reward: .1 and .5 (the latter shared by two steps). Their mean is .3, their
    # ddof-1 std .28284. Output 0: the weight lies on step 1, (.1 - .3) / .28284 = -.70711, and step 0 adds nothing.
    # Output 1: half of (.5 - .3) / .28284 = .70711 on each of steps 0 and 1, nothing on step 2.
    advantages = process_advantages(REWARDS, ENDS, 2, 6, eps=0.0, credit="min", tau=1e-3)
    assert_rows(advantages, [[-0.70711] * 6, [0.70711] * 2 + [0.35355] * 2 + [0.0, 0.0]])


def test_min_form_does_not_pay_for_more_steps():
    few, many = process_advantages(
        [[0.2, 0.9], [0.2, 0.9, 0.9, 0.9]], [[0, 1], [0, 1, 2, 3]], 2, 4, credit="min", tau=0.01
    )
    assert few[0].abs() < 1e-3 and many[0].abs() < 1e-3
    few, many = process_advantages([[0.2, 0.9], [0.2, 0.9, 0.9, 0.9]], [[0, 1], [0, 1, 2, 3]], 2, 4, credit="sum")
    assert many[0] > few[0] + 0.5


def test_leave_one_out_subtracts_the_others_at_the_same_token():
    advantages = process_advantages(REWARDS, ENDS, 2, 6, eps=0.0, baseline="leave_one_out")
    expected = [
        [-0.5547 - 0.5547, -0.5547 - 0.5547, -0.5547 - 0.83205, -1.38675 - 0.83205, -1.38675 - 1.1094, -1.38675],
        [1.1094, 1.1094, 1.38675, 2.2188, 2.49615, 0.0],
    ]
    assert_rows(advantages, expected)


def test_zero_delimiters_spares_inner_ends_only():
    advantages = process_advantages(REWARDS, ENDS, 2, 6, eps=0.0, zero_delimiters=True)
    expected = [[-0.5547] * 2 + [0.0] + [-1.38675] * 3, [0.5547, 0.0, 0.83205, 0.0, 1.1094, 0.0]]
    assert_rows(advantages, expected)


def test_unscored_steps_take_no_part():
    # Only .9 and .5, 1.0 are scored: mean .8, ddof-1 std .26458.
    advantages = process_advantages([[0.9, None], [0.5, None, 1.0]], ENDS, 2, 6, eps=0.0)
    assert_rows(advantages, [[0.37796] * 3 + [0.0] * 3, [-0.37796] * 2 + [0.75593] * 3 + [0.0]])


def test_constant_or_single_rewards_give_zero_even_without_eps():
    constant = process_advantages([[0.1, 0.1], [0.1]], [[0, 1], [2]], 2, 3, eps=0.0)
    single = process_advantages([[0.7], [None]], [[1], [2]], 2, 3, eps=0.0)
    nothing = process_advantages([[None], []], [[1], []], 2, 3, eps=0.0, credit="min")
    assert constant.eq(0).all() and single.eq(0).all() and nothing.eq(0).all()


def test_no_steps_at_all():
    assert process_advantages([[], []], [[], []], 2, 3).eq(0).all()


def test_mix_weights_each_term():
    mixed = mix_advantages(torch.tensor([1.0, -1.0]), torch.tensor([[0.5, 0.0], [2.0, 1.0]]), 2.0, 0.5)
    assert_rows(mixed, [[2.25, 2.0], [-1.0, -1.5]])


def test_group_statistics_match_torch_on_ragged_groups():
    rewards = torch.tensor([[1.0, 2.0, torch.nan], [4.0, torch.nan, torch.nan]], dtype=torch.float64)
    mean, std = group_statistics(rewards, 2)
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert mean.flatten().tolist() == pytest.approx([values.mean().item()] * 2)
    assert std.flatten().tolist() == pytest.approx([values.std().item()] * 2)


def test_discounted_to_go_by_hand():
    assert_rows(discounted_to_go(torch.tensor([[1.0, 2.0, 4.0]]), 0.5), [[3.0, 4.0, 4.0]])


def trl_outcome_advantages(rewards, group_size):
    """TRL's own normalisation (scale_rewards="group"), on one reward per output."""
    grouped = torch.tensor(rewards).view(-1, group_size)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


@pytest.mark.parametrize("credit", ["sum", "min", "mean"])
def test_one_step_per_output_is_trls_outcome_advantage(credit):
    rewards = [0.3, -1.0, 2.0, 0.25, 7.0, 7.0, 6.5, -2.0]
    advantages = process_advantages([[r] for r in rewards], [[4]] * 8, 4, 6, credit=credit)
    expected = trl_outcome_advantages(rewards, 4)
    torch.testing.assert_close(advantages[:, :5], expected.unsqueeze(1).expand(8, 5), atol=1e-6, rtol=1e-6)
    assert advantages[:, 5].eq(0).all()


@st.composite
def batches(draw):
    group_size = draw(st.integers(2, 4))
    rows = group_size * draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows))
    value = st.integers(-8, 8).map(lambda n: n / 4)
    rewards = [draw(st.lists(value, min_size=n, max_size=n)) for n in counts]
    gaps = [draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)) for n in counts]
    ends = [[sum(row[: j + 1]) - 1 for j in range(len(row))] for row in gaps]
    return rewards, ends, group_size, max(e[-1] for e in ends) + 2


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(["sum", "min"]))
def test_first_token_advantages_of_a_group_sum_to_zero(batch, credit):
    rewards, ends, group_size, num_tokens = batch
    advantages = process_advantages(rewards, ends, group_size, num_tokens, credit=credit)
    assert advantages[:, 0].view(-1, group_size).sum(1).abs().max() < 1e-4


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(["sum", "mean"]), st.floats(0.125, 8), st.floats(-4, 4))
def test_affine_rewards_give_the_same_advantages(batch, credit, scale, shift):
    rewards, ends, group_size, num_tokens = batch
    moved = [[scale * r + shift for r in row] for row in rewards]
    before = process_advantages(rewards, ends, group_size, num_tokens, credit=credit, eps=0.0)
    after = process_advantages(moved, ends, group_size, num_tokens, credit=credit, eps=0.0)
    torch.testing.assert_close(before, after, atol=1e-4, rtol=1e-4)


@settings(max_examples=100, deadline=None)
@given(batches(), st.sampled_from(["sum", "min", "mean"]), st.sampled_from([1.0, 0.9]))
def test_every_token_agrees_with_the_definition(batch, credit, gamma):
    """Token by token, in plain Python, straight from the text of the paper."""
    rewards, ends, group_size, num_tokens = batch
    advantages = process_advantages(
        rewards, ends, group_size, num_tokens, credit=credit, gamma=gamma, eps=1e-4, tau=0.5
    )
    for i, row in enumerate(rewards):
        group = rewards[i // group_size * group_size :][:group_size]
        softmin = [torch.softmax(-torch.tensor(r, dtype=torch.float64) / 0.5, 0).tolist() for r in group]
        pool = (
            [sum(w * r for w, r in zip(ws, rs, strict=True)) for ws, rs in zip(softmin, group, strict=True)]
            if credit == "min"
            else [r for rs in group for r in rs]
        )
        mean = sum(pool) / len(pool)
        std = (sum((r - mean) ** 2 for r in pool) / (len(pool) - 1)) ** 0.5 if len(pool) > 1 else 0.0
        for t in range(num_tokens):
            to_go = [j for j, end in enumerate(ends[i]) if end >= t]
            value, weight = 0.0, 0.0
            for j in to_go:
                discount = gamma ** (j - to_go[0])
                factor = softmin[i % group_size][j] if credit == "min" else 1.0
                value += discount * factor * (row[j] - mean) / (std + 1e-4) if std > 1e-12 else 0.0
                weight += discount
            if credit == "mean" and to_go:
                value /= weight
            assert advantages[i, t].item() == pytest.approx(value, abs=2e-4)


@settings(max_examples=50, deadline=None)
@given(batches())
def test_nothing_after_the_last_scored_end(batch):
    rewards, ends, group_size, num_tokens = batch
    rewards = [[*row[:-1], None] if len(row) > 1 else row for row in rewards]
    for baseline in ("group", "leave_one_out"):
        advantages = process_advantages(rewards, ends, group_size, num_tokens, baseline=baseline)
        for i, row in enumerate(ends):
            last_scored = row[-2] if len(row) > 1 else row[-1]
            assert advantages[i, last_scored + 1 :].eq(0).all()


def test_padding_width_of_tensors_changes_nothing():
    nan = torch.nan
    rewards = torch.tensor([[0.9, 0.1, nan, nan, nan], [0.5, 0.5, 1.0, nan, nan]], dtype=torch.float64)
    ends = torch.tensor([[2, 5, -1, -1, -1], [1, 3, 4, -1, -1]])
    padded = process_advantages(rewards, ends, 2, 9)
    assert padded.dtype == torch.float64
    torch.testing.assert_close(padded[:, :6].float(), process_advantages(REWARDS, ENDS, 2, 6))
    assert padded[:, 6:].eq(0).all()


def test_other_groups_change_nothing():
    alone = process_advantages(REWARDS, ENDS, 2, 6)
    together = process_advantages([[5.0], [100.0], *REWARDS], [[0], [1], *ENDS], 2, 6)
    torch.testing.assert_close(together[2:], alone)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: process_advantages(REWARDS, ENDS, 2, 6, credit="max"), r"credit must be one of 'sum', 'min', 'mean'"),
        (lambda: process_advantages(REWARDS, ENDS, 2, 6, std="robust"), r"std must be one of"),
        (lambda: process_advantages(REWARDS, ENDS, 2, 6, baseline="none"), r"baseline must be one of"),
        (lambda: process_advantages(REWARDS, ENDS, 2, 6, credit="min", tau=0), r"tau must be positive"),
        (lambda: process_advantages(REWARDS, ENDS, 3, 6), r"2 completions cannot be cut into groups of 3"),
        (lambda: process_advantages([[0.9]], [[2, 5]], 1, 6), r"Completion 0 has 1 step rewards but 2 step ends"),
        (
            lambda: process_advantages(REWARDS, [[2, 6], [1, 3, 4]], 2, 6),
            r"completion 0 must increase within 0 \.\.\. 5",
        ),
        (lambda: process_advantages(REWARDS, [[2, 5], [1, 1, 4]], 2, 6), r"completion 1 must increase"),
        (lambda: process_advantages([[0.9, float("inf")], [1]], [[2, 5], [1]], 2, 6), r"Completion 0 has an infinite"),
        (
            lambda: process_advantages([[1.0], [1.0]], [[0], [0]], 1, 1, baseline="leave_one_out"),
            r"at least 2 outputs",
        ),
    ],
)
def test_errors_name_the_field_or_the_completion(call, message):
    with pytest.raises(ValueError, match=message):
        call()
