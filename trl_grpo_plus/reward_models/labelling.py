"""Step labels without humans: from the end of each step, does a policy still reach the right answer?

Math-Shepherd (arXiv 2312.08935 section 3.2) and OmegaPRM label a step by roll-outs: N continuations of the solution up
to the step's end are sampled from a completer policy and judged by their final answer. The hard label is 1 if any of
them is right (eq. 3), the soft label is the share of right ones (eq. 4).

Where it departs from Math-Shepherd: the last step is judged by the completion's own answer, since nothing is left to
roll out, and with hard labels a step's roll-outs end with the first right one, which decides the label.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from datasets import Dataset
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trl_grpo_plus.algorithms.steps import split_steps, step_texts
from trl_grpo_plus.reward_models.completers import Completer, Rollout, Sampling, TransformersCompleter, VLLMCompleter
from trl_grpo_plus.reward_models.formats import tokenize, without_line_end
from trl_grpo_plus.reward_models.prm import locate_steps

logger = logging.getLogger(__name__)

Grader = Callable[[Sequence[str], Sequence[str]], Sequence[bool]]


class _Row(NamedTuple):
    prompt: Any
    gold: str
    prompt_ids: list[int]
    completion_ids: list[int]
    ends: list[int]
    steps: list[str]

    @property
    def sequence(self) -> list[int]:
        return self.prompt_ids + self.completion_ids


def grade_by_rule(golds: Sequence[str], completions: Sequence[str]) -> list[bool]:
    """Whether each completion reaches its gold answer, by `reward_fns.grade_batch`."""
    from reward_fns import grade_batch

    return [bool(grade.correct) for grade in grade_batch(list(golds), list(completions))]


def label_steps_by_rollout(
    dataset: Dataset,
    completer: str | PreTrainedModel | Completer,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    num_rollouts: int = 8,
    label: Literal["hard", "soft"] = "hard",
    early_stop: bool = True,
    last_step: Literal["grade", "rollout"] = "grade",
    grader: Grader = grade_by_rule,
    answer_column: str = "answer",
    delimiter: Any = "newline",
    step_separator: str = "\n",
    max_new_tokens: int = 512,
    temperature: float = 0.7,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    batch_size: int = 64,
    rows_per_chunk: int = 16,
    output: str | Path | None = None,
    progress: bool = True,
) -> Dataset:
    """Labels the steps of completions by roll-outs from each step's end.

    With `output`, a killed job goes on where it was: finished chunks of rows are in a journal beside the output, and
    the roll-outs' random streams are named by row, step and number, so the resumed job ends with the same labels as an
    uninterrupted one.

    Args:
        dataset: Rows with `prompt` (text or messages), the gold answer, and the completion: `completion_ids` (sampled
            ids), or `completion` (text or assistant messages), or `completions` (a list of steps).
        completer: The policy that rolls out: a path, a transformers model, a `vllm.LLM`, or a `Completer`.
        tokenizer: The policy's tokenizer; needed for a model.
        num_rollouts: N, most continuations of one step.
        label: `"hard"`: True if any continuation is right. `"soft"`: the share of right ones, in [0, 1].
        early_stop: With hard labels, no more roll-outs of a step after the first right one. The labels are the same
            as without.
        last_step: `"grade"`: the last step's label is the verdict on the completion itself. `"rollout"`: it is rolled
            out as the others, for completions that were cut off; one that has its end token is judged all the same.
        grader: (gold answers, completions) -> verdicts. It sees the whole completion, steps and continuation.
        answer_column: Column of the gold answer.
        delimiter: How a completion without `completions` is split; as in `trl_grpo_plus.algorithms.steps`.
        step_separator: Joins `completions` to a text, where a step does not end with it already.
        max_new_tokens, temperature, top_p, top_k, seed: How continuations are sampled.
        batch_size: Most sequences in one forward pass.
        rows_per_chunk: Rows labelled together; all their open steps roll out in one batch. A killed job loses at most
            one chunk.
        output: A `.parquet` file to write at the end; the journal stands beside it.
        progress: Whether to show a progress bar.

    Returns:
        A data set in the stepwise format: `prompt`, `completions` (steps without their line ends), `labels` (list of
        bool, or of float), and, for every step, `rollouts_right` and `rollouts_total` (0 and 0 where the completion
        itself was judged), and the answer column. Rows with an empty completion are left out, with a warning.

    Raises:
        ValueError: an unknown option, a missing column, or a journal that another data set, policy or setting wrote.
    """
    if label not in ("hard", "soft"):
        raise ValueError(f'label must be "hard" or "soft", got {label!r}.')
    if last_step not in ("grade", "rollout"):
        raise ValueError(f'last_step must be "grade" or "rollout", got {last_step!r}.')
    if num_rollouts < 1 or rows_per_chunk < 1:
        raise ValueError(f"num_rollouts and rows_per_chunk must be at least 1, got {num_rollouts}, {rows_per_chunk}.")
    if output is not None and Path(output).suffix != ".parquet":
        raise ValueError(f"output must be a .parquet file, got {output}.")
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, seed)
    completer = as_completer(completer, tokenizer, batch_size)
    rows = _read_rows(dataset, completer.tokenizer, answer_column, delimiter, step_separator)
    chunks = [range(start, min(start + rows_per_chunk, len(rows))) for start in range(0, len(rows), rows_per_chunk)]
    settings = {
        "num_rollouts": num_rollouts,
        "label": label,
        "early_stop": early_stop,
        "last_step": last_step,
        "rows_per_chunk": rows_per_chunk,
        "batch_size": batch_size,
        **asdict(sampling),
        "policy": completer.fingerprint(),
        "data": _digest(rows),
    }
    journal = _Journal(None if output is None else Path(output).with_suffix(".journal.jsonl"), settings)
    with _progress_bar(progress) as bar:
        task = bar.add_task("Labelling", total=len(rows), completed=sum(len(chunks[c]) for c in journal.chunks))
        for number, chunk in enumerate(chunks):
            if number not in journal.chunks:
                found = _label_chunk(
                    [rows[i] for i in chunk],
                    chunk,
                    completer,
                    grader,
                    sampling,
                    num_rollouts=num_rollouts,
                    stop=early_stop and label == "hard",
                    roll_last=last_step == "rollout",
                )
                journal.write(number, found)
                bar.advance(task, len(chunk))
    labelled = _as_dataset(rows, [row for c in range(len(chunks)) for row in journal.chunks[c]], label, answer_column)
    if output is not None:
        # A parquet file is there whole or not at all.
        partial = Path(output).with_suffix(".parquet.partial")
        labelled.to_parquet(partial)
        os.replace(partial, output)
    return labelled


def sample_completions(
    dataset: Dataset,
    completer: str | PreTrainedModel | Completer,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    num_samples: int = 4,
    max_new_tokens: int = 512,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    batch_size: int = 64,
    progress: bool = True,
) -> Dataset:
    """Samples completions to label: each row `num_samples` times, with the new columns `completion`, `completion_ids`.

    Args:
        dataset: Rows with `prompt`; all columns are kept.
        completer, tokenizer, max_new_tokens, temperature, top_p, top_k, seed, batch_size, progress: As in
            `label_steps_by_rollout`.
        num_samples: Completions of one prompt.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, seed)
    completer = as_completer(completer, tokenizer, batch_size)
    samples = []
    size = max(1, batch_size // num_samples)
    with _progress_bar(progress) as bar:
        task = bar.add_task("Sampling", total=len(dataset))
        for start in range(0, len(dataset), size):
            rows = [dataset[i] for i in range(start, min(start + size, len(dataset)))]
            prompts = [policy_prompt_ids(completer.tokenizer, row["prompt"]) for row in rows]
            state = completer.prefill(prompts, [[len(ids)] for ids in prompts])
            # Labelling names its streams (row, step, number); the 2 ** 31 keeps these apart from all of them.
            rollouts = [
                Rollout(n, len(ids), (start + n, 2**31, k))
                for n, ids in enumerate(prompts)
                for k in range(num_samples)
            ]
            for rollout, ids in zip(rollouts, completer.complete(state, rollouts, sampling), strict=True):
                text = _decode(completer.tokenizer, ids)
                samples.append({**rows[rollout.row], "completion": text, "completion_ids": ids})
            bar.advance(task, len(rows))
    return Dataset.from_list(samples)


def as_completer(
    completer: str | PreTrainedModel | Completer, tokenizer: PreTrainedTokenizerBase | None, batch_size: int
) -> Completer:
    """Makes a completer of what a user may name as one.

    Raises:
        ValueError: a model without a tokenizer.
        TypeError: nothing that completes.
    """
    if isinstance(completer, (str, Path)):
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(completer)
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        completer = AutoModelForCausalLM.from_pretrained(completer, dtype="auto").to(device or "cpu").eval()
    if isinstance(completer, torch.nn.Module):
        if tokenizer is None:
            raise ValueError(
                "A model as completer needs its tokenizer: pass tokenizer=AutoTokenizer.from_pretrained(...)."
            )
        return TransformersCompleter(completer, tokenizer, batch_size)
    if hasattr(completer, "prefill") and hasattr(completer, "complete"):
        return completer
    if hasattr(completer, "generate") and hasattr(completer, "get_tokenizer"):
        return VLLMCompleter(completer, tokenizer)
    raise TypeError(f"completer must be a path, a model, a vllm.LLM or a Completer, got {type(completer).__name__}.")


def policy_prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict]) -> list[int]:
    """A prompt's token ids as a policy gets them: with the tokenizer's special tokens, or by the chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return tokenize(tokenizer, tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


def _label_chunk(
    rows: list[_Row],
    numbers: Sequence[int],
    completer: Completer,
    grader: Grader,
    sampling: Sampling,
    *,
    num_rollouts: int,
    stop: bool,
    roll_last: bool,
) -> list[dict[str, list]]:
    """Each row's counts: `right` and `total` of each step's roll-outs, and the verdict on the completion itself."""
    # A completion with its end token leaves nothing to roll out.
    judged = [not roll_last or row.completion_ids[-1] == completer.tokenizer.eos_token_id for row in rows]
    cuts = [
        [len(row.prompt_ids) + end + 1 for end in (row.ends[:-1] if whole else row.ends)]
        for row, whole in zip(rows, judged, strict=True)
    ]
    state = completer.prefill([row.sequence for row in rows], cuts)
    right = [[0] * len(row.ends) for row in rows]
    total = [[0] * len(row.ends) for row in rows]
    texts = [_decode(completer.tokenizer, row.completion_ids) for row in rows]
    verdicts = list(map(bool, grader([row.gold for row in rows], texts)))
    # With early stop one roll-out of every open step a wave; else all at once.
    wave = 1 if stop else num_rollouts
    for first in range(0, num_rollouts, wave):
        rollouts, steps = [], []
        for n, row_cuts in enumerate(cuts):
            for j, cut in enumerate(row_cuts):
                if stop and right[n][j]:
                    continue
                for k in range(first, min(first + wave, num_rollouts)):
                    rollouts.append(Rollout(n, cut, (numbers[n], j, k)))
                    steps.append(j)
        if not rollouts:
            break
        ids = completer.complete(state, rollouts, sampling)
        texts = [
            _decode(completer.tokenizer, rows[r.row].sequence[len(rows[r.row].prompt_ids) : r.cut] + new)
            for r, new in zip(rollouts, ids, strict=True)
        ]
        for rollout, j, verdict in zip(
            rollouts, steps, grader([rows[r.row].gold for r in rollouts], texts), strict=True
        ):
            right[rollout.row][j] += bool(verdict)
            total[rollout.row][j] += 1
    return [
        {"row": number, "right": r, "total": t, "verdict": verdict}
        for number, r, t, verdict in zip(numbers, right, total, verdicts, strict=True)
    ]


def _as_dataset(rows: list[_Row], found: list[dict], label: str, answer_column: str) -> Dataset:
    if not rows:
        raise ValueError("There is no completion to label: the data set is empty, or all its completions are.")
    records = []
    for row, counts in zip(rows, found, strict=True):
        shares = [
            r / t if t else float(counts["verdict"]) for r, t in zip(counts["right"], counts["total"], strict=True)
        ]
        records.append(
            {
                "prompt": row.prompt,
                "completions": row.steps,
                "labels": [share > 0 for share in shares] if label == "hard" else shares,
                "rollouts_right": counts["right"],
                "rollouts_total": counts["total"],
                answer_column: row.gold,
            }
        )
    return Dataset.from_list(records)


def _read_rows(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, answer_column: str, delimiter: Any, separator: str
) -> list[_Row]:
    columns = dataset.column_names
    for column in ("prompt", answer_column):
        if column not in columns:
            raise ValueError(
                f"The data set has no column {column!r} but {columns}; name the gold answer's with answer_column."
            )
    kind = next((name for name in ("completion_ids", "completion", "completions") if name in columns), None)
    if kind is None:
        raise ValueError(
            f"The data set has no completions but {columns}. Add `completion` (text), `completion_ids` or "
            "`completions` (steps), or sample them with sample_completions."
        )
    rows, empty = [], 0
    for record in dataset:
        ids, ends = _completion_of(record, kind, tokenizer, delimiter, separator)
        if not ids:
            empty += 1
            continue
        texts = record["completions"] if kind == "completions" else step_texts(ids, ends, tokenizer)
        steps = [without_line_end(text) for text in texts]
        rows.append(
            _Row(
                record["prompt"],
                str(record[answer_column]),
                policy_prompt_ids(tokenizer, record["prompt"]),
                ids,
                ends,
                steps,
            )
        )
    if empty:
        logger.warning(f"{empty} of {len(dataset)} completions are empty and left out.")
    return rows


def _completion_of(record: dict, kind: str, tokenizer, delimiter: Any, separator: str) -> tuple[list[int], list[int]]:
    """Token ids of a row's completion and the end index of each of its steps."""
    if kind == "completion_ids":
        ids = list(record[kind])
        return ids, split_steps(ids, tokenizer, delimiter)
    if kind == "completion":
        text = record[kind]
        if not isinstance(text, str):
            text = "".join(message["content"] for message in text)
        ids = tokenize(tokenizer, text)
        return ids, split_steps(ids, tokenizer, delimiter)
    steps = record[kind]
    texts = [step if step.endswith(separator) else step + separator for step in steps[:-1]] + steps[-1:]
    ids = tokenize(tokenizer, "".join(texts))
    ends = locate_steps(ids, texts, tokenizer)
    if ends is None:
        # A token lies across two steps: cut there, and tokenise each step on its own.
        pieces = [tokenize(tokenizer, text) for text in texts]
        ids = [token for piece in pieces for token in piece]
        ends = [sum(map(len, pieces[: j + 1])) - 1 for j in range(len(pieces))]
    return ids, ends


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _digest(rows: list[_Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.sequence, row.ends, row.gold]).encode())
    return digest.hexdigest()[:16]


