"""Trains process reward models on stepwise data."""

import copy
import logging
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset, IterableDataset, features
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
)

from trl_grpo_plus.reward_models.formats import TokenClassificationFormat, TokenPairFormat, prompt_ids
from trl_grpo_plus.reward_models.metrics import step_metrics
from trl_grpo_plus.reward_models.prm import ProcessRewardModel, save_format
from trl_grpo_plus.reward_models.prm_config import PRMConfig

logger = logging.getLogger(__name__)

IGNORE = -100


class PRMTrainer(Trainer):
    """Trainer of process reward models, after the one that TRL had until 1.13.

    Where it departs from that: soft labels are trained as they are (TRL cut them to integers, so 0.9 became 0), the
    loss is the mean over all labelled steps of an optimizer step however it is cut into micro-batches, prompts may be
    chat messages, and the language model's own head can be trained in place of a new one. The token ids and labels of
    hard labels are TRL's.

    Args:
        model: A token-classification model with two classes, a causal language model, or a path.
        args: The configuration.
        data_collator: None: pads ids with the padding token and labels with -100, and keeps soft labels.
        train_dataset, eval_dataset: Columns `prompt` (text or chat messages), `completions` (list of steps) and
            `labels` (for each step a boolean, or a number in [0, 1], or None for a step without a label); or already
            tokenised `input_ids` and `labels`.
        processing_class: The tokenizer. None: the model's, if the model is a path.
        model_init, callbacks, optimizers, preprocess_logits_for_metrics: As in transformers.
        compute_metrics: None: `trl_grpo_plus.reward_models.metrics.step_metrics` (accuracy, AUC, Brier score,
            calibration, F1 of the first wrong step). A function of one's own gets logits (N, T, 2) and labels (N, T).
        peft_config: Trains adapters; a new head is trained and saved whole.

    Raises:
        ValueError: no data set, no tokenizer, a model whose head does not fit `args.head`, labels out of range.
    """

    _tag_names = ("trl-grpo-plus", "prm")
    _name = "PRM"
    _paper: ClassVar = {
        "title": "Solving math word problems with process- and outcome-based feedback",
        "id": "2211.14275",
    }

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module | None = None,
        args: PRMConfig | None = None,
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
            name = model if isinstance(model, str) else "prm"
            args = PRMConfig(f"{name.rstrip('/').split('/')[-1]}-PRM")
        if train_dataset is None and eval_dataset is None:
            raise ValueError("PRMTrainer needs a train_dataset (or, to evaluate only, an eval_dataset).")
        if isinstance(model, str):
            processing_class = processing_class or AutoTokenizer.from_pretrained(model)
            model = _load(model, args)
        if processing_class is None:
            raise ValueError(
                "PRMTrainer needs the tokenizer: pass processing_class=AutoTokenizer.from_pretrained(...)."
            )
        if processing_class.pad_token is None:
            processing_class.pad_token = processing_class.eos_token
        # With `model_init` the model comes later; its kind is told from one that is thrown away.
        kind = model if model is not None else model_init()
        self.head = _head_of(kind, args.head)
        if self.head == "token_pair":
            self.prm_format = TokenPairFormat(args.step_separator, args.good_token, args.bad_token)
            self._pair = self.prm_format.token_pair(processing_class)
            if args.head_first_steps or args.head_learning_rate is not None:
                raise ValueError(
                    "head_first_steps and head_learning_rate are for a new head; with head='token_pair' the language "
                    "model's own is trained. Leave them at their defaults, or use head='token_classification'."
                )
        else:
            self.prm_format = TokenClassificationFormat(args.step_separator)
        if peft_config is not None:
            if model is None:
                raise ValueError(
                    "peft_config cannot be combined with model_init; wrap the model in model_init itself."
                )
            model = _with_adapter(model, peft_config)
        if args.disable_dropout and model is not None:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0

        self._threshold = args.label_threshold
        if compute_metrics is None:
            compute_metrics = self._metrics
            preprocess_logits_for_metrics = preprocess_logits_for_metrics or _probability_right
        if train_dataset is not None:
            train_dataset = self._tokenize(train_dataset, processing_class, args, "train_dataset", is_eval=False)
        if isinstance(eval_dataset, dict):
            eval_dataset = {
                name: self._tokenize(dataset, processing_class, args, f"eval_dataset[{name!r}]", is_eval=True)
                for name, dataset in eval_dataset.items()
            }
        elif eval_dataset is not None:
            eval_dataset = self._tokenize(eval_dataset, processing_class, args, "eval_dataset", is_eval=True)
        callbacks = list(callbacks or [])
        if args.head_first_steps:
            callbacks.append(_HeadFirst(args.head_first_steps))
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or StepCollator(processing_class.pad_token_id),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        # The loss is divided by the number of labelled steps of the whole optimizer step.
        self.model_accepts_loss_kwargs = True
        self.label_names = ["labels"]
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(list(self._tag_names))

    @staticmethod
    def tokenize_row(
        features: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        step_separator: str,
        max_length: int | None,
        max_completion_length: int | None,
        train_on_last_step_only: bool,
        is_eval: bool,
    ) -> dict[str, list]:
        r"""Tokenises one row; for hard labels, the ids and labels of TRL's method of this name.

        A prompt, then for each step its ids (tokenised on its own) and the separator's. The label stands on the last
        separator token; all other labels are -100.

        Args:
            features: `prompt`, `completions` and `labels` of the row.
            tokenizer: The tokenizer.
            step_separator: Text behind each step.
            max_length: Most tokens of the sequence, or None.
            max_completion_length: Most tokens of the steps with their separators, or None.
            train_on_last_step_only: Keeps the last label alone, unless `is_eval`.
            is_eval: Whether the row is for evaluation.

        Returns:
            `input_ids` and `labels`, lists of the same length.

        Raises:
            ValueError: not as many labels as steps, or a label outside [0, 1].
        """
        steps, labels = features["completions"], list(features["labels"])
        if len(steps) != len(labels):
            raise ValueError(f"A row has {len(steps)} completions (steps) and {len(labels)} labels; one label a step.")
        labels = [IGNORE if label is None else _label(label) for label in labels]
        if train_on_last_step_only and not is_eval:
            labels = [IGNORE] * (len(labels) - 1) + labels[-1:]
        separator = tokenizer.encode(step_separator, add_special_tokens=False)
        pieces = [list(tokenizer(step, add_special_tokens=False)["input_ids"]) + list(separator) for step in steps]
        completion_ids = list(chain(*pieces))[:max_completion_length]
        marks = chain(*([IGNORE] * (len(p) - 1) + [label] for p, label in zip(pieces, labels, strict=True)))
        prefix = prompt_ids(tokenizer, features["prompt"])
        input_ids = (prefix + completion_ids)[:max_length]
        return {
            "input_ids": input_ids,
            "labels": ([IGNORE] * len(prefix) + list(marks)[:max_completion_length])[:max_length],
        }

    def _tokenize(self, dataset, tokenizer, args: PRMConfig, name: str, is_eval: bool):
        columns = dataset.column_names or list(next(iter(dataset)))
        if "input_ids" in columns:
            return dataset
        for column in ("prompt", "completions", "labels"):
            if column not in columns:
                raise ValueError(
                    f"{name} has no column {column!r} but {columns}. PRMTrainer reads TRL's stepwise format: "
                    "`prompt`, `completions` (a list of steps) and `labels` (one for each step)."
                )

        def tokenize(row):
            tokenized = self.tokenize_row(
                row,
                tokenizer,
                args.step_separator,
                args.max_length,
                args.max_completion_length,
                args.train_on_last_step_only,
                is_eval,
            )
            wanted = 1 if args.train_on_last_step_only and not is_eval else sum(x is not None for x in row["labels"])
            return {**tokenized, "lost": wanted - sum(label != IGNORE for label in tokenized["labels"])}

        if isinstance(dataset, IterableDataset):
            return dataset.map(tokenize, remove_columns=columns).remove_columns("lost")
        # Soft labels stay real numbers; hard ones the integers that TRL made of them.
        kind = dataset.features["labels"].feature.dtype
        dtype = "float32" if kind.startswith("float") else "int64"
        with args.main_process_first(desc=f"tokenise {name}"):
            dataset = dataset.map(
                tokenize,
                remove_columns=columns,
                num_proc=args.dataset_num_proc,
                desc=f"Tokenising {name}",
                features=features.Features(
                    {
                        "input_ids": features.Sequence(features.Value("int64")),
                        "labels": features.Sequence(features.Value(dtype)),
                        "lost": features.Value("int64"),
                    }
                ),
            )
        lost = np.asarray(dataset["lost"])
        if lost.sum():
            logger.warning(
                f"{name}: max_length={args.max_length} and max_completion_length={args.max_completion_length} cut "
                f"{lost.sum()} step labels off {(lost > 0).sum()} of {len(dataset)} rows."
            )
        return dataset.remove_columns("lost")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Cross-entropy of the two classes (wrong, right) with the labels as targets, mean over labelled steps."""
        labels = inputs["labels"]
        logits = self._logits(model, inputs)
        loss = step_cross_entropy(logits, labels)
        if num_items_in_batch is None:
            loss = loss / (labels != IGNORE).sum().clamp(min=1)
        else:
            count = torch.as_tensor(num_items_in_batch, device=loss.device).flatten()[0]
            loss = loss / count.clamp(min=1)
            if self.args.average_tokens_across_devices:
                loss = loss * self.accelerator.num_processes
        return (loss, {"logits": logits}) if return_outputs else loss

    def _logits(self, model, inputs) -> torch.Tensor:
        """Logits of wrong and right, (B, T, 2)."""
        inputs = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        if self.head == "token_classification":
            return model(**inputs).logits
        good, bad = self._pair
        return model(**inputs).logits[..., [bad, good]]

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.args.head_learning_rate is not None:
            head = set(map(id, _head_parameters(self.model)))
            for group in list(optimizer.param_groups):
                own = [p for p in group["params"] if id(p) in head]
                if own:
                    group["params"] = [p for p in group["params"] if id(p) not in head]
                    options = {k: v for k, v in group.items() if k not in ("params", "initial_lr")}
                    optimizer.add_param_group({**options, "params": own, "lr": self.args.head_learning_rate})
        return optimizer

    def _metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        probabilities, labels = prediction.predictions, prediction.label_ids
        known = labels != IGNORE
        rows = [i for i in range(len(labels)) if known[i].any()]
        scores = [probabilities[i][known[i]] for i in rows]
        return step_metrics(scores, [labels[i][known[i]] for i in rows], self._threshold)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            save_format(self.prm_format, output_dir or self.args.output_dir)

    def as_reward_model(self, **kwargs: Any) -> ProcessRewardModel:
        """The model in training as a process reward; the weights are shared, so it scores with the current ones.

        Args:
            kwargs: Arguments of `ProcessRewardModel`, such as `batch_size`.
        """
        model = self.accelerator.unwrap_model(self.model)
        return ProcessRewardModel(model, self.processing_class, self.prm_format, **kwargs)


class StepCollator:
    """Pads at the right: ids with the padding token, labels with -100. Soft labels stay real numbers."""

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        soft = any(isinstance(label, float) for row in rows for label in row["labels"])
        batch = {
            "input_ids": torch.full((len(rows), length), self.pad_token_id, dtype=torch.long),
            "attention_mask": torch.zeros(len(rows), length, dtype=torch.long),
            "labels": torch.full((len(rows), length), IGNORE, dtype=torch.float32 if soft else torch.long),
        }
        for i, row in enumerate(rows):
            n = len(row["input_ids"])
            batch["input_ids"][i, :n] = torch.as_tensor(row["input_ids"])
            batch["attention_mask"][i, :n] = 1
            batch["labels"][i, :n] = torch.as_tensor(row["labels"])
        return batch


def step_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over labelled positions of -(y log p_right + (1 - y) log p_wrong).

    Args:
        logits: (..., 2), wrong and right.
        labels: (...), y in [0, 1], or -100 where there is no label.

    Returns:
        A scalar in float32; 0 with a gradient of 0 where nothing is labelled.
    """
    known = labels != IGNORE
    logp = logits[known].float().log_softmax(dim=-1)
    target = labels[known].float()
    return -(target * logp[:, 1] + (1 - target) * logp[:, 0]).sum()


