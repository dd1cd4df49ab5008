"""The gradient of an optimizer window does not depend on how it is cut, and is the one of the definition."""

import pytest
import torch
from normalization_case import MODES, SURROGATES, choose, expected_gradient, make_trainer, rollout, rows, windows

from trl_grpo_plus._window import SCALE, trained_tokens

# (micro-batch, gradient_accumulation_steps, steps_per_generation) of the same 16 completions
EQUAL_OR_BELOW = [
    (4, 4, 2),
    (1, 16, 8),
    *(
        pytest.param(cut, marks=pytest.mark.slow)
        for cut in [(16, 1, 1), (8, 2, 2), (4, 4, 4), (1, 16, 16), (8, 2, 1), (1, 16, 4)]
    ),
]
_OTHERS = ("sequence", "token", "constant")
KL = {"beta": 0.3, "kl_placement": "loss", "kl_estimator": "k3", "kl_importance": "differentiable"}


def close(got, expected, tolerance=1e-6):
    scale = float(expected.abs().max())
    assert scale > 1e-3
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("cut", EQUAL_OR_BELOW, ids=str)
def test_every_cut_gives_the_gradient_of_the_whole_window(tiny_policy, tmp_path, cut):
    trainer = make_trainer(tiny_policy, tmp_path, *cut, **KL)
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter.mul_(1.1)
    for mode in MODES:
        for surrogate in ("clipped", "cispo", "gspo"):
            choose(trainer, mode, surrogate)
            recorded = windows(trainer)
            assert len(recorded.rows[0]) == 16
            expected = expected_gradient(trainer.model, recorded.rows[0], mode, surrogate, KL["beta"])
            close(recorded.gradients[0], expected)


@pytest.mark.parametrize(
    ("cut", "sizes"),
    [((4, 2, 4), [8, 8, 8, 8]), ((4, 2, 8), [8, 8, 8, 8]), ((4, 4, 3), [16, 16, 16, 12]), ((4, 3, 4), [12] * 4)],
    ids=str,
)
@pytest.mark.parametrize("mode", ["group_token", *(pytest.param(m, marks=pytest.mark.slow) for m in _OTHERS)])
def test_windows_that_cut_through_generation_batches(tiny_policy, tmp_path, cut, sizes, mode):
    """TRL shuffles a generation batch, so a group's completions lie in several windows."""
    trainer = make_trainer(tiny_policy, tmp_path, *cut, max_steps=4, loss_normalization=mode)
    recorded = windows(trainer)
    assert [len(window) for window in recorded.rows] == sizes
    for gradient, window in zip(recorded.gradients, recorded.rows, strict=True):
        close(gradient, expected_gradient(trainer.model, window, mode, "dapo"))


@pytest.mark.parametrize("mode", ["sequence", *(pytest.param(m, marks=pytest.mark.slow) for m in MODES[1:])])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_every_surrogate(tiny_policy, tmp_path, mode, surrogate):
    loss_type, level = SURROGATES[surrogate]
    trainer = make_trainer(
        tiny_policy,
        tmp_path,
        *(4, 4, 4),
        loss_normalization=mode,
        loss_type=loss_type,
        importance_sampling_level=level,
    )
    recorded = windows(trainer)
    close(recorded.gradients[0], expected_gradient(trainer.model, recorded.rows[0], mode, surrogate))


def test_groups_of_completions_made_by_another_generation_step(tiny_policy, tmp_path):
    """A subclass or a test may replace the generation step: the completions of one prompt then are a group."""
    trainer = make_trainer(tiny_policy, tmp_path, 4, 4, 4, loss_normalization="group_token")
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: {
        key: value for key, value in generate(inputs).items() if not key.startswith("plus_")
    }
    recorded = windows(trainer)
    close(recorded.gradients[0], expected_gradient(trainer.model, recorded.rows[0], "group_token", "dapo"))


def test_num_iterations_see_every_completion_as_often(tiny_policy, tmp_path):
    trainer = make_trainer(tiny_policy, tmp_path, 4, 4, 2, num_iterations=2, loss_normalization="group_token")
    recorded = windows(trainer)
    assert len(recorded.rows[0]) == 16
    close(recorded.gradients[0], expected_gradient(trainer.model, recorded.rows[0], "group_token", "dapo"))


