"""One optimizer window with the KL in each placement, with process rewards and an adaptive coefficient."""

import sys

import torch
from normalization_case import make_trainer, windows

PLACEMENTS = {
    "loss": {"kl_placement": "loss", "kl_estimator": "k2", "kl_importance": "stopped"},
    "reward-old": {"kl_placement": "reward", "kl_coefficient": "old"},
    "reward-current": {"kl_placement": "reward", "kl_importance": "per_decision"},
    "full_vocab": {"kl_placement": "full_vocab", "kl_importance": "per_decision"},
}


def digit_steps(steps, **kwargs):
    return [[float(sum(char.isdigit() for char in step)) for step in completion] for completion in steps]


def run(policy: str, output_dir: str, cut: tuple[int, int, int]) -> dict:
    """For each placement: the window's gradient, the logged KL, and where the controller has moved the coefficient."""
    result = {}
    for name, options in PLACEMENTS.items():
        trainer = make_trainer(
            policy,
            f"{output_dir}/{name}",
            *cut,
            beta=0.3,
            epsilon=100.0,
            kl_target=1e-3,
            kl_target_horizon=100,
            step_delimiter="[aeiou]",
            process_reward_funcs=digit_steps,
            **options,
        )
        with torch.no_grad():
            for parameter in trainer.ref_model.parameters():
                parameter.mul_(2.0)
        recorded = windows(trainer)
        log = next(log for log in trainer.state.log_history if "kl" in log)
        result[name] = {
            "gradient": recorded.gradients[0],
            "kl": log["kl"],
            "to_go": log["kl/reward_to_go_mean"],
            "coefficient": trainer._loss_terms.coefficient,
        }
    return result


if __name__ == "__main__":
    policy, output_dir = sys.argv[1:]
    result = run(policy, output_dir, (2, 4, 4))
    torch.save(result, f"{output_dir}/rank{torch.distributed.get_rank()}.pt")
