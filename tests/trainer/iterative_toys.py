"""A policy, a task and reward models small enough that a whole iterative run takes seconds."""

import math
import zlib
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback

from trl_grpo_plus import IterativeGRPOConfig, IterativeGRPOTrainer
from trl_grpo_plus.demo import load_demo_tokenizer, make_problems
from trl_grpo_plus.iterative import UpdatableRewardModel

FEATURES = 64


def save_tiny_policy(directory: Path) -> str:
    """Writes an untrained two-layer Llama with the demo tokenizer (TRL loads the reference from the path)."""
    tokenizer = load_demo_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def words_of(completion) -> list[str]:
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return text.split()


def has_an_even_word(prompts, completions, **columns) -> list[float]:
    """A grader that an untrained policy passes about half of the time: is the number of words even?"""
    return [float(len(words_of(completion)) % 2 == 0) for completion in completions]


def label_by_length(prompts, completions, completion_ids, steps, **columns) -> list[list[float]]:
    """Step labels of a made-up rule: a step is right if its text has an even length."""
    return [[float(len(step) % 2 == 0) for step in texts] for texts in steps]


class BagOfWords(UpdatableRewardModel):
    """Logistic regression on hashed words, trained with Adam: an outcome reward model of 65 numbers."""

    granularity = "outcome"
    __name__ = "bag_of_words"

    def __init__(self):
        torch.manual_seed(1)
        self.model = torch.nn.Linear(FEATURES, 1)

    def features(self, texts) -> torch.Tensor:
        rows = torch.zeros(len(texts), FEATURES)
        for row, text in zip(rows, texts, strict=True):
            for word in words_of(text):
                row[zlib.crc32(word.encode()) % FEATURES] += 1
        return rows

    def __call__(self, prompts, completions, **columns):
        with torch.no_grad():
            return torch.sigmoid(self.model(self.features(completions)))[:, 0].tolist()

    def fit(self, train, settings, optimizer_state):
        optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.args.reward_model_learning_rate)
        if optimizer_state is not None:
            optimizer.load_state_dict(optimizer_state)
        inputs, targets = self.features(train["completion"]), torch.tensor(train["correct"][:], dtype=torch.float32)
        losses = []
        size = settings.args.reward_model_batch_size
        for _ in range(math.ceil(settings.args.reward_model_epochs)):
            for rows in torch.randperm(len(inputs)).split(size):
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    self.model(inputs[rows])[:, 0], targets[rows]
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return sum(losses) / len(losses), optimizer.state_dict()

    def state_dict(self):
        return self.model.state_dict()

    def load_state_dict(self, state):
        self.model.load_state_dict(state)

    def save_pretrained(self, directory):
        Path(directory).mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), Path(directory) / "model.pt")


class StepBag(BagOfWords):
    """The same on single steps: a process reward model."""

    granularity = "process"
    __name__ = "step_bag"

    def __call__(self, prompts, completions, steps, **columns):
        return [super(StepBag, self).__call__(None, texts) if texts else [] for texts in steps]

    def fit(self, train, settings, optimizer_state):
        pairs = [
            (step, label)
            for steps, labels in zip(train["steps"], train["step_labels"], strict=True)
            for step, label in zip(steps, labels, strict=True)
            if label is not None
        ]
        flat = Dataset.from_dict({"completion": [step for step, _ in pairs], "correct": [label for _, label in pairs]})
        return super().fit(flat, settings, optimizer_state)


def toy_config(output_dir, **overrides) -> IterativeGRPOConfig:
    values = {
        "outer_iterations": 2,
        "steps_per_iteration": 4,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "beta": 0.1,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "num_iterations": 2,
        "max_completion_length": 12,
        "reward_model_learning_rate": 0.05,
        "reward_model_batch_size": 8,
        "heldout_fraction": 0.25,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    return IterativeGRPOConfig(output_dir=str(output_dir), **{**values, **overrides})


def toy_trainer(policy, output_dir, reward_model=None, config=None, **kwargs) -> IterativeGRPOTrainer:
    values = {
        "grader": has_an_even_word,
        "train_dataset": make_problems(6, seed=0),
        "step_labeler": label_by_length,
    }
    trainer = IterativeGRPOTrainer(
        policy,
        reward_model or BagOfWords(),
        toy_config(output_dir, **(config or {})),
        **{**values, **kwargs},
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
