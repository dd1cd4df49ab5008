"""Metrics against exhaustive enumeration of subsets, hand-computed numbers and real labelled samples."""

import json
import math
from collections import defaultdict
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_plus.evaluation import metrics as M


def enumerate_majority(clusters, correct, k):
    """Plain vote on every k-subset, ties averaged: the definition, by brute force."""
    outcomes = []
    for subset in combinations(range(len(clusters)), k):
        votes = defaultdict(list)
        for i in subset:
            if clusters[i] is not None:
                votes[clusters[i]].append(i)
        if not votes:
            outcomes.append(0.0)
            continue
        top = max(map(len, votes.values()))
        # A cluster pays the mean verdict of all its members, chosen or not.
        worth = [
            np.mean([correct[i] for i in range(len(clusters)) if clusters[i] == c])
            for c, members in votes.items()
            if len(members) == top
        ]
        outcomes.append(np.mean(worth))
    return float(np.mean(outcomes))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d", "e"]), st.booleans()), min_size=1, max_size=9),
    st.data(),
)
def test_majority_is_the_expectation_over_all_subsets(samples, data):
    clusters, correct = [c for c, _ in samples], [float(v) for _, v in samples]
    k = data.draw(st.integers(1, len(samples)))
    assert M.majority_at_k(clusters, correct, k) == pytest.approx(enumerate_majority(clusters, correct, k), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    expected = np.mean([any(s) for s in combinations(correct, k)])
    assert M.pass_at_k(len(correct), sum(correct), k) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=8), st.data())
def test_best_of_k_is_the_expectation_over_all_subsets(samples, data):
    correct, scores = [float(c) for c, _ in samples], [float(s) for _, s in samples]
    k = data.draw(st.integers(1, len(samples)))
    outcomes = []
    for subset in combinations(range(len(samples)), k):
        top = max(scores[i] for i in subset)
        outcomes.append(np.mean([correct[i] for i in subset if scores[i] == top]))
    assert M.best_of_k(correct, scores, k) == pytest.approx(float(np.mean(outcomes)), abs=1e-12)


def test_hand_computed_votes():
    # Two of three: the vote of all three is right.
    assert M.majority_at_k(["x", "x", "y"], [1, 1, 0], 3) == 1.0
    # A tie of one right and one wrong answer pays a half; the string vote takes the first.
    assert M.majority_at_k(["x", "y"], [1, 0], 2) == 0.5
    assert M.string_vote(["x", "y"], [1, 0]) == 1.0
    assert M.string_vote(["y", "x"], [0, 1]) == 0.0
    # Two unparseable answers do not outvote a right one, but they do as strings.
    assert M.majority_at_k([None, None, "x"], [0, 0, 1], 3) == 1.0
    assert M.string_vote([None, None, "x"], [0, 0, 1]) == 0.0
    assert M.majority_at_k([None, None], [0, 0], 2) == 0.0
    # The string vote of the first k looks at no later sample.
    assert M.string_vote(["x", "y", "y"], [1, 0, 0], k=1) == 1.0


def test_majority_of_many_samples_is_exact_and_fast():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 12, size=64).tolist()
    correct = [float(c == 3) for c in labels]
    exact = M.majority_at_k(labels, correct, 16)
    draws = []
    for _ in range(4000):
        subset = rng.choice(64, 16, replace=False)
        counts = np.bincount([labels[i] for i in subset], minlength=12)
        winners = np.flatnonzero(counts == counts.max())
        draws.append((3 in winners) / len(winners))
    assert exact == pytest.approx(np.mean(draws), abs=4 * np.std(draws) / math.sqrt(4000))


def test_weighted_vote():
    clusters, correct = ["x", "y", "y"], [1, 0, 0]
    assert M.weighted_vote_at_k(clusters, correct, [0.9, 0.2, 0.3], 3) == 1.0
    assert M.weighted_vote_at_k(clusters, correct, [0.4, 0.2, 0.3], 3) == 0.0
    # k = 2 by hand: {x,y1} x wins, {x,y2} x wins, {y1,y2} y wins.
    assert M.weighted_vote_at_k(clusters, correct, [0.9, 0.2, 0.3], 2) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="sigmoid"):
        M.weighted_vote_at_k(clusters, correct, [-1.0, 0.2, 0.3], 3)
    assert M.weighted_vote_at_k(clusters, correct, [-1.0, 0.2, 0.3], 3, transform="sigmoid") == 0.0
    # A weight of 0 is a vote of nothing: it neither wins alone against others nor for who was not drawn.
    assert M.weighted_vote_at_k(["x", "y"], [1, 0], [0.0, 0.5], 2) == 0.0
    assert M.weighted_vote_at_k(["x", "y"], [1, 0], [0.0, 0.0], 1) == 0.5
    # More subsets than are enumerated: an estimate near the exact value of the plain vote.
    many = ["a"] * 9 + ["b"] * 7 + ["c"] * 8
    estimate = M.weighted_vote_at_k(many, [c == "a" for c in many], [1.0] * 24, 12)
    assert estimate == pytest.approx(M.majority_at_k(many, [c == "a" for c in many], 12), abs=0.015)
    # Uniform weights: the plain vote.
    labels, verdicts = ["a", "b", "a", None, "c"], [0, 1, 0, 0, 0]
    for k in range(1, 6):
        assert M.weighted_vote_at_k(labels, verdicts, [1.0] * 5, k) == pytest.approx(
            enumerate_majority(labels, verdicts, k)
        )


