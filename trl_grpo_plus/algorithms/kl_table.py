"""
Prints which KL gradients are exact, by enumeration: `python -m trl_grpo_plus.algorithms.kl_table [--plot FILE]`.

Nothing is sampled. A policy is a table of logits over a vocabulary of 5, one row a prefix, for sequences of 3 tokens;
the expectation of a gradient estimate is the sum over all 125 sequences of their probability under the *sampling*
policy times the gradient of the loss on that sequence. It is compared with the autograd gradient of the exact KL.
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trl_grpo_plus.algorithms.kl import (
    ESTIMATORS,
    full_vocab_kl,
    full_vocab_score_coefficients,
    importance_weights,
    kl_loss,
    kl_score_coefficients,
    per_decision_weights,
    top_k_kl,
)

VOCAB, LENGTH = 5, 3


@dataclass(frozen=True)
class Combination:
    """One legal choice of the KL options of `GRPOPlusConfig`; `exact_on` / `exact_off`: what the docs claim."""

    placement: str
    estimator: str | None
    importance: str
    coefficient: str | None
    horizon: str
    exact_on: bool
    exact_off: bool
    truncation: float | None = None
    top_k: int | None = None

    def __str__(self) -> str:
        parts = [self.placement, self.estimator, self.coefficient, self.horizon, self.importance]
        parts += [f"truncation {self.truncation:g}" if self.truncation else None]
        parts += [f"top-{self.top_k}" if self.top_k else None]
        return " / ".join(part for part in parts if part)


COMBINATIONS = (
    Combination("loss", "k2", "none", None, "token", False, False),
    Combination("loss", "k3", "none", None, "token", False, False),
    Combination("loss", "k1", "differentiable", None, "token", False, False),
    Combination("loss", "k3", "differentiable", None, "token", False, False),
    Combination("loss", "k2", "stopped", None, "token", False, False),
    Combination("loss", "k3", "stopped", None, "token", False, False),
    Combination("loss", "k2", "none", None, "sequence", True, False),
    Combination("loss", "k3", "none", None, "sequence", False, False),
    Combination("loss", "k1", "differentiable", None, "sequence", True, True),
    Combination("loss", "k3", "differentiable", None, "sequence", True, True),
    Combination("loss", "k2", "stopped", None, "sequence", True, True),
    Combination("loss", "k3", "stopped", None, "sequence", False, False),
    Combination("reward", "k1", "none", "old", "token", False, False),
    Combination("reward", "k1", "none", "old", "to_go", True, False),
    Combination("reward", "k1", "none", "old", "sequence", True, False),
    Combination("reward", "k1", "none", "current", "token", False, False),
    Combination("reward", "k1", "none", "current", "to_go", True, False),
    Combination("reward", "k1", "none", "current", "sequence", True, False),
    Combination("reward", "k1", "token", "current", "token", False, False),
    Combination("reward", "k1", "token", "current", "to_go", True, False),
    Combination("reward", "k1", "token", "current", "sequence", True, False),
    Combination("reward", "k1", "per_decision", "current", "token", False, False),
    Combination("reward", "k1", "per_decision", "current", "to_go", True, True),
    Combination("reward", "k1", "per_decision", "current", "sequence", True, True),
    Combination("reward", "k1", "per_decision", "current", "to_go", True, False, truncation=2.0),
    Combination("full_vocab", None, "none", None, "token", False, False),
    Combination("full_vocab", None, "none", None, "to_go", True, False),
    Combination("full_vocab", None, "per_decision", None, "token", False, False),
    Combination("full_vocab", None, "per_decision", None, "to_go", True, True),
    Combination("full_vocab", None, "per_decision", None, "to_go", False, False, top_k=2),
)


class SequenceWorld:
    """All sequences of `LENGTH` tokens over a vocabulary of `VOCAB`, with a policy and a reference."""

    def __init__(self, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        prefixes = [p for n in range(LENGTH) for p in itertools.product(range(VOCAB), repeat=n)]
        row = {prefix: i for i, prefix in enumerate(prefixes)}
        self.sequences = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
        self.states = torch.tensor([[row[tuple(s[:t])] for t in range(LENGTH)] for s in self.sequences.tolist()])
        self.mask = torch.ones(len(self.sequences), LENGTH)
        shape = (len(prefixes), VOCAB)
        self.policy = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.reference = self.policy + 0.7 * torch.randn(shape, generator=generator, dtype=torch.float64)
        self.drift = torch.randn(shape, generator=generator, dtype=torch.float64)

    def sampling_policy(self, lag: float) -> torch.Tensor:
        """The policy that sampled, `lag` away from the current one in the logits; 0 is on-policy."""
        return self.policy - lag * self.drift

    def logits(self, table: torch.Tensor) -> torch.Tensor:
        """(P, V) table, or (125, P, V) with one for each sequence -> (125, T, V) logits at every visited state."""
        return table[self.states] if table.ndim == 2 else table[torch.arange(len(table)).unsqueeze(1), self.states]

    def logps(self, table: torch.Tensor) -> torch.Tensor:
        """(P, V) or (125, P, V) logits -> (125, T) log-probabilities of every sequence's tokens."""
        return self.logits(table).log_softmax(-1).gather(-1, self.sequences.unsqueeze(-1)).squeeze(-1)

    def exact_kl(self, table: torch.Tensor) -> torch.Tensor:
        """KL of the whole sequence distributions, from their 125 probabilities."""
        logp, logq = self.logps(table).sum(-1), self.logps(self.reference).sum(-1)
        return (logp.exp() * (logp - logq)).sum()

    def exact_gradient(self) -> torch.Tensor:
        table = self.policy.clone().requires_grad_()
        return torch.autograd.grad(self.exact_kl(table), table)[0].flatten()

    def losses(self, table: torch.Tensor, lag: float, combination: Combination) -> torch.Tensor:
        """(125,) loss of every sequence, summed over its tokens; beta = 1."""
        logps, ref = self.logps(table), self.logps(self.reference)
        old = self.logps(self.sampling_policy(lag))
        return combination_loss(
            combination, logps, ref, old, self.mask, self.logits(table), self.logits(self.reference)
        ).sum(-1)

    def moments(self, lag: float, combination: Combination) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean (D,) and total variance (scalar) of the one-sequence gradient under the sampling policy."""
        # A table for each sequence: the gradient of the sum then holds each sequence's gradient.
        tables = self.policy.repeat(len(self.sequences), 1, 1).requires_grad_()
        grads = torch.autograd.grad(self.losses(tables, lag, combination).sum(), tables)[0].flatten(1)
        probs = self.logps(self.sampling_policy(lag)).sum(-1).exp().unsqueeze(-1)
        mean = (probs * grads).sum(0)
        return mean, (probs * (grads - mean) ** 2).sum()


def combination_loss(
    c: Combination,
    logps: torch.Tensor,
    ref: torch.Tensor,
    old: torch.Tensor,
    mask: torch.Tensor,
    logits: torch.Tensor | None = None,
    ref_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """(B, T) per-token KL losses of a combination, beta = 1; `logits`, `ref_logits` (B, T, V) for full_vocab only."""
    if c.placement == "loss":
        return kl_loss(logps, ref, old, mask, estimator=c.estimator, importance=c.importance, horizon=c.horizon)
    if c.placement == "reward":
        coefficients = kl_score_coefficients(
            logps,
            ref,
            old,
            mask,
            coefficient=c.coefficient,
            importance=c.importance,
            horizon=c.horizon,
            truncation=c.truncation,
        )
        # The old coefficient sits in the advantage, where the surrogate's own ratio multiplies it (unclipped here).
        score = importance_weights(logps - old) if c.coefficient == "old" else logps
        return coefficients * score
    if c.importance == "per_decision":
        prefix = per_decision_weights(logps, old, mask, c.truncation, inclusive=False)
    else:
        prefix = torch.ones_like(logps)
    kl = top_k_kl(logits, ref_logits, c.top_k) if c.top_k else full_vocab_kl(logits, ref_logits)
    loss = prefix * kl
    if c.horizon == "to_go":
        loss = loss + full_vocab_score_coefficients(kl, prefix, mask) * logps
    return loss


def token_table(seed: int = 0, lag: float = 0.5) -> list[dict]:
    """
    One categorical token: for each estimator and importance weight, the expected gradient against the exact ones.

    Returns:
        Rows with `estimator`, `importance`, `policy` ("on" or "off"), `norm` (of the expected gradient over the norm
        of the exact one), `error` (relative, against the gradient of the reverse KL) and `forward_error` (against the
        forward KL).
    """
    generator = torch.Generator().manual_seed(seed)
    policy, noise, drift = torch.randn(3, VOCAB, generator=generator, dtype=torch.float64)
    ref = (policy + noise).log_softmax(-1)
    logits = policy.clone().requires_grad_()
    lp = logits.log_softmax(-1)
    (reverse,) = torch.autograd.grad((lp.exp() * (lp - ref)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - lp)).sum(), logits)
    rows = []
    for estimator, (policy_name, importance) in itertools.product(
        ESTIMATORS, [("on", "none"), ("off", "none"), ("off", "differentiable"), ("off", "stopped")]
    ):
        old = (policy - (lag if policy_name == "off" else 0) * drift).log_softmax(-1)
        lp = logits.log_softmax(-1)
        loss = kl_loss(
            lp.unsqueeze(-1),
            ref.unsqueeze(-1),
            old.unsqueeze(-1),
            torch.ones(VOCAB, 1),
            estimator=estimator,
            importance=importance,
        ).squeeze(-1)
        (mean,) = torch.autograd.grad((old.exp() * loss).sum(), logits)
        rows.append(
            {
                "estimator": estimator,
                "policy": policy_name,
                "importance": importance,
                "norm": float(mean.norm() / reverse.norm()),
                "error": float((mean - reverse).norm() / reverse.norm()),
                "forward_error": float((mean - forward).norm() / forward.norm()),
            }
        )
    return rows


def sequence_table(lags: tuple[float, ...] = (0.0, 0.5), seed: int = 0) -> Iterator[dict]:
    """
    Sequences of 3 tokens: relative bias and variance of every combination's gradient at each policy lag.

    Yields:
        `combination`, `lag`, `bias` = |E g - exact| / |exact| and `variance` = tr Cov(g) / |exact|², of one
        sequence's g.
    """
    world = SequenceWorld(seed)
    exact = world.exact_gradient()
    for combination in COMBINATIONS:
        for lag in lags:
            mean, variance = world.moments(lag, combination)
            yield {
                "combination": combination,
                "lag": lag,
                "bias": float((mean - exact).norm() / exact.norm()),
                "variance": float(variance / exact.norm() ** 2),
            }


def verdict(norm: float, error: float, forward_error: float) -> str:
    """`0`, `exact`, `forward KL` or `wrong` with the relative error."""
    if norm < 1e-9:
        return "0"
    if error < 1e-9:
        return "exact"
    if forward_error < 1e-9:
        return "forward KL"
    return f"wrong ({100 * error:.0f} %)"


def plot(path: str, seed: int = 0) -> None:
    """Draws bias and variance of every combination against the policy lag into an image file."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'trl-grpo-plus[plots]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lags = tuple(i / 10 for i in range(11))
    rows = list(sequence_table(lags, seed))
    placements = ("loss", "reward", "full_vocab")
    fig, axes = plt.subplots(2, len(placements), figsize=(15, 9), sharex=True, sharey="row")
    styles = ["-", "--", ":", "-."]
    for column, placement in enumerate(placements):
        for i, combination in enumerate(c for c in COMBINATIONS if c.placement == placement):
            mine = [row for row in rows if row["combination"] is combination]
            label = " / ".join(str(combination).split(" / ")[1:])
            style = {"color": f"C{i % 10}", "linestyle": styles[i % 4], "label": label}
            axes[0, column].plot(lags, [max(r["bias"], 1e-16) for r in mine], **style)
            axes[1, column].plot(lags, [r["variance"] for r in mine], **style)
        axes[0, column].set_title(f'kl_placement="{placement}"')
        axes[0, column].set_yscale("symlog", linthresh=1e-3)
        axes[1, column].set_yscale("log")
        axes[1, column].set_xlabel("policy lag (distance in the logits)")
        axes[1, column].legend(fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("relative bias  |E g - exact| / |exact|")
    axes[1, 0].set_ylabel("variance of one sequence  tr Cov(g) / |exact|²")
    fig.tight_layout()
    fig.savefig(path, dpi=90)
    plt.close(fig)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trl_grpo_plus.algorithms.kl_table", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the tables of logits")
    parser.add_argument("--lag", type=float, default=0.5, help="distance of the sampling policy in the logits")
    parser.add_argument("--plot", metavar="FILE", help="also draw bias and variance against the policy lag")
    args = parser.parse_args(argv)

    print("Gradient of the KL of one categorical token (exact = gradient of the reverse KL)\n")
    columns = [("on", "none"), ("off", "none"), ("off", "differentiable"), ("off", "stopped")]
    titles = ["on-policy", "off-policy, no w", "off-policy, differentiable w", "off-policy, sg(w)"]
    print("| |" + "".join(f" {title} |" for title in titles) + "\n|---|" + "---|" * len(titles))
    rows = {(r["estimator"], r["policy"], r["importance"]): r for r in token_table(args.seed, args.lag)}
    for estimator in ESTIMATORS:
        cells = [rows[estimator, *column] for column in columns]
        print(f"| {estimator} |" + "".join(f" {verdict(c['norm'], c['error'], c['forward_error'])} |" for c in cells))

    print(f"\nGradient of the KL of sequences of {LENGTH} tokens over {VOCAB}, relative to the exact one\n")
    print(f"| combination | bias, on-policy | variance | bias, lag {args.lag:g} | variance |\n|---|---|---|---|---|")
    results = list(sequence_table((0.0, args.lag), args.seed))
    for pair in zip(results[::2], results[1::2], strict=True):
        cells = [f"{'exact' if r['bias'] < 1e-9 else format(r['bias'], '.3f')} | {r['variance']:.1f}" for r in pair]
        print(f"| {pair[0]['combination']} | {cells[0]} | {cells[1]} |")

    if args.plot:
        plot(args.plot, args.seed)
        print(f"\nwrote {args.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
