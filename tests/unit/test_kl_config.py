"""Every combination of the KL options: the documented ones are legal, all others say what is wrong."""

import dataclasses
import itertools
import warnings

import pytest
from trl import GRPOConfig, TrlParser

from trl_grpo_plus import GRPOPlusConfig
from trl_grpo_plus._kl_plan import KL_COEFFICIENTS, KL_HORIZONS, KL_IMPORTANCE, KL_PLACEMENTS, kl_plan
from trl_grpo_plus.algorithms.kl import ESTIMATORS
from trl_grpo_plus.algorithms.kl_table import COMBINATIONS


def config(**overrides):
    values = {"output_dir": "out", "bf16": False, "use_cpu": True, "report_to": [], "beta": 0.04}
    return GRPOPlusConfig(**{**values, **overrides})


def test_off_by_default():
    defaults = config()
    assert kl_plan(defaults) is None
    assert defaults.loss_normalization is None
    stock = GRPOConfig(output_dir="out", bf16=False, use_cpu=True, report_to=[], beta=0.04)
    for field in dataclasses.fields(stock):
        assert getattr(defaults, field.name) == getattr(stock, field.name), field.name


def test_exactly_the_documented_combinations_are_legal():
    documented = {
        (c.placement, c.estimator, c.importance, c.coefficient or "current", c.horizon) for c in COMBINATIONS
    }
    legal = set()
    grid = itertools.product(KL_PLACEMENTS, (None, *ESTIMATORS), KL_IMPORTANCE, KL_COEFFICIENTS, KL_HORIZONS)
    for placement, estimator, importance, coefficient, horizon in grid:
        options = {
            "kl_placement": placement,
            "kl_estimator": estimator,
            "kl_importance": importance,
            "kl_coefficient": coefficient,
            "kl_horizon": horizon,
        }
        try:
            plan = kl_plan(config(**options))
        except ValueError as error:
            assert "kl_" in str(error) and len(str(error)) > 60
        else:
            legal.add((placement, plan.estimator, plan.importance, plan.coefficient, plan.horizon))
    assert legal == documented


@pytest.mark.parametrize(
    ("placement", "estimator", "importance", "coefficient", "horizon"),
    [
        ("loss", "k3", "none", "current", "token"),
        ("reward", "k1", "none", "current", "to_go"),
        ("full_vocab", None, "none", "current", "to_go"),
    ],
)
def test_defaults_of_each_placement(placement, estimator, importance, coefficient, horizon):
    plan = kl_plan(config(kl_placement=placement))
    assert (plan.estimator, plan.importance, plan.coefficient, plan.horizon) == (
        estimator,
        importance,
        coefficient,
        horizon,
    )