def test_step_aggregation():
    steps = [0.9, None, 0.5, 0.8]
    assert M.aggregate_step_scores(steps, "min") == 0.5
    assert M.aggregate_step_scores(steps, "last") == 0.8
    assert M.aggregate_step_scores(steps, "mean") == pytest.approx(2.2 / 3)
    assert M.aggregate_step_scores(steps, "product") == pytest.approx(0.36)
    assert M.aggregate_step_scores([None], "min") is None
    with pytest.raises(ValueError, match="median"):
        M.aggregate_step_scores(steps, "median")


def test_clusters_use_equivalence_and_the_verdicts():
    def equal(a, b):
        return float(eval(a)) == float(eval(b))

    assert M.cluster_answers(["1/2", "0.5", None, "2", "4/2"], equal) == [1, 1, None, 2, 2]
    # Right ones are one cluster whatever they look like, and None with a right verdict votes.
    assert M.cluster_answers(["1/2", "0.5", None, "2"], equal, [True, True, True, False]) == [0, 0, 0, 1]


def test_wilson_interval():
    # Known values (Newcombe 1998, table I): 81/263 -> 0.2553..0.3662, 0/20 -> 0..0.1611.
    i = M.wilson_interval(81, 263)
    assert (i.low, i.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    i = M.wilson_interval(0, 20)
    assert (i.low, i.high) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_bootstrap_interval_matches_the_normal_approximation():
    x = np.random.default_rng(0).normal(0.5, 0.1, size=400)
    i = M.bootstrap_interval(x)
    half = 1.96 * x.std(ddof=1) / 20
    assert (i.low, i.high) == pytest.approx((x.mean() - half, x.mean() + half), abs=6e-4)
    assert M.interval([0, 1, 1]).method == "wilson"
    assert M.interval([0, 0.5, 1]).method == "bootstrap"


def test_mcnemar_exact():
    # Ten discordant pairs, all gained: 2 / 2^10. One of ten lost: 2 * 11 / 2^10.
    assert M.mcnemar_exact(10, 0) == pytest.approx(2 / 1024)
    assert M.mcnemar_exact(9, 1) == pytest.approx(22 / 1024)
    assert M.mcnemar_exact(0, 0) == 1.0
    assert M.mcnemar_exact(5, 5) == 1.0


def test_paired_test():
    a, b = [0, 0, 1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]
    t = M.paired_test(a, b)
    assert (t.method, t.gained, t.lost, t.difference) == ("mcnemar", 3, 1, 0.25)
    assert t.p_value == pytest.approx(2 * 5 / 16)
    assert t.low <= t.difference <= t.high
    # Four equal paired differences: 2 of 16 sign patterns are as extreme.
    t = M.paired_test([0.25] * 4, [0.5] * 4)
    assert (t.method, t.p_value) == ("sign-flip", 2 / 16)
    with pytest.raises(ValueError, match="in common"):
        M.paired_test([], [])


@pytest.mark.parametrize("k", [0, 4])
def test_k_outside_the_samples_is_an_error(k):
    for call in (
        lambda: M.pass_at_k(3, 1, k),
        lambda: M.majority_at_k(["a"] * 3, [1] * 3, k),
        lambda: M.best_of_k([1] * 3, [0.0] * 3, k),
        lambda: M.string_vote(["a"] * 3, [1] * 3, k),
    ):
        with pytest.raises(ValueError, match="number of samples"):
            call()


def test_real_math_samples(shared_data):
    """The published verdicts of 100 problems with 8 samples each give the published metrics."""
    rows = [
        json.loads(line)
        for line in shared_data("model_outputs/math_qwen25_samples_100x8.jsonl").read_text().splitlines()
    ]
    problems = defaultdict(list)
    for row in rows:
        problems[row["id"]].append(row)
    correct = [[float(r["score"]) for r in p] for p in problems.values()]
    got = {k: 100 * np.mean([M.pass_at_k(8, sum(c), k) for c in correct]) for k in (1, 2, 4, 8)}
    assert {k: round(v, 1) for k, v in got.items()} == {1: 91.0, 2: 93.3, 4: 95.1, 8: 96.0}
    assert 100 * M.mean_at_k(correct) == pytest.approx(91.0)

    def never_equal(a, b):
        return False

    labels = [
        M.cluster_answers([r["pred"] for r in p], never_equal, [r["score"] for r in p]) for p in problems.values()
    ]
    votes = [M.majority_at_k(c, v, 8) for c, v in zip(labels, correct, strict=True)]
    assert 100 * np.mean(votes) == pytest.approx(92.5)
    strings = [M.string_vote([r["pred"] for r in p], [r["score"] for r in p]) for p in problems.values()]
    assert 100 * np.mean(strings) == pytest.approx(93.0)
    best = [M.best_of_k(v, [r["rm_score"] for r in p], 8) for v, p in zip(correct, problems.values(), strict=True)]
    assert 100 * np.mean(best) == pytest.approx(94.0)
