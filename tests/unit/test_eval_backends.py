"""The server backend against a real HTTP server, and `transformers serve` where it is installed; loading of models."""

import json
import subprocess
import sys
import threading
import time
import types
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trl_grpo_plus.demo.policy import WEIGHTS_DIR, load_demo_policy, load_demo_tokenizer
from trl_grpo_plus.demo.problems import make_problems
from trl_grpo_plus.evaluation.backends import (
    BackendError,
    SampleRequest,
    ServerBackend,
    TransformersBackend,
    VLLMBackend,
    resolve_model,
)
from trl_grpo_plus.evaluation.prompts import Prompt
from trl_grpo_plus.evaluation.sampling import SamplingParams


class Server:
    """An HTTP server on loopback that answers each request with the next scripted response, the last one for ever.

    A response is (status, body as bytes or JSON-able, headers); "hang" answers after the client has gone.
    """

    def __init__(self, *script):
        self.script, self.requests = list(script), []
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append((self.path, body, dict(self.headers)))
                    step = outer.script.pop(0) if len(outer.script) > 1 else outer.script[0]
                if step == "hang":
                    time.sleep(1.5)
                    return
                if callable(step):
                    step = step(self.path, body)
                status, content, headers = (*step, {})[:3]
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def echo(path, body):
    """The answer names the question, so that a mix-up of requests shows."""
    text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    message = {"message": {"content": f"answer to {text}"}} if "messages" in body else {"text": f"answer to {text}"}
    return 200, {"choices": [{**message, "finish_reason": "stop"}], "usage": {"completion_tokens": 7}}


def requests(count, chat=True):
    def prompt(i):
        return Prompt(messages=({"role": "user", "content": f"q{i}"},)) if chat else Prompt(text=f"q{i}")

    return [SampleRequest(str(i), 0, prompt(i)) for i in range(count)]


def run(server, reqs, params=None, **options):
    backend = ServerBackend("m", server.url, **{"backoff": 0.01, **options})
    return {g.problem_id: g for g in backend.sample(reqs, params or SamplingParams(max_tokens=9))}, backend


@pytest.mark.parametrize("chat", [True, False])
def test_each_answer_goes_to_its_question(chat):
    with Server(echo) as server:
        got, _ = run(server, requests(40, chat), SamplingParams(max_tokens=9, temperature=0.5, seed=1, stop=("STOP",)))
    assert {k: g.text for k, g in got.items()} == {str(i): f"answer to q{i}" for i in range(40)}
    assert {g.num_tokens for g in got.values()} == {7}
    path, body, _ = server.requests[0]
    assert path == ("/v1/chat/completions" if chat else "/v1/completions")
    assert (body["max_tokens"], body["temperature"], body["stop"], body["model"]) == (9, 0.5, ["STOP"], "m")
    assert len({b["seed"] for _, b, _ in server.requests}) == 40, "each sample has its own seed"


@pytest.mark.parametrize(
    "trouble",
    [
        (500, {"error": {"message": "oops"}}),
        (503, b"<html>busy</html>"),
        (429, {"error": "slow down"}, {"Retry-After": "0"}),
        (200, b"this is not JSON"),
        (200, {"choices": []}),
        (200, {"unexpected": 1}),
        (200, b""),
        "hang",
    ],
)
def test_passing_trouble_is_tried_again(trouble):
    with Server(trouble, trouble, echo) as server:
        got, backend = run(server, requests(1), timeout=0.5)
    assert got["0"].text == "answer to q0"
    assert backend.stats["retries"] == 2
    assert len(server.requests) == 3


def test_lasting_trouble_is_reported_and_the_others_go_on():
    def answer(path, body):
        if body["messages"][-1]["content"] in ("q3", "q5"):
            return 200, b"\x00garbage"
        return echo(path, body)

    with Server(answer) as server:
        got, _ = run(server, requests(8), attempts=2)
    assert {k for k, g in got.items() if g.finish_reason == "error"} == {"3", "5"}
    assert "garbage" in got["3"].error
    assert len(got) == 8


def test_a_server_that_has_gone_ends_the_evaluation():
    with Server(echo) as server:
        url = server.url
    backend = ServerBackend("m", url, backoff=0.01, attempts=2, give_up_after=5, concurrency=2)
    seen = []
    with pytest.raises(BackendError, match="5 requests in a row failed"):
        for g in backend.sample(requests(50), SamplingParams()):
            seen.append(g)
    assert len(seen) == 5


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_that_no_second_try_can_mend_stops_at_once(status):
    with (
        Server((status, {"error": {"message": "no such model"}})) as server,
        pytest.raises(BackendError, match="no such"),
    ):
        run(server, requests(3), concurrency=1)
    assert len(server.requests) == 1


def test_too_long_a_prompt_is_told_from_other_bad_requests():
    with Server((400, {"error": {"message": "maximum context length is 4096 tokens"}})) as server:
        got, _ = run(server, requests(1))
    assert got["0"].finish_reason == "prompt_too_long"
    with Server((400, {"error": {"message": "seed is not supported"}})) as server:
        got, _ = run(server, requests(1))
    assert (got["0"].finish_reason, len(server.requests)) == ("error", 1)
    assert "seed is not supported" in got["0"].error


