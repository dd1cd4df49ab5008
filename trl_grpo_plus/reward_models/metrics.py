"""How well step scores agree with step labels. Pure functions on numpy arrays."""

from collections.abc import Sequence

import numpy as np


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve: the probability that a right step scores above a wrong one, ties counted half.

    Args:
        scores: (N,) any real numbers.
        labels: (N,) booleans.

    Returns:
        A number in [0, 1]; NaN if one of the two classes is missing.
    """
    scores, labels = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=bool)
    right, wrong = int(labels.sum()), int((~labels).sum())
    if not right or not wrong:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[labels].sum() - right * (right + 1) / 2) / (right * wrong))


def first_error(labels: Sequence[bool]) -> int | None:
    """Index of the first wrong step, None if all are right."""
    return next((j for j, right in enumerate(labels) if not right), None)


def first_error_f1(
    scores: Sequence[Sequence[float]], labels: Sequence[Sequence[bool]], threshold: float = 0.5
) -> dict[str, float]:
    """ProcessBench's measure (arXiv 2412.06559 section 4.1): is the first wrong step found?

    Args:
        scores: For each solution the scores of its steps.
        labels: The same shape; whether a step is right.
        threshold: A step is predicted wrong if its score is below.

    Returns:
        `accuracy_wrong`, the share of solutions with an error whose first wrong step was named exactly;
        `accuracy_right`, the share of solutions without one in which none was named; `f1`, their harmonic mean. NaN
        where there are no such solutions.
    """
    hits: dict[bool, list[bool]] = {True: [], False: []}
    for row_scores, row_labels in zip(scores, labels, strict=True):
        truth = first_error(row_labels)
        hits[truth is None].append(first_error([score >= threshold for score in row_scores]) == truth)
    right, wrong = (float(np.mean(hits[key])) if hits[key] else float("nan") for key in (True, False))
    f1 = 2 * right * wrong / (right + wrong) if right + wrong else 0.0
    return {
        "f1": float(f1) if not np.isnan(right + wrong) else float("nan"),
        "accuracy_right": right,
        "accuracy_wrong": wrong,
    }


def calibration_error(probabilities: np.ndarray, targets: np.ndarray, num_bins: int = 10) -> float:
    """Expected calibration error: mean over equal-width bins of |mean probability - mean target|, by bin size."""
    probabilities = np.asarray(probabilities, dtype=np.float64)
    targets = np.asarray(targets, dtype=np.float64)
    if not len(probabilities):
        return float("nan")
    bins = np.minimum((probabilities * num_bins).astype(int), num_bins - 1)
    gap = np.zeros(num_bins)
    np.add.at(gap, bins, probabilities - targets)
    return float(np.abs(gap).sum() / len(probabilities))


def step_metrics(
    scores: Sequence[Sequence[float]], targets: Sequence[Sequence[float]], threshold: float = 0.5
) -> dict[str, float]:
    """All measures of a set of solutions.

    Args:
        scores: For each solution the probabilities that its steps are right.
        targets: The same shape; labels 0 and 1, or soft labels between, which count as right from `threshold` on.
        threshold: Where a probability, and a soft label, turns from wrong to right.

    Returns:
        `accuracy`, `auc`, `brier` and `ece` over all steps, and `first_error_f1`, `first_error_accuracy_wrong`,
        `first_error_accuracy_right` over the solutions.
    """
    flat_scores = np.concatenate([np.asarray(row, dtype=np.float64) for row in scores]) if len(scores) else np.zeros(0)
    flat_targets = (
        np.concatenate([np.asarray(row, dtype=np.float64) for row in targets]) if len(scores) else np.zeros(0)
    )
    labels = flat_targets >= threshold
    found = first_error_f1(scores, [[target >= threshold for target in row] for row in targets], threshold)
    known = len(flat_scores) > 0
    return {
        "accuracy": float(np.mean((flat_scores >= threshold) == labels)) if known else float("nan"),
        "auc": auc(flat_scores, labels),
        "brier": float(np.mean((flat_scores - flat_targets) ** 2)) if known else float("nan"),
        "ece": calibration_error(flat_scores, flat_targets),
        "first_error_f1": found["f1"],
        "first_error_accuracy_wrong": found["accuracy_wrong"],
        "first_error_accuracy_right": found["accuracy_right"],
    }