def test_a_short_last_window(tiny_policy, tmp_path):
    """16 rows of data, 64 completions, windows of 24: the last one of the epoch holds 16."""
    trainer = make_trainer(
        tiny_policy, tmp_path, 8, 3, 1, max_steps=-1, num_train_epochs=1, loss_normalization="sequence"
    )
    recorded = windows(trainer)
    assert [len(window) for window in recorded.rows] == [24, 24, 16]
    for gradient, window in zip(recorded.gradients, recorded.rows, strict=True):
        close(gradient, expected_gradient(trainer.model, window, "sequence", "dapo"))


def test_trls_own_normaliser_depends_on_the_cut(tiny_policy, tmp_path):
    """The reason for all of this; and that None leaves TRL's normaliser alone."""
    gradients = []
    for i, cut in enumerate([(16, 1, 1), (4, 4, 4), (1, 16, 16)]):
        trainer = make_trainer(tiny_policy, tmp_path / str(i), *cut, loss_normalization=None, loss_type="bnpo")
        gradients += windows(trainer).gradients
    assert (gradients[0] - gradients[1]).norm() > 0.05 * gradients[0].norm()
    assert (gradients[0] - gradients[2]).norm() > 0.2 * gradients[0].norm()


@pytest.mark.parametrize("length", [None, 10])
def test_the_length_of_constant(tiny_policy, tmp_path, length):
    trainer = make_trainer(
        tiny_policy, tmp_path, 16, 1, 1, loss_normalization="constant", loss_normalization_length=length
    )
    recorded = windows(trainer)
    expected = expected_gradient(trainer.model, recorded.rows[0], "constant", "dapo") * 48 / (length or 48)
    close(recorded.gradients[0], expected)


def test_truncated_completions_are_in_no_denominator(tiny_policy, tmp_path):
    def cut_off(prompts, trainer):
        out = rollout(prompts, trainer)
        for i in range(0, len(prompts), 3):
            out["completion_ids"][i][-1] = 7
        return out

    trainer = make_trainer(tiny_policy, tmp_path, 4, 4, 4, mask_truncated_completions=True)
    trainer.rollout_func = cut_off
    recorded = windows(trainer)
    kept = [row for row in recorded.rows[0] if row["completion_mask"].any()]
    assert len(kept) == 10
    for mode in ("sequence", "token", "group_token"):
        choose(trainer, mode, "dapo")
        gradient = windows(trainer).gradients[0]
        close(gradient, expected_gradient(trainer.model, kept, mode, "dapo"))


def test_evaluation_normalises_its_own_batch(tiny_policy, tmp_path):
    trainer = make_trainer(tiny_policy, tmp_path, 4, 1, 1, per_device_eval_batch_size=8)
    trainer.model.eval()
    inputs = trainer._prepare_inputs(rows(1, 3))
    assert SCALE not in inputs
    inputs["advantages"] = torch.ones(8)
    with torch.no_grad():
        loss = trainer._compute_loss(trainer.model, inputs)
    # ratio 1 everywhere: the mean over tokens of -1
    assert float(loss) == pytest.approx(-1, rel=1e-6)
    assert trained_tokens(inputs).sum() < inputs["completion_mask"].sum()


def test_a_window_that_cannot_be_known_is_an_error(tiny_policy, tmp_path):
    trainer = make_trainer(tiny_policy, tmp_path, 4, 4, 2)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 4
    with pytest.raises(RuntimeError, match=r"`get_batch_samples` was not called"):
        trainer._prepare_inputs(rows(1, 3))


def test_a_window_inside_one_generation_batch_needs_no_announcement(tiny_policy, tmp_path):
    trainer = make_trainer(tiny_policy, tmp_path, 4, 2, 4)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    batch = rows(0, 1, 2, 3)
    for _ in range(2):
        total = 0.0
        for _ in range(2):
            inputs = trainer._prepare_inputs(batch)
            total += float((inputs[SCALE].unsqueeze(1) * trained_tokens(inputs)).sum())
            trainer._step += 1
        assert total == pytest.approx(1)
