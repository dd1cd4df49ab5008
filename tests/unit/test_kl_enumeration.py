"""Every combination's expected gradient, over all 125 sequences, against the autograd gradient of the exact KL."""

import pytest
import torch

from trl_grpo_plus.algorithms import kl_table
from trl_grpo_plus.algorithms.kl_table import COMBINATIONS, SequenceWorld, sequence_table, token_table, verdict


@pytest.fixture(scope="module")
def world():
    return SequenceWorld(seed=3)


def test_probabilities_sum_to_one_and_the_exact_kl_is_a_kl(world):
    torch.testing.assert_close(world.logps(world.policy).sum(-1).exp().sum(), torch.tensor(1.0, dtype=torch.float64))
    assert float(world.exact_kl(world.policy)) > 0.1
    assert float(world.exact_kl(world.reference)) == pytest.approx(0, abs=1e-12)


def test_exact_gradient_agrees_with_finite_differences(world):
    exact = world.exact_gradient().view_as(world.policy)
    for index in [(0, 0), (3, 2), (20, 4)]:
        step = torch.zeros_like(world.policy)
        step[index] = 1e-5
        slope = (world.exact_kl(world.policy + step) - world.exact_kl(world.policy - step)) / 2e-5
        assert float(exact[index]) == pytest.approx(float(slope), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
@pytest.mark.parametrize("lag", [0.0, 0.6])
def test_documented_exactness(world, combination, lag):
    exact = world.exact_gradient()
    mean, _ = world.moments(lag, combination)
    claimed = combination.exact_on if lag == 0 else combination.exact_off
    error = float((mean - exact).norm())
    if claimed:
        assert error < 1e-9
    else:
        assert error > 0.02 * float(exact.norm())


def test_token_table_is_the_documented_one():
    table = {
        (r["estimator"], r["policy"], r["importance"]): verdict(r["norm"], r["error"], r["forward_error"]).split()[0]
        for r in token_table()
    }
    columns = [("on", "none"), ("off", "none"), ("off", "differentiable"), ("off", "stopped")]
    assert [table["k1", *c] for c in columns] == ["0", "wrong", "exact", "0"]
    assert [table["k2", *c] for c in columns] == ["exact", "wrong", "wrong", "exact"]
    assert [table["k3", *c] for c in columns] == ["forward", "wrong", "exact", "forward"]


def test_documented_bias_figures():
    """The figures that docs/kl.md quotes."""
    bias = {(str(r["combination"]), r["lag"]): r["bias"] for r in sequence_table((0.0, 0.5))}
    assert bias["loss / k3 / token / none", 0.0] == pytest.approx(0.375, abs=5e-4)
    assert bias["reward / k1 / old / to_go / none", 0.5] == pytest.approx(1.086, abs=5e-4)
    assert bias["reward / k1 / current / to_go / token", 0.5] == pytest.approx(0.339, abs=5e-4)
    assert bias["full_vocab / to_go / none", 0.5] == pytest.approx(0.292, abs=5e-4)


def test_rao_blackwell_has_less_variance(world):
    by_name = {str(c): c for c in COMBINATIONS}
    for lag in (0.0, 0.6):
        _, sampled = world.moments(lag, by_name["reward / k1 / current / to_go / per_decision"])
        _, summed = world.moments(lag, by_name["full_vocab / to_go / per_decision"])
        _, whole = world.moments(lag, by_name["reward / k1 / current / sequence / per_decision"])
        assert summed < 0.5 * sampled < 0.5 * whole


def test_truncation_trades_variance_for_bias(world):
    by_name = {str(c): c for c in COMBINATIONS}
    _, free = world.moments(0.6, by_name["reward / k1 / current / to_go / per_decision"])
    _, capped = world.moments(0.6, by_name["reward / k1 / current / to_go / per_decision / truncation 2"])
    assert capped < 0.7 * free


def test_command_prints_both_tables_and_draws(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(kl_table, "COMBINATIONS", COMBINATIONS[::9])
    assert kl_table.main(["--plot", str(tmp_path / "bias.png")]) == 0
    out = capsys.readouterr().out
    assert "| k1 | 0 | wrong (68 %) | exact | 0 |" in out
    assert "| loss / k2 / token / none | 0.263 |" in out
    assert (tmp_path / "bias.png").stat().st_size > 10_000
