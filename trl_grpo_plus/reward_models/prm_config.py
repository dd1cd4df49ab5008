"""Configuration of the process reward model trainer."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from transformers import TrainingArguments


@dataclass
class PRMConfig(TrainingArguments):
    r"""Arguments of [`PRMTrainer`]: those of transformers' `TrainingArguments`, and what is listed here.

    Names and defaults are those of the `PRMConfig` that TRL had until 1.13, so that its users change an import. Other
    defaults than in `TrainingArguments`: `learning_rate` 1e-5, `logging_steps` 10, `gradient_checkpointing` True, and
    `bf16` on where a CUDA device supports it (TRL: on everywhere).

    Args:
        max_length: Longest sequence in tokens, prompt and completion; more is cut at the right, and the trainer tells
            how many step labels that cost. None: no limit.
        max_completion_length: The same for the steps alone, separators included.
        disable_dropout: Sets all dropout to 0.
        step_separator: Text put behind each step; the label stands on its last token.
        train_on_last_step_only: Trains on the last step's label alone (an outcome reward model). Evaluation looks at
            all steps.
        dataset_num_proc: Processes for tokenising.
        head: `"token_classification"`: a new two-class head. `"token_pair"`: the language model's own head, on which
            `good_token` and `bad_token` compete at the separator. None: the first for a path and for a
            token-classification model, the second for a causal language model.
        good_token, bad_token: The two tokens of `"token_pair"`; each must be one token.
        head_first_steps: Optimizer steps at the start that train the new head alone, with the body frozen, so that the
            random head does not spoil the body. 0: none.
        head_learning_rate: Learning rate of the new head. None: `learning_rate`.
        label_threshold: Where a probability, and a soft label, turns from wrong to right in the metrics. The loss
            takes soft labels as they are.
        model_init_kwargs: Arguments of `from_pretrained` when the model is a path. `dtype` is float32 if not given.
    """

    _VALID_DICT_FIELDS: ClassVar = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    learning_rate: float = field(default=1e-5, metadata={"help": "The initial learning rate for AdamW."})
    logging_steps: float = field(
        default=10,
        metadata={"help": "Log every X update steps; below 1, a share of all training steps."},
    )
    gradient_checkpointing: bool = field(
        default=True, metadata={"help": "Recomputes activations in the backward pass: less memory, about 20%% slower."}
    )
    bf16: bool | None = field(
        default=None, metadata={"help": "bfloat16 mixed precision. Default: where a CUDA device supports it."}
    )
    max_length: int | None = field(
        default=1024, metadata={"help": "Longest sequence in tokens (prompt and completion); more is cut."}
    )
    max_completion_length: int | None = field(
        default=None, metadata={"help": "Longest completion in tokens, separators included; more is cut."}
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Sets all dropout to 0."})
    step_separator: str = field(
        default="\n", metadata={"help": "Text behind each step; the label stands on its last token."}
    )
    train_on_last_step_only: bool = field(default=False, metadata={"help": "Trains on the last step's label alone."})
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes for tokenising."})
    head: Literal["token_classification", "token_pair"] | None = field(
        default=None,
        metadata={
            "help": "A new two-class head, or two tokens of the language model's own head. Default: by the model."
        },
    )
    good_token: str = field(default="+", metadata={"help": "Token of a right step, for the head token_pair."})
    bad_token: str = field(default="-", metadata={"help": "Token of a wrong step, for the head token_pair."})
    head_first_steps: int = field(
        default=0, metadata={"help": "Optimizer steps at the start that train the new head alone."}
    )
    head_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the new head. Default: learning_rate."}
    )
    label_threshold: float = field(
        default=0.5, metadata={"help": "Where a probability or a soft label turns from wrong to right in the metrics."}
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of from_pretrained when the model is a path."}
    )

    def __post_init__(self):
        if self.bf16 is None:
            self.bf16 = (
                not self.fp16 and not self.use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
            )
        super().__post_init__()
        for name in ("max_length", "max_completion_length"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {getattr(self, name)}.")
        if self.head not in (None, "token_classification", "token_pair"):
            raise ValueError(f'head must be "token_classification", "token_pair" or None, got {self.head!r}.')
        if self.head_first_steps < 0:
            raise ValueError(f"head_first_steps must be at least 0, got {self.head_first_steps}.")
        if not 0 < self.label_threshold < 1:
            raise ValueError(f"label_threshold must lie between 0 and 1, got {self.label_threshold}.")
        if not self.step_separator:
            raise ValueError("step_separator must not be empty: the step's label stands on its last token.")
        if self.head_first_steps and self.ddp_find_unused_parameters is None:
            # A frozen body gets no gradients, which DistributedDataParallel takes for an error otherwise.
            self.ddp_find_unused_parameters = True
