"""Where samples come from: a transformers model in this process, vLLM, or any OpenAI-compatible server.

A backend renders prompts to what the model sees and yields `Generation`s as they finish, so that each can be written
to disk at once. All take a seed per (problem, sample); only `transformers` in float32 promises the same completions
again.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trl_grpo_plus.evaluation.prompts import Prompt
from trl_grpo_plus.evaluation.sampling import (
    ContinuousSampler,
    Generation,
    SamplingParams,
    TokenRequest,
    cut_at,
    request_seed,
)

BACKENDS = ("transformers", "vllm", "server")


class BackendError(RuntimeError):
    """The backend cannot go on; what was sampled so far is kept."""


@dataclass(frozen=True)
class SampleRequest:
    """One sample to draw."""

    problem_id: str
    sample: int
    prompt: Prompt


class Backend(Protocol):
    """What the evaluation needs of a source of samples."""

    name: str
    has_chat_template: bool

    def render(self, prompt: Prompt) -> str:
        """The exact text that the model continues (for a server: the messages, as JSON)."""

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Iterator[Generation]:
        """Yields each sample as it finishes, in any order."""

    def settings(self) -> dict[str, Any]:
        """What belongs in the results: device, dtype, batch size, ..."""


def resolve_model(path: str) -> str:
    """A model id or directory; for the directory of a training run without a model in it, its last checkpoint."""
    root = Path(path)
    if not root.is_dir() or (root / "config.json").exists() or (root / "adapter_config.json").exists():
        return path
    checkpoints = sorted(
        (int(m.group(1)), p) for p in root.iterdir() if (m := re.fullmatch(r"checkpoint-(\d+)", p.name)) and p.is_dir()
    )
    if not checkpoints:
        raise BackendError(f"{path} has neither config.json nor adapter_config.json nor a checkpoint-N directory")
    return str(checkpoints[-1][1])


def load_tokenizer(path: str):
    """Tokenizer of a model, or of the base model for an adapter that was saved without one."""
    from transformers import AutoTokenizer

    adapter = Path(path) / "adapter_config.json"
    if adapter.exists() and not (Path(path) / "tokenizer_config.json").exists():
        path = json.loads(adapter.read_text())["base_model_name_or_path"]
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise BackendError(f"cannot load the tokenizer of {path!r}: {_first_line(error)}") from error


class _Tokenizing:
    """Rendering that the two in-process backends share."""

    tokenizer: Any

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def render(self, prompt: Prompt) -> str:
        if prompt.messages is None:
            return prompt.text
        return self.tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)

    def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of the rendered prompt. A chat template writes its own special tokens."""
        text = self.render(prompt)
        return tuple(self.tokenizer(text, add_special_tokens=prompt.messages is None)["input_ids"])

    def tokenize(self, requests: Sequence[SampleRequest]) -> list[TokenRequest]:
        ids: dict[str, tuple[int, ...]] = {}
        for request in requests:
            if request.problem_id not in ids:
                ids[request.problem_id] = self.token_ids(request.prompt)
        return [TokenRequest(r.problem_id, r.sample, ids[r.problem_id]) for r in requests]


class TransformersBackend(_Tokenizing):
    """A transformers model in this process; see `ContinuousSampler`.

    Args:
        model: model and tokenizer at hand, or None to load `path`.
        path: hub id, model directory, PEFT adapter directory (merged into its base model) or training run.
        dtype: "auto" is float32 on a CPU and the checkpoint's elsewhere; or "float32", "bfloat16", "float16".
        device: None = a GPU where there is one.
    """

    name = "transformers"

    def __init__(
        self,
        path: str | None = None,
        *,
        model=None,
        tokenizer=None,
        batch_size: int = 32,
        dtype: str = "auto",
        device: str | None = None,
    ):
        if model is None:
            if path is None:
                raise ValueError("give a path, or a model and its tokenizer")
            path = resolve_model(path)
            tokenizer = tokenizer or load_tokenizer(path)
            model = self._load(path, dtype, device)
        self.path, self.model, self.tokenizer, self.batch_size = path, model, tokenizer, batch_size
        self.stats: dict[str, float] = {}

    @staticmethod
    def _load(path: str, dtype: str, device: str | None):
        import torch
        from transformers import AutoModelForCausalLM

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if dtype == "auto" and device == "cpu":
            dtype = "float32"
        try:
            if (Path(path) / "adapter_config.json").exists():
                from peft import AutoPeftModelForCausalLM

                model = AutoPeftModelForCausalLM.from_pretrained(path, dtype=dtype).merge_and_unload()
            else:
                model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        except (OSError, ValueError) as error:
            raise BackendError(f"cannot load model {path!r}: {_first_line(error)}") from error
        return model.to(device).eval()

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Iterator[Generation]:
        try:
            sampler = ContinuousSampler(self.model, self.tokenizer, params, self.batch_size)
        except ValueError as error:
            raise BackendError(str(error)) from error
        start = time.perf_counter()
        try:
            yield from sampler.run(self.tokenize(requests))
        finally:
            for key, value in {**sampler.stats, "seconds": time.perf_counter() - start}.items():
                self.stats[key] = self.stats.get(key, 0) + value

    def settings(self) -> dict[str, Any]:
        return {
            "backend": self.name,
            "path": self.path,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            "batch_size": self.batch_size,
        }


