"""Which KL a `GRPOPlusConfig` asks for: defaults filled in, and every combination that cannot work refused."""

import warnings
from dataclasses import dataclass

from trl_grpo_plus.algorithms.kl import ESTIMATORS

KL_PLACEMENTS = ("loss", "reward", "full_vocab")
KL_IMPORTANCE = ("none", "differentiable", "stopped", "token", "per_decision")
KL_COEFFICIENTS = ("current", "old")
KL_HORIZONS = ("token", "to_go", "sequence")

# What each placement can combine with; the first entry is the default.
_LEGAL = {
    "loss": {
        "kl_estimator": ("k3", "k2", "k1"),
        "kl_importance": ("none", "differentiable", "stopped"),
        "kl_coefficient": ("current",),
        "kl_horizon": ("token", "sequence"),
    },
    "reward": {
        "kl_estimator": ("k1",),
        "kl_importance": ("none", "token", "per_decision"),
        "kl_coefficient": ("current", "old"),
        "kl_horizon": ("to_go", "sequence", "token"),
    },
    "full_vocab": {
        "kl_estimator": (None,),
        "kl_importance": ("none", "per_decision"),
        "kl_coefficient": ("current",),
        "kl_horizon": ("to_go", "token"),
    },
}
_WHY = {
    ("loss", "kl_coefficient", "old"): "a loss-side estimator at the old policy is a constant and has no gradient",
    ("loss", "kl_horizon", "to_go"): (
        "the estimators of a loss have no reward-to-go; kl_placement='reward' charges each token with the KL after it"
    ),
    ("loss", "kl_importance", "token"): "in the loss it is 'differentiable' or 'stopped'",
    ("loss", "kl_importance", "per_decision"): (
        "products along the prefix belong to kl_placement='reward' or 'full_vocab'; for whole sequences in the loss "
        "use kl_horizon='sequence'"
    ),
    ("reward", "kl_estimator", "k2"): "only the reward-to-go of k1 is the gradient of the KL",
    ("reward", "kl_estimator", "k3"): "only the reward-to-go of k1 is the gradient of the KL",
    ("reward", "kl_importance", "differentiable"): "a reward has no gradient; use 'token' or 'per_decision'",
    ("reward", "kl_importance", "stopped"): "a reward has no gradient anyway; use 'token' or 'per_decision'",
    ("full_vocab", "kl_estimator", "k1"): "the sum over the vocabulary is the KL itself, nothing is estimated",
    ("full_vocab", "kl_estimator", "k2"): "the sum over the vocabulary is the KL itself, nothing is estimated",
    ("full_vocab", "kl_estimator", "k3"): "the sum over the vocabulary is the KL itself, nothing is estimated",
    ("full_vocab", "kl_importance", "token"): "the state of a token depends on its whole prefix; use 'per_decision'",
    ("full_vocab", "kl_importance", "differentiable"): "nothing is sampled at the token itself; use 'per_decision'",
    ("full_vocab", "kl_importance", "stopped"): "nothing is sampled at the token itself; use 'per_decision'",
    ("full_vocab", "kl_coefficient", "old"): "the old policy's vocabulary is not kept",
    ("full_vocab", "kl_horizon", "sequence"): (
        "a token has no effect on the states before it, so it adds variance only; use 'to_go'"
    ),
}


@dataclass(frozen=True)
class KLPlan:
    """The KL term of a run, complete and legal. Field for field the `kl_*` of `GRPOPlusConfig`."""

    placement: str
    estimator: str | None
    importance: str
    coefficient: str
    horizon: str
    truncation: float | None
    top_k: int | None
    token_chunk: int
    vocab_chunk: int | None

    @property
    def in_advantages(self) -> bool:
        """Whether the charge goes into the advantages, under the surrogate's own ratio and clip."""
        return self.placement == "reward" and self.coefficient == "old"


def kl_plan(args) -> KLPlan | None:
    """
    The plan that the `kl_*` fields of a `GRPOPlusConfig` describe; None when `kl_placement` is None.

    Raises:
        ValueError: for an unknown value, an illegal combination, or one whose gradient is zero or wrong by design; the
            message names the fields and says what to use instead.
    """
    placement = args.kl_placement
    if placement is None:
        _refuse_leftovers(args)
        return None
    if placement not in KL_PLACEMENTS:
        raise ValueError(
            f"kl_placement must be one of {', '.join(map(repr, KL_PLACEMENTS))} or None; got {placement!r}."
        )
    known = {
        "kl_estimator": ESTIMATORS,
        "kl_importance": KL_IMPORTANCE,
        "kl_coefficient": KL_COEFFICIENTS,
        "kl_horizon": KL_HORIZONS,
    }
    chosen = {}
    for name, values in known.items():
        value, legal = getattr(args, name), _LEGAL[placement][name]
        if value is not None and value not in values:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}; got {value!r}.")
        if value is not None and value not in legal:
            raise ValueError(
                f"{name}={value!r} cannot go with kl_placement={placement!r}: {_WHY[placement, name, value]}."
            )
        chosen[name.removeprefix("kl_")] = legal[0] if value is None else value
    plan = KLPlan(
        placement,
        **chosen,
        truncation=args.kl_importance_truncation,
        top_k=args.kl_top_k,
        token_chunk=args.kl_token_chunk,
        vocab_chunk=args.kl_vocab_chunk,
    )
    _refuse_illegal(plan, args)
    return plan


