"""Evaluation during training: pass@1 on a fixed subset every n steps, into the trainer's own logs."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import DistributedType
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl_grpo_plus.evaluation.backends import SampleRequest, TransformersBackend
from trl_grpo_plus.evaluation.datasets import ProblemSet, from_rows, load_problems
from trl_grpo_plus.evaluation.evaluate import Plan
from trl_grpo_plus.evaluation.prompts import PromptTemplate, load_template
from trl_grpo_plus.evaluation.results import answers_equal, grade_records, summarize, write_atomically
from trl_grpo_plus.evaluation.sampling import SamplingParams


class EvalCallback(TrainerCallback):
    """Logs pass@1 on a fixed subset of problems every n steps and keeps the checkpoint that did best.

    ```python
    trainer = GRPOPlusTrainer(...)
    trainer.add_callback(EvalCallback(trainer, "gsm8k", limit=100, every_steps=50))
    ```

    The metrics come as `eval_math/pass@1` (greedy), with more samples also `eval_math/mean@k`, `eval_math/pass@k` and
    `eval_math/maj@k`, and `eval_math/truncated`, `eval_math/no_answer`, `eval_math/mean_tokens`. They reach
    the log history, the progress table and every reporter like the trainer's own metrics, in an entry of their own.
    Sampling takes no random number from torch: training goes on as if it had not been evaluated.

    The best checkpoint is saved at the step where it was measured and recorded as the trainer's
    `state.best_model_checkpoint`, which `save_total_limit` never deletes.

    Args:
        trainer: any transformers or TRL trainer of a decoder-only model.
        dataset: a `ProblemSet`; a name, file or hub id as in `load_problems`; or rows with the usual columns.
        every_steps: distance of two evaluations, in optimizer steps.
        limit: take the first so many problems.
        prompt: as `--prompt` of `trl-grpo-plus eval`, or a `PromptTemplate`.
        num_samples: 1 is greedy alone; more are drawn beside the greedy completion.
        temperature: of the samples.
        max_tokens: longest completion.
        batch_size: rows that decode together.
        grader: `GradePolicy` mode, or a `GradePolicy`.
        at_start: evaluate before the first step too.
        keep_best: save a checkpoint when `metric` is higher than ever before.
        metric: what is best: "pass@1", or one of the others with `num_samples` > 1.
        output_dir: samples of each evaluation go to `samples_STEP.jsonl` here. None = `evaluation` in the trainer's
            output directory.
        seed: of the samples; the same at every evaluation, so that steps are compared on the same random numbers.
        prefix: of the metric names.

    Raises:
        ValueError: every_steps below 1, a metric that this configuration does not produce, or `keep_best` together
            with `load_best_model_at_end`, which would set the best checkpoint by another metric.
    """

    def __init__(
        self,
        trainer: Trainer,
        dataset: ProblemSet | str | Sequence[Mapping],
        *,
        every_steps: int = 50,
        limit: int | None = None,
        prompt: str | PromptTemplate = "auto",
        num_samples: int = 1,
        temperature: float = 0.7,
        max_tokens: int = 512,
        batch_size: int = 32,
        grader: Any = "auto",
        at_start: bool = True,
        keep_best: bool = True,
        metric: str = "pass@1",
        output_dir: str | None = None,
        seed: int = 0,
        prefix: str = "eval_math",
    ):
        from reward_fns import GradePolicy

        if every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, got {every_steps}")
        if trainer.accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError(
                "EvalCallback cannot sample from parameters that FSDP shards, since ranks finish at different times; "
                "evaluate the checkpoints with `trl-grpo-plus eval` instead"
            )
        if keep_best and trainer.args.load_best_model_at_end:
            raise ValueError(
                "keep_best sets the best checkpoint by its own metric, and so does load_best_model_at_end; "
                "switch one of them off"
            )
        if isinstance(dataset, ProblemSet):
            self.problems = dataset.head(limit)
        elif isinstance(dataset, str):
            self.problems = load_problems(dataset, limit=limit)
        else:
            self.problems = from_rows(dataset, name="problems", limit=limit)
        self.trainer, self.every_steps = trainer, every_steps
        self.tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        self.plan = Plan(
            SamplingParams(max_tokens=max_tokens, temperature=temperature if num_samples > 1 else 0.0, seed=seed),
            num_samples,
        )
        self.template = (
            prompt
            if isinstance(prompt, PromptTemplate)
            else load_template(
                prompt,
                kind=self.problems.kind,
                has_chat_template=bool(getattr(self.tokenizer, "chat_template", None)),
            )
        )
        self.batch_size = batch_size
        self.policy = grader if isinstance(grader, GradePolicy) else GradePolicy(mode=grader)
        self.at_start, self.keep_best, self.metric, self.prefix = at_start, keep_best, metric, prefix
        allowed = ["pass@1"] + [f"{kind}@{num_samples}" for kind in ("mean", "pass", "maj") if num_samples > 1]
        if metric not in allowed:
            raise ValueError(f"metric {metric!r} is not measured with num_samples={num_samples}; use one of {allowed}")
        self.output_dir = Path(output_dir or Path(trainer.args.output_dir) / "evaluation")
        self.history: list[dict[str, float]] = []
        self._equal = answers_equal()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if state.global_step == 0:
            if self.at_start:
                self._step(args, state, control)
            return
        # A resumed run: what was measured before the checkpoint is in its log history.
        key = f"{self.prefix}/{self.metric}"
        for entry in state.log_history:
            if key in entry:
                self.history.append({"step": entry["step"], self.metric: entry[key]})

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if state.global_step % self.every_steps == 0 or state.global_step == state.max_steps:
            self._step(args, state, control)

    def _step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if any(h["step"] == state.global_step for h in self.history):
            return
        best = max((h[self.metric] for h in self.history), default=-math.inf)
        values = self.evaluate()
        self.history.append({"step": state.global_step, **values})
        # TRL's own `log` would flush the training metrics that are not complete yet, and write a completions table.
        # Logging takes back the trainer's order to log this step, which was given before this callback's turn.
        should_log = control.should_log
        Trainer.log(self.trainer, {f"{self.prefix}/{name}": value for name, value in values.items()})
        control.should_log = should_log
        # Before the first step there is nothing to keep: the model is where it came from.
        if self.keep_best and values[self.metric] > best and state.global_step > 0:
            state.best_metric = values[self.metric]
            state.best_global_step = state.global_step
            state.best_model_checkpoint = str(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            control.should_save = True
            if self.trainer.accelerator.is_main_process:
                best_file = {"metric": self.metric, "checkpoint": state.best_model_checkpoint, **self.history[-1]}
                write_atomically(self.output_dir / "best.json", json.dumps(best_file, indent=1) + "\n")

    def evaluate(self) -> dict[str, float]:
        """Evaluates the trainer's model now; each rank takes its share of the problems, all get the same numbers."""
        from accelerate.utils import gather_object
        from trl.models import unwrap_model_for_generation

        accelerator, state = self.trainer.accelerator, self.trainer.state
        own = self.problems.problems[accelerator.process_index :: accelerator.num_processes]
        records: list[dict[str, Any]] = []
        options = {"gradient_checkpointing_kwargs": self.trainer.args.gradient_checkpointing_kwargs}
        if "gradient_checkpointing_kwargs" not in inspect.signature(unwrap_model_for_generation).parameters:
            options = {}
        with unwrap_model_for_generation(self.trainer.model_wrapped, accelerator, **options) as model:
            backend = TransformersBackend(model=model, tokenizer=self.tokenizer, batch_size=self.batch_size)
            by_id = {p.id: p for p in own}
            for numbers, params in self.plan.passes():
                params = replace(params, stop=self.template.stop)
                requests = [SampleRequest(p.id, s, self.template.render(p.question)) for p in own for s in numbers]
                for g in backend.sample(requests, params):
                    problem = by_id[g.problem_id]
                    records.append(
                        {
                            "model": f"step {state.global_step}",
                            "problem_id": g.problem_id,
                            "sample": g.sample,
                            "greedy": params.temperature == 0,
                            "question": problem.question,
                            "gold": problem.gold,
                            "level": problem.level,
                            "subject": problem.subject,
                            "completion": g.text,
                            "num_tokens": g.num_tokens,
                            "finish_reason": g.finish_reason,
                            "error": g.error,
                        }
                    )
        grade_records(records, self.policy)
        records = gather_object(records)
        order = {p.id: i for i, p in enumerate(self.problems.problems)}
        records.sort(key=lambda r: (order[r["problem_id"]], r["sample"]))
        summary = summarize(records, equal=self._equal)
        if accelerator.is_main_process:
            text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
            write_atomically(self.output_dir / f"samples_{state.global_step:06d}.jsonl", text)
        table, k = summary["metrics"], self.plan.num_samples
        values = {"pass@1": table["greedy"]["value"]}
        if k > 1:
            values |= {name: table[name]["value"] for name in (f"mean@{k}", f"pass@{k}", f"maj@{k}")}
        rates = summary["rates"]
        return values | {name: rates[name] for name in ("truncated", "no_answer", "mean_tokens")}
