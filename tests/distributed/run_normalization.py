"""Trains an optimizer window for each normaliser and surrogate, and saves the gradients that the ranks share."""

import sys

import torch
from normalization_case import MODES, choose, make_trainer, windows

KL = {"beta": 0.3, "kl_placement": "loss", "kl_estimator": "k3", "kl_importance": "differentiable"}
PAIRS = [*((mode, "clipped") for mode in MODES), ("group_token", "cispo"), ("group_token", "gspo")]


def main(policy: str, output_dir: str, cuts: list[list[int]]):
    result = {}
    for cut in cuts:
        trainer = make_trainer(policy, f"{output_dir}/out", *cut, **KL)
        with torch.no_grad():
            for parameter in trainer.ref_model.parameters():
                parameter.mul_(1.1)
        for mode, surrogate in PAIRS:
            choose(trainer, mode, surrogate)
            recorded = windows(trainer)
            result[tuple(cut), mode, surrogate] = recorded.gradients[0]
            result[tuple(cut), "rows"] = recorded.rows[0]
    torch.save(result, f"{output_dir}/rank{trainer.accelerator.process_index}.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [[int(n) for n in cut.split(",")] for cut in sys.argv[3:]])
