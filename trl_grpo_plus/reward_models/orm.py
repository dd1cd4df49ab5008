"""Outcome reward models: one score for a completion, trained on right/wrong labels one completion at a time.

For pairs (chosen, rejected) TRL's `RewardTrainer` is used as it is; `OutcomeRewardModel` scores what either makes.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from trl_grpo_plus.reward_models.formats import Prompt, tokenize
from trl_grpo_plus.reward_models.metrics import auc, calibration_error

logger = logging.getLogger(__name__)


def outcome_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completion: str | list[dict]) -> list[int]:
    """Token ids of prompt and completion as one text with an end token, or by the chat template, as in TRL's
    `RewardTrainer`: the score stands on the last token."""
    if isinstance(prompt, str):
        text = completion if isinstance(completion, str) else "".join(message["content"] for message in completion)
        end = tokenizer.eos_token or ""
        return list(tokenizer(prompt + text + ("" if text.endswith(end) else end))["input_ids"])
    reply = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    return tokenize(tokenizer, tokenizer.apply_chat_template([*prompt, *reply], tokenize=False))


class OutcomeRewardModel:
    """An outcome reward model with its tokenizer, called as a reward function of `GRPOTrainer` or alone.

    Args:
        model: A sequence-classification model with one output.
        tokenizer: The model's tokenizer.
        batch_size: Completions in one forward pass.
        max_length: Longest sequence in tokens, prompt included. None: `max_position_embeddings` of the model's config.
        too_long: What a longer completion gets. `"error"`: a `ValueError` that names it. `"skip"`: None (no reward),
            with a warning.
        output: `"logit"`: the model's number as it is. `"probability"`: its sigmoid, in [0, 1].
        name: Name in logs. None: last part of the model's path.

    Raises:
        ValueError: an unknown option, or a model with more than one output.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        too_long: Literal["error", "skip"] = "error",
        output: Literal["logit", "probability"] = "probability",
        name: str | None = None,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        if too_long not in ("error", "skip"):
            raise ValueError(f'too_long must be "error" or "skip", got {too_long!r}.')
        if output not in ("logit", "probability"):
            raise ValueError(f'output must be "logit" or "probability", got {output!r}.')
        _check_outputs(model)
        _align_padding(model, tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self.batch_size, self.too_long, self.output = batch_size, too_long, output
        self.max_length = max_length or getattr(model.config, "max_position_embeddings", None)
        path = name or getattr(model.config, "_name_or_path", "") or "outcome_reward_model"
        self.__name__ = path.rstrip("/").split("/")[-1]

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Loads a model that `ORMTrainer` or TRL's `RewardTrainer` made. A PEFT adapter is merged into its base.

        Args:
            path: Directory or hub id.
            dtype, trust_remote_code, revision: As in transformers.
            device: Where to put the model. None: where it was loaded.
            model_kwargs: Further arguments of the model's `from_pretrained`.
            kwargs: Arguments of `OutcomeRewardModel`.
        """
        path = str(path)
        hub = {"revision": revision, "trust_remote_code": trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(path, **hub)
        load = {"dtype": dtype, "num_labels": 1, **hub, **(model_kwargs or {})}
        if (Path(path) / "adapter_config.json").exists():
            from peft import AutoPeftModelForSequenceClassification

            model = AutoPeftModelForSequenceClassification.from_pretrained(path, **load).merge_and_unload()
        else:
            model = AutoModelForSequenceClassification.from_pretrained(path, **load)
        kwargs.setdefault("name", path)
        scorer = cls(model.eval(), tokenizer, **kwargs)
        return scorer if device is None else scorer.to(device)

    def save_pretrained(self, path: str | Path) -> None:
        """Writes model and tokenizer."""
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def to(self, device: str | torch.device) -> Self:
        """Moves the model; returns itself."""
        self.model.to(device)
        return self

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Called as a reward function: one number for each completion. Data set columns are not looked at."""
        return self.score(prompts, completions)

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt], completions: Sequence[str | list[dict]]) -> list[float | None]:
        """Scores B completions.

        Args:
            prompts: B texts or lists of chat messages.
            completions: B texts or lists of assistant messages.

        Returns:
            B numbers, or None for a completion that is too long, with `too_long="skip"`.

        Raises:
            ValueError: not as many prompts as completions, or a completion that is too long.
        """
        if len(prompts) != len(completions):
            raise ValueError(f"Prompts and completions must be as many: got {len(prompts)} and {len(completions)}.")
        encoded = [outcome_ids(self.tokenizer, *pair) for pair in zip(prompts, completions, strict=True)]
        scores: list[float | None] = [None] * len(encoded)
        kept = []
        for i, ids in enumerate(encoded):
            if self.max_length is None or len(ids) <= self.max_length:
                kept.append(i)
            elif self.too_long == "error":
                raise ValueError(
                    f"Completion {i} with its prompt has {len(ids)} tokens, more than max_length={self.max_length}. "
                    "Shorten it, raise max_length, or set too_long='skip' to give it no reward."
                )
        if len(kept) < len(encoded):
            logger.warning(
                f"{self.__name__}: {len(encoded) - len(kept)} of {len(encoded)} completions are longer than "
                f"max_length={self.max_length} and get no reward."
            )
        kept.sort(key=lambda i: len(encoded[i]))
        was_training = self.model.training
        self.model.eval()
        try:
            for start in range(0, len(kept), self.batch_size):
                batch = kept[start : start + self.batch_size]
                inputs = OutcomeCollator(self.model.config.pad_token_id)([{"input_ids": encoded[i]} for i in batch])
                logits = self.model(**{k: v.to(self.device) for k, v in inputs.items()}).logits[:, 0].float()
                values = logits.sigmoid() if self.output == "probability" else logits
                for i, value in zip(batch, values.tolist(), strict=True):
                    scores[i] = value
        finally:
            self.model.train(was_training)
        return scores


