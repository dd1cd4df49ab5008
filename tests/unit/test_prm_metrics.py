"""The measures of step scores, against brute force and numbers made by hand."""

import math

import numpy as np
import pytest

from trl_grpo_plus.reward_models.metrics import auc, calibration_error, first_error_f1, step_metrics


def test_auc_is_the_share_of_rightly_ordered_pairs():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 6, 60) / 5  # many ties
    labels = rng.random(60) < scores * 0.5 + 0.2
    pairs = [
        1.0 if right > wrong else 0.5 if right == wrong else 0.0
        for right in scores[labels]
        for wrong in scores[~labels]
    ]
    assert auc(scores, labels) == pytest.approx(np.mean(pairs), abs=1e-12)
    assert auc(-scores, labels) == pytest.approx(1 - np.mean(pairs), abs=1e-12)
    assert math.isnan(auc(scores, np.ones(60, dtype=bool)))


def test_first_error_f1_by_hand():
    labels = [[1, 1, 0], [1, 0, 1], [0, 0], [1, 1], [1]]
    scores = [
        [0.9, 0.8, 0.1],  # found
        [0.4, 0.1, 0.9],  # named a step too early
        [0.5, 0.1],  # a score at the threshold is right, so the second step is named
        [0.9, 0.9],  # right
        [0.6],  # right
    ]
    measured = first_error_f1(scores, labels)
    assert measured["accuracy_wrong"] == pytest.approx(1 / 3)
    assert measured["accuracy_right"] == 1.0
    assert measured["f1"] == pytest.approx(2 * (1 / 3) / (4 / 3))
    assert first_error_f1([[0.9]], [[0]])["accuracy_wrong"] == 0.0
    assert math.isnan(first_error_f1([[0.9]], [[1]])["f1"])


def test_calibration_error_by_hand():
    # Bin [0.2, 0.3): |(0.2 + 0.25) - 1|; bin [0.9, 1]: |(0.95 + 1.0) - 2|; over 4 steps.
    assert calibration_error(np.array([0.2, 0.25, 0.95, 1.0]), np.array([0, 1, 1, 1])) == pytest.approx(0.6 / 4)
    rng = np.random.default_rng(0)
    p = rng.random(200_000)
    assert calibration_error(p, rng.random(200_000) < p) < 0.01


def test_step_metrics_with_soft_labels():
    measured = step_metrics([[0.8, 0.4], [0.3]], [[1.0, 0.25], [0.5]])
    assert measured["accuracy"] == pytest.approx(2 / 3)
    assert measured["brier"] == pytest.approx((0.04 + 0.0225 + 0.04) / 3)
    assert measured["auc"] == pytest.approx(0.5)
    assert measured["first_error_accuracy_wrong"] == 1.0
    assert measured["first_error_accuracy_right"] == 0.0
    assert measured["first_error_f1"] == 0.0