class _Journal:
    """Finished chunks, one line each, behind a line with the settings. Without a path it is kept in memory alone."""

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self.path = path
        self.chunks: dict[int, list[dict]] = {}
        if path is None:
            return
        lines = list(self._read()) if path.exists() else []
        if lines:
            changed = {key for key in {*lines[0], *settings} if lines[0].get(key) != settings.get(key)}
            if changed:
                told = ", ".join(f"{key} {lines[0].get(key)!r} -> {settings.get(key)!r}" for key in sorted(changed))
                raise ValueError(
                    f"{path} was written by a job with other settings ({told}). Give this job another output, or "
                    "delete the journal to start over."
                )
            self.chunks = {line["chunk"]: line["rows"] for line in lines[1:]}
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written anew, so that what a kill left of a line does not run into the next.
        partial = path.with_suffix(".partial")
        with open(partial, "w", encoding="utf-8") as file:
            for line in [settings, *({"chunk": c, "rows": rows} for c, rows in self.chunks.items())]:
                file.write(json.dumps(line) + "\n")
        os.replace(partial, path)

    def _read(self) -> Iterator[dict]:
        with open(self.path, encoding="utf-8") as file:
            for line in file:
                # A line without its end was being written when the job was killed; only the last can be.
                if line.endswith("\n"):
                    yield json.loads(line)

    def write(self, chunk: int, rows: list[dict]) -> None:
        self.chunks[chunk] = rows
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"chunk": chunk, "rows": rows}) + "\n")
                file.flush()
                os.fsync(file.fileno())


def _progress_bar(show: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        disable=not show,
    )