@dataclass
class ORMConfig(TrainingArguments):
    """Arguments of [`ORMTrainer`]: those of transformers' `TrainingArguments`, and

    Args:
        max_length: Longest sequence in tokens, prompt and completion; longer rows are left out, and the trainer tells
            how many (cut off, a completion would lose the answer that it is judged by). None: no limit.
        disable_dropout: Sets all dropout to 0.
        dataset_num_proc: Processes for tokenising.
        model_init_kwargs: Arguments of `from_pretrained` when the model is a path. `dtype` is float32 if not given.
    """

    _VALID_DICT_FIELDS: ClassVar = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    learning_rate: float = field(default=1e-5, metadata={"help": "The initial learning rate for AdamW."})
    logging_steps: float = field(default=10, metadata={"help": "Log every X update steps; below 1, a share of all."})
    max_length: int | None = field(
        default=1024, metadata={"help": "Longest sequence in tokens; longer rows are left out."}
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Sets all dropout to 0."})
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes for tokenising."})
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of from_pretrained when the model is a path."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1 or None, got {self.max_length}.")


class ORMTrainer(Trainer):
    """Trains an outcome reward model point by point: binary cross-entropy on whether a completion is right.

    Unlike TRL's `RewardTrainer` it needs no pairs: every completion with a verdict is a row, so prompts that a policy
    always solves, or never, count too.

    Args:
        model: A sequence-classification model with one output, or a path.
        args: The configuration.
        data_collator: None: pads ids with the padding token.
        train_dataset, eval_dataset: Columns `prompt` and `completion` (texts, or chat messages) and `label` (boolean,
            or a number in [0, 1]).
        processing_class: The tokenizer. None: the model's, if the model is a path.
        compute_metrics: None: `accuracy`, `auc`, `brier` and `ece`.
        model_init, callbacks, optimizers, preprocess_logits_for_metrics: As in transformers.
        peft_config: Trains adapters; the head is trained and saved whole.

    Raises:
        ValueError: no data set, no tokenizer, a missing column, a label out of range, more than one output.
    """

    _tag_names = ("trl-grpo-plus", "orm")
    _name = "ORM"
    _paper: ClassVar = {"title": "Training verifiers to solve math word problems", "id": "2110.14168"}

    def __init__(
        self,
        model: str | PreTrainedModel | None = None,
        args: ORMConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        model_init: Callable[[], PreTrainedModel] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple = (None, None),
        preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        peft_config: Any | None = None,
    ):
        if args is None:
            name = model if isinstance(model, str) else "orm"
            args = ORMConfig(f"{name.rstrip('/').split('/')[-1]}-ORM")
        if train_dataset is None and eval_dataset is None:
            raise ValueError("ORMTrainer needs a train_dataset (or, to evaluate only, an eval_dataset).")
        if isinstance(model, str):
            processing_class = processing_class or AutoTokenizer.from_pretrained(model)
            load = {"dtype": torch.float32, "num_labels": 1, **(args.model_init_kwargs or {})}
            model = AutoModelForSequenceClassification.from_pretrained(model, **load)
        if processing_class is None:
            raise ValueError(
                "ORMTrainer needs the tokenizer: pass processing_class=AutoTokenizer.from_pretrained(...)."
            )
        if model is not None:
            _check_outputs(model)
            _align_padding(model, processing_class)
            if peft_config is not None:
                from peft import get_peft_model

                peft_config = copy.deepcopy(peft_config)
                if peft_config.task_type is None:
                    heads = [head for head in ("score", "classifier") if hasattr(model, head)]
                    peft_config.modules_to_save = sorted({*(peft_config.modules_to_save or []), *heads})
                model = get_peft_model(model, peft_config)
            if args.disable_dropout:
                for module in model.modules():
                    if isinstance(module, nn.Dropout):
                        module.p = 0.0
        if train_dataset is not None:
            train_dataset = _tokenize(train_dataset, processing_class, args, "train_dataset")
        if isinstance(eval_dataset, dict):
            eval_dataset = {
                name: _tokenize(dataset, processing_class, args, f"eval_dataset[{name!r}]")
                for name, dataset in eval_dataset.items()
            }
        elif eval_dataset is not None:
            eval_dataset = _tokenize(eval_dataset, processing_class, args, "eval_dataset")
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or OutcomeCollator(processing_class.pad_token_id),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_metrics=compute_metrics or outcome_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        # The loss is divided by the number of completions of the whole optimizer step.
        self.model_accepts_loss_kwargs = True
        self.label_names = ["labels"]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Binary cross-entropy of the model's output with the labels, mean over completions."""
        labels = inputs["labels"]
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0].float()
        loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        if num_items_in_batch is None:
            loss = loss / len(labels)
        else:
            loss = loss / torch.as_tensor(num_items_in_batch, device=loss.device).flatten()[0]
            if self.args.average_tokens_across_devices:
                loss = loss * self.accelerator.num_processes
        return (loss, {"logits": logits}) if return_outputs else loss

    def as_reward_model(self, **kwargs: Any) -> OutcomeRewardModel:
        """The model in training as a reward function; the weights are shared, so it scores with the current ones."""
        return OutcomeRewardModel(self.accelerator.unwrap_model(self.model), self.processing_class, **kwargs)