def test_truncation_empty_content_and_key(monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    cut = {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}
    with Server((200, cut)) as server:
        got, _ = run(server, requests(1), api_key_env="MY_KEY")
    assert (got["0"].text, got["0"].finish_reason) == ("", "length")
    assert server.requests[0][2]["Authorization"] == "Bearer sesame"


def test_bad_addresses_are_refused():
    with pytest.raises(ValueError, match="http://"):
        ServerBackend("m", "localhost:8000")


def test_resolve_model_takes_the_last_checkpoint(tmp_path):
    for n in (2, 10, 9):
        (tmp_path / f"checkpoint-{n}").mkdir()
    assert resolve_model(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BackendError, match="checkpoint-N"):
        resolve_model(str(tmp_path / "empty"))
    assert resolve_model("org/name") == "org/name"
    with pytest.raises(BackendError, match="cannot load"):
        TransformersBackend(str(tmp_path))


def test_adapter_directory_is_merged_into_its_base(tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model

    base = tmp_path / "base"
    load_demo_policy().save_pretrained(base)
    load_demo_tokenizer().save_pretrained(base)
    from transformers import AutoModelForCausalLM

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.5)
    model.save_pretrained(tmp_path / "adapter")
    loaded = TransformersBackend(str(tmp_path / "adapter"))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    assert loaded.tokenizer.eos_token_id == load_demo_tokenizer().eos_token_id


def test_vllm_backend_speaks_vllms_interface(monkeypatch):
    """vLLM needs a GPU; here a stand-in module checks what it is called with and how its outputs are read."""
    calls = {}

    class LLM:
        def __init__(self, **options):
            calls["options"] = options
            config = types.SimpleNamespace(max_model_len=20)
            self.llm_engine = types.SimpleNamespace(model_config=config)

        def generate(self, prompts, params, use_tqdm, **kwargs):
            calls["prompts"], calls["params"] = prompts, params
            text = [types.SimpleNamespace(text=f"t{i}", token_ids=[1, 2], finish_reason="length") for i in range(99)]
            return [types.SimpleNamespace(outputs=[text[i]]) for i in range(len(prompts))]

    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, lambda **k: types.SimpleNamespace(**k)
    monkeypatch.setitem(sys.modules, "vllm", module)
    backend = VLLMBackend(str(WEIGHTS_DIR), tensor_parallel_size=2)
    prompts = [Prompt(text="Tom has 9"), Prompt(text="Tom has 9 . " * 10)]
    reqs = [SampleRequest(str(i), 0, p) for i, p in enumerate(prompts)]
    got = {g.problem_id: g for g in backend.sample(reqs, SamplingParams(max_tokens=100, temperature=0.7, seed=3))}
    assert calls["options"]["tensor_parallel_size"] == 2
    assert got["1"].finish_reason == "prompt_too_long"
    assert (got["0"].text, got["0"].num_tokens, got["0"].finish_reason) == ("t0", 2, "length")
    (params,) = calls["params"]
    assert params.max_tokens == 20 - len(calls["prompts"][0]["prompt_token_ids"])
    assert params.top_k == -1
    assert isinstance(params.seed, int)


def test_vllm_missing_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(BackendError, match=r"trl-grpo-plus\[vllm\]"):
        VLLMBackend(str(WEIGHTS_DIR))


@pytest.mark.slow
def test_transformers_serve_gives_the_greedy_completions_of_the_model(tmp_path):
    """A real OpenAI-compatible server on loopback, chat and text, against the model in this process."""
    pytest.importorskip("fastapi", reason="pip install transformers[serving]")
    pytest.importorskip("uvicorn", reason="pip install transformers[serving]")
    pytest.importorskip("openai", reason="pip install transformers[serving]")
    tokenizer = load_demo_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    place = tmp_path / "model"
    load_demo_policy().save_pretrained(place)
    tokenizer.save_pretrained(place)
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = "import sys; from transformers.cli.transformers import main; main()"
    arguments = [
        "serve",
        str(place),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", command, *arguments], stdout=(tmp_path / "log").open("w"), stderr=subprocess.STDOUT
    )
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.5)
        problems = make_problems(4, seed=5, split="test")["prompt"]
        local = TransformersBackend(str(place))
        remote = ServerBackend(str(place), f"http://127.0.0.1:{port}/v1", concurrency=2, attempts=2)
        for chat in (True, False):
            reqs = [
                SampleRequest(
                    str(i),
                    0,
                    Prompt(messages=({"role": "user", "content": q.strip()},)) if chat else Prompt(text=q),
                )
                for i, q in enumerate(problems)
            ]
            params = SamplingParams(max_tokens=60)
            here = {g.problem_id: g for g in local.sample(reqs, params)}
            there = {g.problem_id: g for g in remote.sample(reqs, params)}
            assert {k: (g.text, g.finish_reason) for k, g in there.items()} == {
                k: (g.text, g.finish_reason) for k, g in here.items()
            }, (tmp_path / "log").read_text()[-3000:]
    finally:
        process.terminate()
        process.wait(30)
