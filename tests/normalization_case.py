"""Completions of very different lengths, to be cut into micro-batches and ranks in every way; with the gradient."""

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer

GROUP_SIZE = 4
# Problem i has the lengths of row i % 4.
PROMPTS = [f"{i}+{i}=" for i in range(16)]
LENGTHS = [[1, 24, 3, 9], [2, 2, 5, 30], [17, 1, 1, 4], [40, 6, 2, 12]]
MAX_LENGTH = 48
MODES = ("sequence", "token", "group_token", "constant")
# TRL's loss_type, importance_sampling_level, and what is to be minimised for one token, on-policy.
SURROGATES = {
    "clipped": ("grpo", "token"),
    "bnpo": ("bnpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "dapo": ("dapo", "token"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "token"),
    "vespo": ("vespo", "token"),
    "luspo": ("luspo", "sequence"),
    "gspo": ("grpo", "sequence"),
}
EPSILON_HIGH = 0.25


def completion(problem: int, index: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 * problem + index)
    ids = torch.randint(3, 40, (LENGTHS[problem % 4][index],), generator=generator).tolist()
    return [*ids[:-1], 1]


def env_mask(problem: int, index: int) -> list[int]:
    """Every seventh token is not trained on, as the output of a tool would be."""
    return [int((t + index) % 7 != 0 or t == 0) for t in range(LENGTHS[problem % 4][index])]


def rollout(prompts, trainer):
    seen, rank = {}, trainer.accelerator.process_index
    out = {"prompt_ids": [], "completion_ids": [], "logprobs": None, "env_mask": []}
    for prompt in prompts:
        occurrence = seen[prompt] = seen.get(prompt, -1) + 1
        # A group that lies on two ranks has its first half on the first.
        index = (rank * prompts.count(prompt) + occurrence) % GROUP_SIZE
        problem = PROMPTS.index(prompt)
        out["prompt_ids"].append(trainer.processing_class(prompt)["input_ids"])
        out["completion_ids"].append(completion(problem, index))
        out["env_mask"].append(env_mask(problem, index))
    return out


def rows(*problems):
    """Rows of a generation batch: a group of completions for each problem."""
    return [{"prompt": PROMPTS[problem]} for problem in problems for _ in range(GROUP_SIZE)]


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 11) for ids in completion_ids]


class Windows(TrainerCallback):
    """The gradient and the rows of every optimizer window."""

    def __init__(self, trainer):
        self.trainer, self.gradients, self.rows, self.current = trainer, [], [], []
        compute = trainer._compute_loss

        def recording(model, inputs):
            for i in range(len(inputs["completion_ids"])):
                self.current.append({key: inputs[key][i] for key in _KEPT if key in inputs})
            return compute(model, inputs)

        trainer._compute_loss = recording

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        self.gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
        self.rows.append(self.current)
        self.current = []


_KEPT = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "advantages",
    "ref_per_token_logps",
)


def make_trainer(policy, output_dir, micro_batch, accumulation, per_generation, max_steps=1, **overrides):
    extra = {name: overrides.pop(name) for name in ("process_reward_funcs",) if name in overrides}
    values = {
        "output_dir": str(output_dir),
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "max_steps": max_steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": per_generation,
        "num_generations": GROUP_SIZE,
        "max_completion_length": MAX_LENGTH,
        "shuffle_dataset": False,
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "epsilon_high": EPSILON_HIGH,
        "loss_normalization": "token",
    }
    return GRPOPlusTrainer(
        policy,
        reward_funcs=reward,
        args=GRPOPlusConfig(**{**values, **overrides}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(policy),
        rollout_func=rollout,
        **extra,
    )


def choose(trainer, mode, surrogate):
    """Another normaliser and surrogate for a trainer that exists, as if it had been made with them."""
    trainer._window.mode = mode
    trainer.loss_type, trainer.importance_sampling_level = SURROGATES[surrogate]


def windows(trainer) -> Windows:
    recorder = Windows(trainer)
    trainer.add_callback(recorder)
    trainer.train()
    trainer.remove_callback(recorder)
    del trainer._compute_loss
    return recorder


def expected_gradient(model, rows, mode, surrogate, beta=0.0):
    """The gradient of a window's loss on-policy, from the definitions, one sequence at a time."""
    masks = [(r["completion_mask"] * r["tool_mask"]).bool() for r in rows]
    counts = [int(mask.sum()) for mask in masks]
    problems = [bytes(r["prompt_ids"][r["prompt_mask"].bool()].tolist()) for r in rows]
    total = 0.0
    for row, mask, count, problem in zip(rows, masks, counts, problems, strict=True):
        prompt = row["prompt_ids"][row["prompt_mask"].bool()]
        length = int(row["completion_mask"].sum())
        ids = torch.cat([prompt, row["completion_ids"][:length]]).unsqueeze(0)
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        lp = logits.log_softmax(-1).gather(-1, row["completion_ids"][:length, None]).squeeze(-1)[mask[:length]]
        if mode == "sequence":
            weight = 1 / (len(rows) * count)
        elif mode == "token":
            weight = 1 / sum(counts)
        elif mode == "group_token":
            in_group = sum(c for c, p in zip(counts, problems, strict=True) if p == problem)
            weight = 1 / (len(set(problems)) * in_group)
        else:
            weight = 1 / (len(rows) * MAX_LENGTH)
        advantage, ratio = row["advantages"], (lp - lp.detach()).exp()
        if surrogate in ("gspo", "luspo"):
            loss = -advantage * (lp - lp.detach()).mean().exp().expand(count)
        elif surrogate == "cispo":
            loss = -min(1.0, EPSILON_HIGH) * advantage * lp
        elif surrogate == "vespo":
            loss = -advantage * lp
        else:
            # sapo's sigmoid has slope 1 at ratio 1, and no clip is active there
            loss = -advantage * ratio
        if beta:
            k = lp - row["ref_per_token_logps"][:length][mask[:length]]
            loss = loss + beta * ratio * ((-k).exp() + k - 1)
        total = total + weight * loss.sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))])
