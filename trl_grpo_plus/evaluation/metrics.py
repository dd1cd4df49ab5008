"""Metrics of sampled answers: mean@k, pass@k, majority votes, reward-model votes, intervals and paired tests.

Departures from the usual scripts: votes at k < n are the exact expectation over all k-subsets of the n samples (not
the first k samples), a tied vote pays the average over the tied answers (not the answer that came first), and an
answer that could not be parsed casts no vote. `string_vote` is the usual script's variant, kept for comparison with
published numbers.

Everything here is a pure function of numbers and hashable labels; nothing imports torch or the grader.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

STEP_AGGREGATIONS = ("min", "last", "mean", "product")
SCORE_TRANSFORMS = ("none", "sigmoid", "exp")

# Subsets of the n samples are enumerated up to this number and drawn at random beyond it.
MAX_SUBSETS = 20_000


def mean_at_k(correct: Sequence[Sequence[float]]) -> float:
    """Mean over problems of the mean verdict of a problem's samples (`avg@k`).

    Args:
        correct: one sequence a problem, with one 0/1 verdict a sample; problems can differ in their number of samples.

    Raises:
        ValueError: no problem, or a problem without samples.
    """
    return float(np.mean(_per_problem_means(correct)))


def _per_problem_means(correct: Sequence[Sequence[float]]) -> np.ndarray:
    if not len(correct):
        raise ValueError("no problem to average over")
    if any(len(row) == 0 for row in correct):
        raise ValueError("a problem has no samples; leave it out or sample it again")
    return np.array([float(np.mean(row)) for row in correct])


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples, drawn without replacement from n, is correct.

    `1 - C(n - c, k) / C(n, k)`: the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1), exact in
    rationals.

    Raises:
        ValueError: k is not in 1..n or c is not in 0..n.
    """
    n, c = int(num_samples), int(num_correct)
    _check_k(n, k)
    if not 0 <= c <= n:
        raise ValueError(f"num_correct is {c} with {n} samples")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(clusters: Sequence[Hashable | None], correct: Sequence[float], k: int) -> float:
    """Expected correctness of the majority vote of k samples drawn without replacement from n.

    The expectation over all k-subsets is exact: for each cluster and each number of votes j, the number of subsets
    where no other cluster has more than j votes is counted by number of ties, and a tie of m + 1 clusters pays 1 / (m
    + 1). With k = n it is the plain vote with ties averaged.

    Args:
        clusters: (n,) label of each sample's answer; samples with equal labels agree. None = no answer, no vote.
        correct: (n,) verdicts. A cluster pays the mean verdict of its members.
        k: size of the vote.

    Returns:
        float in [0, 1]. A subset in which nobody votes counts as wrong.
    """
    n = len(clusters)
    _check_k(n, k)
    if len(correct) != n:
        raise ValueError(f"{n} labels but {len(correct)} verdicts")
    sizes = Counter(c for c in clusters if c is not None)
    silent = n - sum(sizes.values())
    worth = {
        label: float(np.mean([float(v) for c, v in zip(clusters, correct, strict=True) if c == label]))
        for label in sizes
    }
    total = 0.0
    wins_by_size: dict[int, float] = {}
    for label, size in sizes.items():
        if worth[label] == 0.0:
            continue
        if size not in wins_by_size:
            others = sorted(sizes.values())
            others.remove(size)
            wins_by_size[size] = _win_probability(size, others, silent, k)
        total += worth[label] * wins_by_size[size]
    return min(total, 1.0)