ILLEGAL = [
    ({"kl_placement": "prompt"}, "kl_placement must be one of 'loss', 'reward', 'full_vocab'"),
    ({"kl_placement": "loss", "kl_estimator": "k4"}, "kl_estimator must be one of"),
    ({"kl_placement": "loss", "kl_horizon": "forever"}, "kl_horizon must be one of"),
    ({"kl_placement": "loss", "kl_estimator": "k1"}, "zero on-policy"),
    ({"kl_placement": "loss", "kl_estimator": "k1", "kl_importance": "stopped"}, "zero, on- and off-policy"),
    ({"kl_placement": "loss", "kl_estimator": "k2", "kl_importance": "differentiable"}, "'stopped' with k2"),
    ({"kl_placement": "loss", "kl_horizon": "to_go"}, "kl_placement='reward'"),
    ({"kl_placement": "loss", "kl_coefficient": "old"}, "kl_coefficient='old' cannot go with kl_placement='loss'"),
    ({"kl_placement": "loss", "kl_importance": "per_decision"}, "kl_horizon='sequence'"),
    ({"kl_placement": "reward", "kl_estimator": "k3"}, "only the reward-to-go of k1"),
    ({"kl_placement": "reward", "kl_importance": "differentiable"}, "'token' or 'per_decision'"),
    ({"kl_placement": "reward", "kl_coefficient": "old", "kl_importance": "token"}, "kl_coefficient='current'"),
    (
        {"kl_placement": "reward", "kl_coefficient": "old", "importance_sampling_level": "sequence"},
        "importance_sampling_level='token'",
    ),
    ({"kl_placement": "reward", "kl_coefficient": "old", "top_entropy_quantile": 0.2}, "top_entropy_quantile"),
    ({"kl_placement": "full_vocab", "kl_estimator": "k1"}, "nothing is estimated"),
    ({"kl_placement": "full_vocab", "kl_horizon": "sequence"}, "'to_go'"),
    ({"kl_placement": "full_vocab", "kl_importance": "token"}, "'per_decision'"),
    ({"kl_placement": "reward", "beta": 0.0}, "beta=0"),
    ({"kl_placement": "loss", "kl_estimator": "k1", "beta": 0.0}, "kl_estimator='k1'"),
    ({"kl_placement": "reward", "kl_importance_truncation": 2.0}, "kl_importance='none' it has no effect"),
    (
        {"kl_placement": "reward", "kl_importance": "token", "kl_importance_truncation": 0.5},
        "kl_importance_truncation must be at least 1",
    ),
    ({"kl_placement": "reward", "kl_top_k": 5}, "kl_top_k belongs to kl_placement='full_vocab'"),
    ({"kl_placement": "full_vocab", "kl_top_k": 0}, "kl_top_k must be at least 1"),
    ({"kl_placement": "full_vocab", "kl_top_k": 5, "kl_vocab_chunk": 100}, "kl_vocab_chunk cannot go with kl_top_k"),
    ({"kl_placement": "full_vocab", "kl_token_chunk": 0}, "must be positive"),
    ({"kl_placement": "reward", "kl_target": -1.0}, "kl_target must be positive"),
    ({"kl_placement": "reward", "kl_target": 0.1, "kl_target_horizon": 0}, "kl_target_horizon must be at least 1"),
    (
        {"kl_placement": "full_vocab", "sync_ref_model": True, "num_iterations": 2, "kl_importance": "per_decision"},
        "sync_ref_model",
    ),
    ({"kl_estimator": "k2"}, "kl_estimator would have no effect, since kl_placement is None"),
    ({"kl_importance": "token", "kl_target": 1.0}, "kl_target, kl_importance would have no effect"),
    ({"loss_normalization": "mean"}, "loss_normalization must be one of 'sequence', 'token', 'group_token'"),
    ({"loss_normalization": "token", "loss_normalization_length": 5}, "loss_normalization_length is the L"),
    ({"loss_normalization": "constant", "loss_normalization_length": 0}, "at least 1"),
    ({"loss_normalization": "constant", "max_completion_length": None}, "max_completion_length"),
]


@pytest.mark.parametrize(("overrides", "message"), ILLEGAL, ids=lambda value: str(value)[:70])
def test_illegal_options_are_named(overrides, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError) as error:
            config(**overrides)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "reuse",
    [{"num_iterations": 2}, {"gradient_accumulation_steps": 2, "steps_per_generation": 4}],
    ids=["num_iterations", "steps_per_generation"],
)
@pytest.mark.parametrize(
    ("options", "better"),
    [
        ({"kl_placement": "loss", "kl_estimator": "k2"}, "'stopped'"),
        ({"kl_placement": "reward", "kl_coefficient": "old"}, "'per_decision'"),
        ({"kl_placement": "reward"}, "'per_decision'"),
        ({"kl_placement": "full_vocab"}, "'per_decision'"),
    ],
    ids=str,
)
def test_no_weight_in_an_off_policy_run_warns(reuse, options, better):
    with pytest.warns(UserWarning, match=rf"biased off-policy.*{better}"):
        config(**reuse, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"kl_placement": "loss", "kl_estimator": "k2", "num_iterations": 2, "kl_importance": "stopped"},
        {"kl_placement": "reward", "num_iterations": 2, "kl_importance": "per_decision"},
        {"kl_placement": "reward"},
        {"kl_placement": "full_vocab", "kl_horizon": "token"},
    ],
    ids=str,
)
def test_right_choices_do_not_warn(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        config(**options)


def test_the_fields_can_be_given_on_the_command_line():
    arguments = (
        "--output_dir out --use_cpu --bf16 False --beta 0.04 --kl_placement full_vocab --kl_importance per_decision"
    )
    arguments += " --kl_top_k 20 --kl_target 0.1 --loss_normalization constant --loss_normalization_length 100"
    (parsed,) = TrlParser((GRPOPlusConfig,)).parse_args_and_config(arguments.split())
    assert (parsed.kl_placement, parsed.kl_top_k, parsed.kl_target) == ("full_vocab", 20, 0.1)
    assert (parsed.loss_normalization, parsed.loss_normalization_length) == ("constant", 100)
    assert kl_plan(parsed).importance == "per_decision"