class VLLMBackend(_Tokenizing):
    """vLLM in this process, imported when used (`pip install 'trl-grpo-plus[vllm]'`).

    Args:
        path: as in `TransformersBackend`; an adapter runs as a LoRA request on its base model.
        dtype: vLLM's.
        chunk: so many requests are handed over at once, and written when all of them are done.
        options: further arguments of `vllm.LLM`, such as tensor_parallel_size.
    """

    name = "vllm"

    def __init__(self, path: str, *, dtype: str = "auto", chunk: int = 512, seed: int = 0, **options: Any):
        try:
            from vllm import LLM
        except ImportError as error:
            raise BackendError("the vllm backend needs vLLM: pip install 'trl-grpo-plus[vllm]'") from error
        self.path = resolve_model(path)
        self.tokenizer = load_tokenizer(self.path)
        self.dtype, self.chunk = dtype, chunk
        self._lora = None
        base = self.path
        adapter = Path(self.path) / "adapter_config.json"
        if adapter.exists():
            from vllm.lora.request import LoRARequest

            config = json.loads(adapter.read_text())
            base = config["base_model_name_or_path"]
            self._lora = LoRARequest("adapter", 1, self.path)
            options = {"enable_lora": True, "max_lora_rank": max(8, int(config.get("r", 8))), **options}
        self.llm = LLM(model=base, dtype=dtype, seed=seed, enable_prefix_caching=True, **options)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Iterator[Generation]:
        from vllm import SamplingParams as VLLMParams

        tokens = self.tokenize(requests)
        limit = self.llm.llm_engine.model_config.max_model_len
        ready = []
        for request in tokens:
            if len(request.prompt_ids) >= limit:
                yield Generation(request.problem_id, request.sample, "", 0, "prompt_too_long")
            else:
                ready.append(request)
        for start in range(0, len(ready), self.chunk):
            part = ready[start : start + self.chunk]
            sampling = [
                VLLMParams(
                    n=1,
                    max_tokens=min(params.max_tokens, limit - len(r.prompt_ids)),
                    temperature=params.temperature,
                    top_p=params.top_p,
                    top_k=params.top_k or -1,
                    stop=list(params.stop) or None,
                    seed=request_seed(params.seed, r.problem_id, r.sample),
                )
                for r in part
            ]
            outputs = self.llm.generate(
                [{"prompt_token_ids": list(r.prompt_ids)} for r in part],
                sampling,
                use_tqdm=False,
                **({"lora_request": self._lora} if self._lora else {}),
            )
            for request, output in zip(part, outputs, strict=True):
                best = output.outputs[0]
                yield Generation(
                    request.problem_id,
                    request.sample,
                    best.text,
                    len(best.token_ids),
                    "length" if best.finish_reason == "length" else "stop",
                )

    def settings(self) -> dict[str, Any]:
        return {"backend": self.name, "path": self.path, "dtype": self.dtype}