class OutcomeCollator:
    """Pads ids at the right with the padding token; labels are real numbers, (B,)."""

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": torch.full((len(rows), length), self.pad_token_id, dtype=torch.long),
            "attention_mask": torch.zeros(len(rows), length, dtype=torch.long),
        }
        for i, row in enumerate(rows):
            n = len(row["input_ids"])
            batch["input_ids"][i, :n] = torch.as_tensor(row["input_ids"])
            batch["attention_mask"][i, :n] = 1
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([float(row["labels"]) for row in rows])
        return batch


def outcome_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """`accuracy`, `auc`, `brier` and `ece` of logits (N,) and labels (N,)."""
    logits, labels = np.asarray(prediction.predictions, dtype=np.float64).reshape(-1), prediction.label_ids
    probabilities = 1 / (1 + np.exp(-logits.clip(-500, 500)))
    return {
        "accuracy": float(np.mean((logits >= 0) == (labels >= 0.5))),
        "auc": auc(logits, labels >= 0.5),
        "brier": float(np.mean((probabilities - labels) ** 2)),
        "ece": calibration_error(probabilities, labels),
    }


def _tokenize(dataset: Any, tokenizer: PreTrainedTokenizerBase, args: ORMConfig, name: str) -> Any:
    columns = dataset.column_names or list(next(iter(dataset)))
    if "input_ids" in columns:
        return dataset
    for column in ("prompt", "completion", "label"):
        if column not in columns:
            raise ValueError(
                f"{name} has no column {column!r} but {columns}. ORMTrainer reads `prompt`, `completion` and `label` "
                "(right or wrong); for pairs of completions use TRL's RewardTrainer."
            )

    def tokenize_row(row):
        label = float(row["label"])
        if not 0 <= label <= 1:
            raise ValueError(f"{name}: a label is a boolean or a number in [0, 1], got {row['label']!r}.")
        return {"input_ids": outcome_ids(tokenizer, row["prompt"], row["completion"]), "labels": label}

    if isinstance(dataset, IterableDataset):
        dataset = dataset.map(tokenize_row, remove_columns=columns)
        return dataset.filter(lambda row: args.max_length is None or len(row["input_ids"]) <= args.max_length)
    with args.main_process_first(desc=f"tokenise {name}"):
        dataset = dataset.map(
            tokenize_row, remove_columns=columns, num_proc=args.dataset_num_proc, desc=f"Tokenising {name}"
        )
        if args.max_length is None:
            return dataset
        kept = dataset.filter(lambda row: len(row["input_ids"]) <= args.max_length, desc=f"Filtering {name}")
    if len(kept) < len(dataset):
        logger.warning(
            f"{name}: {len(dataset) - len(kept)} of {len(dataset)} rows are longer than max_length={args.max_length} "
            "and left out."
        )
    return kept


def _check_outputs(model: nn.Module) -> None:
    outputs = getattr(model.config, "num_labels", 1)
    if outputs != 1:
        raise ValueError(
            f"An outcome reward model has one output; {type(model).__name__} has {outputs}. Load it with num_labels=1."
        )


def _align_padding(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Sequence classification finds the last token by the padding id, so model and tokenizer must agree on it."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