def _win_probability(size: int, others: list[int], silent: int, k: int) -> float:
    """Expected share of the win of a cluster of `size` samples in a vote of k, ties shared."""
    ways = 0.0
    denominator = math.comb(size + sum(others) + silent, k)
    for j in range(1, min(size, k) + 1):
        rest = k - j
        # Clusters smaller than j can neither win nor tie: they and the silent samples are chosen freely.
        free = silent + sum(o for o in others if o < j)
        rivals = [o for o in others if o >= j]
        # table[m][x]: ways to take x samples of the rivals such that none has more than j and exactly m have j.
        table = [[1] + [0] * rest]
        for rival in rivals:
            grown = [[0] * (rest + 1) for _ in range(min(len(table), rest // j) + 1)]
            for m, row in enumerate(table):
                for x, count in enumerate(row):
                    if not count:
                        continue
                    for i in range(min(j - 1, rest - x) + 1):
                        grown[m][x + i] += count * math.comb(rival, i)
                    if x + j <= rest:
                        grown[m + 1][x + j] += count * math.comb(rival, j)
            table = grown
        for m, row in enumerate(table):
            chosen = sum(count * math.comb(free, rest - x) for x, count in enumerate(row) if count)
            ways += math.comb(size, j) * chosen / denominator / (m + 1)
    return ways


def string_vote(answers: Sequence[str | None], correct: Sequence[float], k: int | None = None) -> float:
    """Verdict of the most frequent answer *string* among the first k samples; of tied strings the first to appear
    wins.

    This is the vote of the published evaluation scripts (`Counter.most_common(1)`): it splits "1/2" from "0.5",
    depends on the order of the samples, and lets the empty answer vote.
    """
    k = len(answers) if k is None else k
    _check_k(len(answers), k)
    strings = ["" if a is None else a for a in answers[:k]]
    winner = Counter(strings).most_common(1)[0][0]
    return float(correct[strings.index(winner)])


def weighted_vote_at_k(
    clusters: Sequence[Hashable | None],
    correct: Sequence[float],
    scores: Sequence[float],
    k: int,
    transform: str = "none",
    seed: int = 0,
) -> float:
    """Expected correctness of the vote of k samples in which each sample's vote weighs its reward-model score.

    Args:
        clusters, correct: as in `majority_at_k`.
        scores: (n,) reward-model scores.
        k: size of the vote. k < n averages over all k-subsets, or over `MAX_SUBSETS` seeded random ones when there are
            more (then an estimate, not exact).
        transform: "none", "sigmoid" or "exp" of the score. Weights must be positive for a vote to mean something:
            raw logits want "sigmoid".

    Raises:
        ValueError: a weight is negative or not finite.
    """
    n = len(clusters)
    _check_k(n, k)
    weights = transform_scores(scores, transform)
    if not np.all(np.isfinite(weights)) or np.any(weights < 0):
        raise ValueError(
            f"vote weights must be finite and not negative, got [{weights.min():g}, {weights.max():g}]; "
            "use transform='sigmoid' for raw reward-model logits"
        )
    labels = list(dict.fromkeys(c for c in clusters if c is not None))
    if not labels:
        return 0.0
    members = np.array([[c == label for label in labels] for c in clusters], dtype=float)
    worth = (members * np.asarray(correct, dtype=float)[:, None]).sum(0) / members.sum(0)
    chosen = _subset_matrix(n, k, seed)
    votes = chosen @ (members * weights[:, None])
    best = votes.max(axis=1, keepdims=True)
    # A cluster of which no sample was drawn cannot win, not even with a weight of 0.
    winners = (votes >= best - 1e-12 * np.maximum(1.0, best)) & (chosen @ members > 0)
    count = winners.sum(axis=1)
    paid = np.divide((winners * worth).sum(axis=1), count, out=np.zeros(len(chosen)), where=count > 0)
    return float(paid.mean())


@lru_cache(maxsize=32)
def _subset_matrix(n: int, k: int, seed: int) -> np.ndarray:
    """(subsets, n) indicators of all k-subsets, or of `MAX_SUBSETS` random ones."""
    if math.comb(n, k) <= MAX_SUBSETS:
        rows = np.array(list(combinations(range(n), k)))
    else:
        rows = np.random.default_rng(seed).random((MAX_SUBSETS, n)).argpartition(k - 1, axis=1)[:, :k]
    matrix = np.zeros((len(rows), n))
    np.put_along_axis(matrix, rows, 1.0, axis=1)
    return matrix


def best_of_k(correct: Sequence[float], scores: Sequence[float], k: int) -> float:
    """Expected correctness of the sample that the reward model scores highest among k drawn without replacement from
    n.

    Exact: with samples in ascending order of score, the block of equal scores at positions [lo, hi) holds the maximum
    of `C(hi, k) - C(lo, k)` subsets, and by symmetry each of its members is as likely to be taken.
    """
    n = len(correct)
    _check_k(n, k)
    scores = np.asarray(scores, dtype=float)
    if scores.shape != (n,):
        raise ValueError(f"{n} verdicts but scores of shape {scores.shape}")
    if not np.all(np.isfinite(scores)):
        raise ValueError("a reward-model score is not finite")
    order = np.argsort(scores, kind="stable")
    total, lo = 0.0, 0
    while lo < n:
        hi = lo
        while hi < n and scores[order[hi]] == scores[order[lo]]:
            hi += 1
        mass = (math.comb(hi, k) - math.comb(lo, k)) / math.comb(n, k)
        total += mass * float(np.mean([float(correct[i]) for i in order[lo:hi]]))
        lo = hi
    return total


def aggregate_step_scores(steps: Sequence[float | None], how: str) -> float | None:
    """One score of a completion from the scores of its steps: their min, last, mean or product.

    Steps that were not scored (None) are left out; None when no step was scored.
    """
    if how not in STEP_AGGREGATIONS:
        raise ValueError(f"step aggregation {how!r} is not one of {', '.join(STEP_AGGREGATIONS)}")
    scored = [float(s) for s in steps if s is not None]
    if not scored:
        return None
    return {"min": min, "last": lambda s: s[-1], "mean": lambda s: sum(s) / len(s), "product": math.prod}[how](scored)


def transform_scores(scores: Sequence[float], transform: str) -> np.ndarray:
    """Scores as float64, through "none", "sigmoid" or "exp" (shifted by the maximum, which no vote can see)."""
    x = np.asarray(scores, dtype=float)
    if transform == "none":
        return x
    if transform == "sigmoid":
        return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))
    if transform == "exp":
        return np.exp(x - x.max()) if x.size else x
    raise ValueError(f"score transform {transform!r} is not one of {', '.join(SCORE_TRANSFORMS)}")


def cluster_answers(
    answers: Sequence[str | None],
    equal: Callable[[str, str], bool],
    correct: Sequence[bool] | None = None,
) -> list[int | None]:
    """Label of each answer's equivalence cluster; None for None.

    An answer joins the first cluster whose representative it equals. With `correct`, all samples with a right verdict
    form cluster 0: each of them equals the gold answer, and no wrong one does.

    Args:
        answers: extracted answers, None = unparseable.
        equal: equivalence of two answers, called only for strings that differ.
        correct: verdicts; a right verdict without an extracted answer is a vote for the gold answer too.
    """
    representatives: list[tuple[int, str]] = []
    known: dict[str, int] = {}
    labels: list[int | None] = []
    next_label = 1
    for i, answer in enumerate(answers):
        if correct is not None and correct[i]:
            labels.append(0)
            continue
        if answer is None:
            labels.append(None)
            continue
        if answer not in known:
            for label, representative in representatives:
                if equal(representative, answer):
                    known[answer] = label
                    break
            else:
                known[answer] = next_label
                representatives.append((next_label, answer))
                next_label += 1
        labels.append(known[answer])
    return labels


@dataclass(frozen=True)
class Interval:
    """A confidence interval: `low <= estimate <= high`, and the method that gave it."""

    low: float
    high: float
    method: str
    confidence: float = 0.95


def wilson_interval(successes: float, total: int, confidence: float = 0.95) -> Interval:
    """Wilson score interval of a proportion (one 0/1 verdict a problem)."""
    if total <= 0:
        raise ValueError("an interval needs at least one problem")
    if not 0 <= successes <= total:
        raise ValueError(f"{successes} successes of {total}")
    z = _normal_quantile(0.5 + confidence / 2)
    p = successes / total
    centre = p + z * z / (2 * total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return Interval(max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale), "wilson", confidence)


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of the mean over problems (problems are resampled, with all their samples)."""
    means = _bootstrap_means(np.asarray(values, dtype=float), resamples, seed)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return Interval(float(low), float(high), "bootstrap", confidence)


def interval(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Interval:
    """Wilson where every value is 0 or 1, bootstrap over problems otherwise."""
    x = np.asarray(values, dtype=float)
    if np.all((x == 0) | (x == 1)):
        return wilson_interval(float(x.sum()), len(x), confidence)
    return bootstrap_interval(x, confidence, seed=seed)


@dataclass(frozen=True)
class PairedTest:
    """Comparison of B with A on the same problems.

    Attributes:
        difference: mean of B minus mean of A.
        low, high: paired bootstrap interval of the difference.
        p_value: two-sided, of "no difference".
        method: "mcnemar" (exact, 0/1 values) or "sign-flip" (permutation test of the paired differences).
        gained, lost: number of problems where B is higher and where A is higher.
    """

    difference: float
    low: float
    high: float
    p_value: float
    method: str
    gained: int
    lost: int
    problems: int
    confidence: float = 0.95

    def to_dict(self) -> dict:
        return asdict(self)


def paired_test(
    a: Sequence[float], b: Sequence[float], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> PairedTest:
    """Tests whether model B differs from model A, given one value a problem for each, in the same order.

    0/1 values take the exact McNemar test (binomial on the problems that changed side); others, such as mean@k, the
    sign-flip permutation test with `resamples` seeded flips (all 2^d flips when there are at most 12 differences).
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"paired values must have one shape, got {a.shape} and {b.shape}")
    if not a.size:
        raise ValueError("the two models have no problem in common")
    d = b - a
    gained, lost = int((d > 0).sum()), int((d < 0).sum())
    means = _bootstrap_means(d, resamples, seed)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    if np.all((a == 0) | (a == 1)) and np.all((b == 0) | (b == 1)):
        method, p = "mcnemar", mcnemar_exact(gained, lost)
    else:
        method, p = "sign-flip", _sign_flip(d[d != 0], resamples, seed)
    return PairedTest(float(d.mean()), float(low), float(high), p, method, gained, lost, len(d), confidence)


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided exact McNemar p-value: `min(1, 2 P[Binomial(gained + lost, 1/2) <= min])`."""
    n = gained + lost
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(gained, lost) + 1)) / 2**n)


def _sign_flip(d: np.ndarray, resamples: int, seed: int) -> float:
    if not d.size:
        return 1.0
    observed = abs(d.sum())
    if d.size <= 12:
        flips = np.array(np.meshgrid(*[[-1.0, 1.0]] * d.size)).reshape(d.size, -1).T
        return float(np.mean(np.abs(flips @ d) >= observed - 1e-12))
    rng = np.random.default_rng(seed)
    hits = 0
    for size in _chunks(resamples, d.size):
        flips = rng.integers(0, 2, size=(size, d.size)) * 2.0 - 1.0
        hits += int((np.abs(flips @ d) >= observed - 1e-12).sum())
    return (hits + 1) / (resamples + 1)


def _bootstrap_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    if not values.size:
        raise ValueError("an interval needs at least one problem")
    rng = np.random.default_rng(seed)
    parts = [
        values[rng.integers(0, values.size, size=(size, values.size))].mean(axis=1)
        for size in _chunks(resamples, values.size)
    ]
    return np.concatenate(parts)


def _chunks(resamples: int, width: int):
    """Sizes that add up to `resamples` and keep a (size, width) array near a million cells."""
    step = max(1, 1_000_000 // width)
    for start in range(0, resamples, step):
        yield min(step, resamples - start)


def _check_k(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k} needs 1 <= k <= {n}, the number of samples of the problem")


def _normal_quantile(p: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)
