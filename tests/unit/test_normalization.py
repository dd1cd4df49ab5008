"""Loss normalisers against hand numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_plus.algorithms.normalization import LOSS_NORMALIZATIONS, sequence_scales, token_weights

LOSSES = torch.tensor([[1.0, 2.0, 99.0], [3.0, 4.0, 5.0], [7.0, 99.0, 99.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token", 22 / 6), ("sequence", (1.5 + 4 + 7) / 3), ("constant", 22 / 9), ("group_token", 22 / 6)],
)
def test_hand_numbers(mode, expected):
    weights = token_weights(MASK, mode, group_size=3, max_length=3)
    assert float((weights * LOSSES).sum()) == pytest.approx(expected, rel=1e-6)


def test_group_token_by_hand():
    losses = torch.tensor([[1.0, 2.0], [3.0, 0.0], [10.0, 0.0], [20.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 0]])
    weights = token_weights(mask, "group_token", group_size=2)
    assert float((weights * losses).sum()) == pytest.approx(((1 + 2 + 3) / 3 + (10 + 20) / 2) / 2)


def test_two_ranks_by_hand():
    """10 tokens with loss 1 on one rank and 30 with loss 3 on the other: the token mean is 2.5, not 2."""
    scales = sequence_scales(torch.tensor([10, 30]), "token")
    assert float(scales[0] * 10 * 1 + scales[1] * 30 * 3) == pytest.approx(2.5)


def test_sequences_without_a_trained_token_are_in_no_denominator():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]])
    losses = torch.tensor([[1.0, 3.0, 9], [9, 9, 9], [5.0, 9, 9], [9, 9, 9]])

    def loss(mode, group_size):
        return float((token_weights(mask, mode, group_size, 3) * losses).sum())

    assert loss("sequence", 2) == pytest.approx((2 + 5) / 2)
    assert loss("token", 2) == pytest.approx(9 / 3)
    assert loss("group_token", 1) == pytest.approx((2 + 5) / 2)
    assert loss("constant", 2) == pytest.approx(9 / (4 * 3))


@pytest.mark.parametrize("mode", LOSS_NORMALIZATIONS)
def test_nothing_trained_gives_zero_weights(mode):
    weights = token_weights(torch.zeros(2, 3), mode, group_size=2, max_length=3)
    assert weights.tolist() == [[0] * 3] * 2


@pytest.mark.parametrize("mode", LOSS_NORMALIZATIONS)
@settings(max_examples=30, deadline=None)
@given(counts=st.lists(st.integers(0, 9), min_size=4, max_size=12), data=st.data())
def test_scales_do_not_depend_on_the_order_of_the_sequences(mode, counts, data):
    counts = torch.tensor(counts)
    groups = torch.arange(len(counts)) // 2
    order = torch.tensor(data.draw(st.permutations(range(len(counts)))))
    scales = sequence_scales(counts, mode, groups, 9, torch.float64)
    shuffled = sequence_scales(counts[order], mode, groups[order], 9, torch.float64)
    torch.testing.assert_close(shuffled, scales[order])
    if mode != "constant" and counts.sum() > 0:
        # a loss of 1 at every token has the mean 1
        assert float((scales * counts).sum()) == pytest.approx(1)


def test_precision_follows_the_mask():
    assert token_weights(MASK.double(), "sequence").dtype == torch.float64
    assert token_weights(MASK.bfloat16(), "sequence").dtype == torch.float32
    assert token_weights(MASK.bool(), "token").dtype == torch.float32


def test_errors_say_what_is_missing():
    with pytest.raises(ValueError, match=r"'mean'.*sequence, token, group_token, constant"):
        token_weights(MASK, "mean")
    with pytest.raises(ValueError, match="3 sequences cannot be cut into groups of 2"):
        token_weights(MASK, "group_token", group_size=2)
    with pytest.raises(ValueError, match="max_length"):
        token_weights(MASK, "constant")
    with pytest.raises(ValueError, match="group_ids"):
        sequence_scales(torch.tensor([1]), "group_token")