class ServerBackend:
    """An OpenAI-compatible server: `/chat/completions` for chat prompts, `/completions` for text.

    A request that fails for a passing reason (no connection, timeout, status 408, 409, 429 or 5xx, an answer that is
    not the JSON it should be) is sent again after a growing pause. One that keeps failing is a `Generation` with
    finish_reason "error", and is tried again when the evaluation is run again.

    Args:
        model: name that the server knows the model by.
        url: base address, such as http://localhost:8000/v1.
        api_key_env: environment variable that holds the key.
        concurrency: requests under way at once.
        attempts: tries of one request.
        backoff: seconds before the second try; doubled for each further one, up to a minute. A Retry-After is obeyed.
        timeout: seconds for one answer.
        give_up_after: so many requests in a row without an answer end the evaluation.

    Raises:
        BackendError: from `sample`, for a status that no second try can mend (401, 403, 404), or when the server has
            gone.
    """

    name = "server"
    has_chat_template = True

    def __init__(
        self,
        model: str,
        url: str,
        *,
        api_key_env: str = "OPENAI_API_KEY",
        concurrency: int = 16,
        attempts: int = 5,
        backoff: float = 1.0,
        timeout: float = 600.0,
        give_up_after: int = 20,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the server's address must begin with http:// or https://, got {url!r}")
        if concurrency < 1 or attempts < 1:
            raise ValueError("concurrency and attempts must be at least 1")
        self.model, self.url = model, url.rstrip("/")
        self.api_key_env, self.concurrency, self.attempts = api_key_env, concurrency, attempts
        self.backoff, self.timeout, self.give_up_after = backoff, timeout, give_up_after
        self._stop = threading.Event()
        self.stats: dict[str, float] = {"retries": 0}
        self._lock = threading.Lock()

    def render(self, prompt: Prompt) -> str:
        return prompt.text if prompt.messages is None else json.dumps(list(prompt.messages), ensure_ascii=False)

    def settings(self) -> dict[str, Any]:
        return {"backend": self.name, "path": self.model, "url": self.url, "concurrency": self.concurrency}

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Iterator[Generation]:
        self._stop.clear()
        failures_in_a_row = 0
        queue = iter(requests)
        with ThreadPoolExecutor(self.concurrency) as pool:
            running = {pool.submit(self._one, r, params) for _, r in zip(range(self.concurrency), queue, strict=False)}
            try:
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        generation = future.result()
                        failures_in_a_row = failures_in_a_row + 1 if generation.finish_reason == "error" else 0
                        yield generation
                        if failures_in_a_row >= self.give_up_after:
                            raise BackendError(
                                f"{failures_in_a_row} requests in a row failed at {self.url}; the last one: "
                                f"{generation.error}. What was sampled is kept; run the same command to go on"
                            )
                        following = next(queue, None)
                        if following is not None:
                            running.add(pool.submit(self._one, following, params))
            finally:
                self._stop.set()
                for future in running:
                    future.cancel()

    def _one(self, request: SampleRequest, params: SamplingParams) -> Generation:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": request_seed(params.seed, request.problem_id, request.sample),
            "stream": False,
        }
        if params.stop:
            body["stop"] = list(params.stop)
        if params.top_k:
            body["top_k"] = params.top_k
        chat = request.prompt.messages is not None
        if chat:
            body["messages"] = list(request.prompt.messages)
        else:
            body["prompt"] = request.prompt.text
        problem = ""
        for attempt in range(self.attempts):
            if self._stop.is_set():
                problem = problem or "stopped"
                break
            pause = min(60.0, self.backoff * 2**attempt)
            try:
                text, tokens, reason = self._post("/chat/completions" if chat else "/completions", body, chat)
                text = cut_at(text, params.stop)
                return Generation(request.problem_id, request.sample, text, tokens, reason)
            except urllib.error.HTTPError as error:
                detail = _server_message(error)
                problem = f"status {error.code}: {detail}"
                if error.code in (401, 403, 404):
                    raise BackendError(
                        f"{self.url} refuses the request for model {self.model!r}: {problem}"
                    ) from error
                if error.code == 400 and re.search(r"context|too long|maximum.{0,20}length", detail, re.I):
                    return Generation(request.problem_id, request.sample, "", 0, "prompt_too_long", detail)
                if error.code < 500 and error.code not in (408, 409, 429):
                    break
                after = error.headers.get("Retry-After", "") if error.headers else ""
                if after.isdigit():
                    pause = min(120.0, float(after))
            except (urllib.error.URLError, TimeoutError, ConnectionError, OSError) as error:
                problem = f"no answer: {_first_line(getattr(error, 'reason', error))}"
            except _Garbage as error:
                problem = f"garbage: {error}"
            if attempt + 1 < self.attempts:
                with self._lock:
                    self.stats["retries"] += 1
                self._stop.wait(pause)
        return Generation(request.problem_id, request.sample, "", 0, "error", problem)

    def _post(self, route: str, body: dict, chat: bool) -> tuple[str, int, str]:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self.api_key_env)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + route, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            raw = response.read()
        try:
            answer = json.loads(raw)
            choice = answer["choices"][0]
            text = choice["message"]["content"] if chat else choice["text"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise _Garbage(f"{raw[:200]!r}") from error
        if text is None:
            # A reasoning server that spent its budget before the answer says so with a null content.
            text = ""
        if not isinstance(text, str):
            raise _Garbage(f"the text is {type(text).__name__}")
        usage = answer.get("usage") or {}
        tokens = usage.get("completion_tokens")
        reason = "length" if choice.get("finish_reason") == "length" else "stop"
        return text, int(tokens) if tokens is not None else 0, reason


class _Garbage(ValueError):
    pass


def _server_message(error: urllib.error.HTTPError) -> str:
    try:
        raw = error.read().decode(errors="replace")
    except OSError:
        return str(error.reason)
    try:
        parsed = json.loads(raw)
        inner = parsed.get("error", parsed.get("detail", parsed)) if isinstance(parsed, dict) else parsed
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:300]
    except ValueError:
        return raw.strip()[:300] or str(error.reason)


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