class _HeadFirst(TrainerCallback):
    """Freezes all but the new head for the first optimizer steps."""

    def __init__(self, steps: int):
        self.steps = steps
        self._frozen: list[nn.Parameter] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # The optimizer has all parameters already; without a gradient it leaves them as they are.
        if state.global_step < self.steps:
            head = set(map(id, _head_parameters(model)))
            self._frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in head]
            for parameter in self._frozen:
                parameter.requires_grad_(False)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step >= self.steps:
            self.on_train_end(args, state, control)

    def on_train_end(self, args, state, control, **kwargs):
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []


def _label(label: Any) -> int | float:
    value = float(label) if isinstance(label, float) else int(label)
    if not 0 <= value <= 1:
        raise ValueError(f"A step label is a boolean or a number in [0, 1] (share of right roll-outs), got {label!r}.")
    return value


def _probability_right(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.float().softmax(dim=-1)[..., 1]


def _load(path: str, args: PRMConfig) -> PreTrainedModel:
    kwargs = {"dtype": torch.float32, **(args.model_init_kwargs or {})}
    if args.head == "token_pair":
        return AutoModelForCausalLM.from_pretrained(path, **kwargs)
    return AutoModelForTokenClassification.from_pretrained(path, **{"num_labels": 2, **kwargs})


def _base(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _head_of(model: nn.Module, wanted: str | None) -> str:
    base = _base(model)
    causal = type(base).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    found = "token_pair" if causal else "token_classification"
    if wanted is not None and wanted != found:
        raise ValueError(
            f"args.head={wanted!r} does not fit a {type(base).__name__}: load it with "
            f"{'AutoModelForCausalLM' if wanted == 'token_pair' else 'AutoModelForTokenClassification'}, or pass the "
            "path and the trainer does."
        )
    if found == "token_classification" and getattr(base.config, "num_labels", 2) != 2:
        raise ValueError(
            f"A process reward model has two classes; {type(base).__name__} has {base.config.num_labels}."
        )
    return found


def _head_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the new classification head, named `score` or `classifier` throughout transformers."""
    names = ("score", "classifier")
    found = [p for name, p in model.named_parameters() if p.requires_grad and any(n in name.split(".") for n in names)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no trainable head named 'score' or 'classifier'.")
    return found


def _with_adapter(model: nn.Module, peft_config: Any) -> nn.Module:
    from peft import get_peft_model

    if hasattr(model, "peft_config"):
        raise ValueError("The model is a PEFT model already; leave peft_config out.")
    peft_config = copy.deepcopy(peft_config)
    heads = [name for name in ("score", "classifier") if hasattr(model, name)]
    if heads and peft_config.task_type is None:
        peft_config.modules_to_save = sorted({*(peft_config.modules_to_save or []), *heads})
    return get_peft_model(model, peft_config)