def _refuse_leftovers(args) -> None:
    fields = ("kl_estimator", "kl_coefficient", "kl_horizon", "kl_importance_truncation", "kl_top_k", "kl_target")
    given = [name for name in fields if getattr(args, name) is not None]
    if args.kl_importance not in (None, "none"):
        given.append("kl_importance")
    if given:
        raise ValueError(
            f"{', '.join(given)} would have no effect, since kl_placement is None (TRL's own loss-side KL). Set "
            f"kl_placement to one of {', '.join(map(repr, KL_PLACEMENTS))}."
        )


def _refuse_illegal(plan: KLPlan, args) -> None:
    if plan.placement == "loss":
        _refuse_wrong_estimators(plan)
    if plan.truncation is not None:
        if plan.importance not in ("token", "per_decision"):
            raise ValueError(
                "kl_importance_truncation caps the weights of kl_importance='token' or 'per_decision'; with "
                f"kl_importance={plan.importance!r} it has no effect."
            )
        if not plan.truncation >= 1:
            raise ValueError(f"kl_importance_truncation must be at least 1, got {plan.truncation}.")
    if plan.top_k is not None:
        if plan.placement != "full_vocab":
            raise ValueError(f"kl_top_k belongs to kl_placement='full_vocab', not {plan.placement!r}.")
        if plan.top_k < 1:
            raise ValueError(f"kl_top_k must be at least 1, got {plan.top_k}.")
        if plan.vocab_chunk is not None:
            raise ValueError(
                "kl_vocab_chunk cannot go with kl_top_k, whose buckets need the whole vocabulary of a position."
            )
    if plan.token_chunk < 1 or (plan.vocab_chunk is not None and plan.vocab_chunk < 1):
        raise ValueError(
            f"kl_token_chunk and kl_vocab_chunk must be positive, got {plan.token_chunk} and {plan.vocab_chunk}."
        )
    if args.kl_target is not None and not args.kl_target > 0:
        raise ValueError(f"kl_target must be positive (nats per token), got {args.kl_target}.")
    if args.kl_target_horizon < 1:
        raise ValueError(f"kl_target_horizon must be at least 1 (sequences), got {args.kl_target_horizon}.")
    if plan.in_advantages:
        _refuse_old_coefficient(plan, args)
    buffer_outlives_step = args.steps_per_generation * args.num_iterations > args.gradient_accumulation_steps
    if plan.placement == "full_vocab" and plan.top_k is None and args.sync_ref_model and buffer_outlives_step:
        raise ValueError(
            "sync_ref_model can change the reference's head between generation and loss, while kl_placement="
            "'full_vocab' keeps the reference's hidden states from generation. Set steps_per_generation * "
            "num_iterations <= gradient_accumulation_steps, or kl_top_k, which keeps probabilities."
        )
    if args.beta == 0:
        raise ValueError(
            f"kl_placement={plan.placement!r} with beta=0 has no KL to place: beta is its coefficient. Set beta (0.04 "
            "in DeepSeekMath) or leave kl_placement at None."
        )


def _refuse_wrong_estimators(plan: KLPlan) -> None:
    chosen = f"kl_placement='loss' with kl_estimator={plan.estimator!r}, kl_importance={plan.importance!r}"
    if (plan.estimator, plan.importance) == ("k1", "none"):
        raise ValueError(
            f"{chosen}: its expected gradient is zero on-policy, since the score has mean zero, and wrong off-policy. "
            "Use kl_importance='differentiable', or kl_estimator='k2'."
        )
    if (plan.estimator, plan.importance) == ("k1", "stopped"):
        raise ValueError(
            f"{chosen}: its expected gradient is zero, on- and off-policy. Use kl_importance='differentiable', or "
            "kl_estimator='k2' with 'stopped'."
        )
    if (plan.estimator, plan.importance) == ("k2", "differentiable"):
        raise ValueError(f"{chosen}: its gradient is wrong off-policy. Use kl_importance='stopped' with k2.")


def _refuse_old_coefficient(plan: KLPlan, args) -> None:
    if plan.importance != "none":
        raise ValueError(
            f"kl_importance={plan.importance!r} cannot go with kl_coefficient='old': the charge is in the advantage, "
            "where the surrogate's ratio weighs it. Use kl_importance='none', or kl_coefficient='current'."
        )
    if args.importance_sampling_level == "sequence" and plan.horizon != "sequence":
        raise ValueError(
            f"kl_coefficient='old' with kl_horizon={plan.horizon!r} needs importance_sampling_level='token': a "
            "sequence-level ratio spreads each token's charge over the whole sequence. Use kl_horizon='sequence', or "
            "kl_coefficient='current', which stays outside the surrogate."
        )
    if args.top_entropy_quantile < 1.0:
        raise ValueError(
            "kl_coefficient='old' with top_entropy_quantile < 1 would drop the KL of the tokens outside the quantile "
            "with their advantage. Use kl_coefficient='current'."
        )


def warn_off_policy(plan: KLPlan, args) -> None:
    """Warns of a KL without importance weights in a run that reuses completions over several optimizer steps."""
    on_policy = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0
    weighted = plan.importance != "none"
    if on_policy or weighted:
        return
    better = {
        "loss": "kl_estimator='k2' with kl_importance='stopped', or 'k3' with 'differentiable'",
        "reward": "kl_coefficient='current' with kl_importance='per_decision'",
        "full_vocab": "kl_importance='per_decision'",
    }[plan.placement]
    warnings.warn(
        f"kl_importance='none' is biased off-policy, and this run is off-policy: steps_per_generation="
        f"{args.steps_per_generation} and num_iterations={args.num_iterations} reuse completions over several "
        f"optimizer steps of gradient_accumulation_steps={args.gradient_accumulation_steps}. {better} is right.",
        stacklevel=4,
    )
