"""`eval`, `compare` and `report` from the command line, on the demo policy and on real labelled samples."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trl_grpo_plus.cli import main as cli
from trl_grpo_plus.demo.policy import load_demo_policy, load_demo_tokenizer
from trl_grpo_plus.demo.problems import make_problems
from trl_grpo_plus.evaluation.backends import BackendError, TransformersBackend
from trl_grpo_plus.evaluation.command import main
from trl_grpo_plus.evaluation.compare_command import main as compare
from trl_grpo_plus.evaluation.datasets import DatasetError, load_problems
from trl_grpo_plus.evaluation.evaluate import split_text
from trl_grpo_plus.evaluation.prompts import PROMPTS, PromptError, load_template
from trl_grpo_plus.evaluation.report_command import main as report
from trl_grpo_plus.evaluation.results import SampleStore


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A directory with the demo model and 12 of its problems."""
    root = tmp_path_factory.mktemp("demo")
    load_demo_policy().save_pretrained(root / "model")
    load_demo_tokenizer().save_pretrained(root / "model")
    rows = make_problems(12, seed=3, split="test")
    (root / "problems.jsonl").write_text(
        "".join(json.dumps({"question": r["prompt"], "answer": r["answer"]}) + "\n" for r in rows)
    )
    return root


def arguments(demo, output, *more):
    common = ["--dataset", str(demo / "problems.jsonl"), "--prompt", "plain", "--max-tokens", "60", "--quiet"]
    return ["--model", str(demo / "model"), *common, "--output", str(output), *more]


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_greedy_evaluation_writes_everything(demo, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli(["eval", *arguments(demo, out)]) == 0
    shown = capsys.readouterr().out
    assert "pass@1 (greedy)" in shown
    assert shown.strip().splitlines()[-1].startswith("Written to")
    results = json.loads((out / "results.json").read_text())
    (summary,) = results["models"].values()
    samples = lines(out / "samples.jsonl")
    assert len(samples) == 12
    assert summary["metrics"]["greedy"]["value"] == sum(s["correct"] for s in samples) / 12
    by_hand = [s["completion"].split("####")[-1].strip() == s["gold"].split("####")[-1].strip() for s in samples]
    assert [s["correct"] for s in samples] == by_hand
    settings = results["settings"]
    assert (settings["seed"], settings["temperature"], settings["prompt"]) == (0, 0.0, {"model": "plain"})
    assert settings["dataset_sha256"] == load_problems(str(demo / "problems.jsonl")).fingerprint
    assert {"transformers", "math-verify", "trl-grpo-plus", "python"} <= set(results["versions"])
    assert lines(out / "prompts.jsonl")[0] == {"problem_id": "0", "prompt": samples[0]["question"]}
    assert "| pass@1 (greedy) |" in (out / "report.md").read_text()
    assert (out / "lengths.png").read_bytes()[:4] == b"\x89PNG"
    page = (out / "samples.html").read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page), "the page must stand alone"
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))
    assert len(data["problems"]) == 12


def test_samples_metrics_steps_and_more_samples_later(demo, tmp_path):
    out = tmp_path / "out"
    base = arguments(demo, out, "--temperature", "1.0", "--prm", "reward_fns.step_arithmetic_reward")
    assert main([*base, "--samples", "2"]) == 0
    two = {(s["problem_id"], s["sample"]): s["completion"] for s in lines(out / "samples.jsonl")}
    assert len(two) == 12 * 3, "two samples and the greedy completion"
    assert main([*base, "--samples", "4"]) == 0
    four = {(s["problem_id"], s["sample"]): s["completion"] for s in lines(out / "samples.jsonl")}
    assert len(four) == 12 * 5
    assert all(four[key] == text for key, text in two.items())
    (summary,) = json.loads((out / "results.json").read_text())["models"].values()
    table = summary["metrics"]
    assert {"greedy", "mean@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4", "maj@4_string"} <= set(table)
    assert {"best@4_prm_min", "vote@4_prm_min"} <= set(table)
    assert table["mean@4"]["value"] == pytest.approx(table["pass@1"]["value"])
    assert table["pass@1"]["value"] <= table["pass@2"]["value"] <= table["pass@4"]["value"]
    assert (out / "curves.png").exists()
    first = lines(out / "samples.jsonl")[0]
    assert "".join(first["steps"]) == first["completion"]
    assert len(first["steps"]) == len(first["step_scores"])


def test_reward_models_from_a_directory_rank_the_samples(demo, tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification

    tokenizer = load_demo_tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    LlamaForTokenClassification(LlamaConfig(num_labels=2, **shape)).save_pretrained(tmp_path / "prm")
    LlamaForSequenceClassification(LlamaConfig(num_labels=1, **shape)).save_pretrained(tmp_path / "orm")
    for name in ("prm", "orm"):
        tokenizer.save_pretrained(tmp_path / name)
    out = tmp_path / "out"
    models = ("--prm", str(tmp_path / "prm"), "--orm", str(tmp_path / "orm"), "--step-aggregation", "product")
    more = ("--limit", "4", "--samples", "2", "--temperature", "1", "--no-plots")
    assert main(arguments(demo, out, *more, *models)) == 0
    (summary,) = json.loads((out / "results.json").read_text())["models"].values()
    assert {"best@2_orm", "vote@2_orm", "best@2_prm_product", "vote@2_prm_product"} <= set(summary["metrics"])
    assert summary["vote_weights"] == {"orm": "none", "prm_product": "none"}
    for row in lines(out / "samples.jsonl"):
        assert len(row["steps"]) == len(row["step_scores"])
        assert all(0 < score < 1 for score in row["step_scores"])
        assert 0 < row["rm_score"] < 1
    missing = arguments(demo, out, *more, "--orm", str(tmp_path / "nothing"))
    assert main(missing) == 2


def test_a_file_cut_anywhere_is_resumed_to_identical_results(demo, tmp_path):
    whole = tmp_path / "whole"
    options = "--limit 6 --samples 2 --temperature 1.0 --no-plots --no-page --batch-size 7"
    sampling = options.split()
    assert main(arguments(demo, whole, *sampling)) == 0
    expected = lines(whole / "samples.jsonl")
    metrics = json.loads((whole / "results.json").read_text())["models"]["model"]["metrics"]
    raw_keys = ("model", "problem_id", "sample", "greedy", "question", "gold", "level", "subject", "completion")
    raw_keys += ("num_tokens", "finish_reason", "error")
    written = [json.dumps({k: r[k] for k in raw_keys}) + "\n" for r in expected]
    rng = random.Random(0)
    for i in range(10):
        out = tmp_path / str(i)
        out.mkdir()
        for name in ("settings.json", "prompts.jsonl"):
            (out / name).write_bytes((whole / name).read_bytes())
        # Samples arrive in any order, and a kill can fall inside a line.
        order = rng.sample(written, len(written))
        text = "".join(order).encode()
        (out / "samples.jsonl").write_bytes(text[: rng.randrange(len(text))])
        assert main(arguments(demo, out, *sampling, "--batch-size", str(rng.randint(1, 20)))) == 0
        assert lines(out / "samples.jsonl") == expected
        assert json.loads((out / "results.json").read_text())["models"]["model"]["metrics"] == metrics


def test_a_cut_line_is_gone_before_the_next_one_is_written(tmp_path):
    """A second kill after a first one: the rest of a cut line must not run into the line that follows it."""
    path = tmp_path / "samples.jsonl"
    record = {"problem_id": "a", "sample": 0, "completion": "x", "finish_reason": "stop"}
    path.write_text(json.dumps(record) + "\n" + json.dumps({**record, "sample": 1})[:-9])
    store = SampleStore(path)
    assert list(store.records) == [("a", 0)]
    store.append({**record, "sample": 1})
    assert list(SampleStore(path).records) == [("a", 0), ("a", 1)]
    path.write_text('{"problem_id": "a"}\n')
    with pytest.raises(DatasetError, match=r"samples\.jsonl:1 is not a sample"):
        SampleStore(path)


@pytest.mark.slow
def test_killed_at_ten_random_moments_and_resumed(demo, tmp_path):
    """SIGKILL to a real process whenever a random number of samples has been written."""
    sampling = ("--samples", "4", "--temperature", "1.0", "--no-plots", "--no-page", "--batch-size", "4")
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(arguments(demo, whole, *sampling)) == 0
    command = [sys.executable, "-m", "trl_grpo_plus.cli", "eval", *arguments(demo, out, *sampling)]
    rng = random.Random(1)
    targets = sorted(rng.sample(range(1, 59), 10))
    kills = 0
    for target in targets:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            have = (out / "samples.jsonl").read_bytes().count(b"\n") if (out / "samples.jsonl").exists() else 0
            if have >= target:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                break
            time.sleep(0.001)
    assert kills >= 5
    assert main(arguments(demo, out, *sampling)) == 0
    assert lines(out / "samples.jsonl") == lines(whole / "samples.jsonl")


def test_interrupted_by_a_failing_backend_and_resumed(demo, tmp_path, monkeypatch, capsys):
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert main(arguments(demo, whole)) == 0
    original = TransformersBackend.sample

    def breaks(self, requests, params):
        for i, g in enumerate(original(self, requests, params)):
            if i == 5:
                raise BackendError("the machine is on fire")
            yield g

    monkeypatch.setattr(TransformersBackend, "sample", breaks)
    assert main(arguments(demo, out)) == 1
    assert "on fire" in capsys.readouterr().err
    assert len(lines(out / "samples.jsonl")) == 5
    monkeypatch.setattr(TransformersBackend, "sample", original)
    assert main(arguments(demo, out)) == 0
    assert lines(out / "samples.jsonl") == lines(whole / "samples.jsonl")


def test_other_settings_are_not_mixed_into_the_same_directory(demo, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(arguments(demo, out)) == 0
    before = (out / "samples.jsonl").read_bytes()
    assert main(arguments(demo, out, "--max-tokens", "50")) == 2
    error = capsys.readouterr().err
    assert "max_tokens: 60 there, 50 now" in error
    assert "--overwrite" in error
    assert (out / "samples.jsonl").read_bytes() == before
    assert main(arguments(demo, out, "--max-tokens", "50", "--overwrite")) == 0
    changed = demo / "changed.jsonl"
    changed.write_text((demo / "problems.jsonl").read_text().replace("has", "had", 1))
    args = arguments(demo, out, "--max-tokens", "50")
    args[args.index(str(demo / "problems.jsonl"))] = str(changed)
    assert main(args) == 2
    assert "another prompt for problem '0'" in capsys.readouterr().err


def test_a_model_that_never_stops_is_counted(demo, tmp_path):
    out = tmp_path / "out"
    assert main(arguments(demo, out, "--max-tokens", "4", "--no-plots")) == 0
    summary = json.loads((out / "results.json").read_text())["models"]["model"]
    assert summary["rates"]["truncated"] == 1.0
    assert summary["metrics"]["greedy"]["value"] == 0.0
    assert "| truncated, % | 100.0 |" in (out / "report.md").read_text()


def test_a_prompt_longer_than_the_context_is_counted(demo, tmp_path):
    rows = lines(demo / "problems.jsonl")[:2]
    rows[1]["question"] = "Tom has 9 . " * 200
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    args = arguments(demo, tmp_path / "out", "--no-plots")
    args[args.index(str(demo / "problems.jsonl"))] = str(file)
    assert main(args) == 0
    samples = lines(tmp_path / "out" / "samples.jsonl")
    assert [s["finish_reason"] for s in samples] == ["stop", "prompt_too_long"]
    summary = json.loads((tmp_path / "out" / "results.json").read_text())["models"]["model"]
    assert summary["rates"]["prompt_too_long"] == 0.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"question": "x"}\n', "no gold answer"),
        ('{"answer": "x"}\n', "no question"),
        ('{"question": "x", "answer": ""}\n', "'answer' is empty"),
        ('{"question": "x", "answer": "1"}\n{"question": \n', "file.jsonl:2 is not JSON"),
        ("[1]\n", "not a JSON object"),
        ('{"id": 1, "question": "x", "answer": "1"}\n{"id": 1, "question": "y", "answer": "1"}\n', "same id '1'"),
    ],
)
def test_bad_data_is_named(demo, tmp_path, capsys, content, message):
    file = tmp_path / "file.jsonl"
    file.write_text(content)
    args = arguments(demo, tmp_path / "out")
    args[args.index(str(demo / "problems.jsonl"))] = str(file)
    assert main(args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--prompt", "chat"), "no chat template"),
        (("--prompt", "nonsense"), "nonsense"),
        (("--grader", "nonsense"), "mode"),
        (("--samples", "4", "--temperature", "0"), "temperature 0"),
        (("--backend", "server"), "--server-url"),
        (("--limit", "0"), "limit"),
        (("--samples", "2", "--k", "3"), "--k 3"),
        (("--fewshot-file", "x"), "gsm8k-5shot"),
        (("--prm", "reward_fns.nothing_like_it"), "cannot import"),
    ],
)
def test_wrong_usage_is_one_clear_line(demo, tmp_path, capsys, more, message):
    assert main(arguments(demo, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_two_models_side_by_side_and_compared(demo, tmp_path, capsys):
    out = tmp_path / "out"
    import torch
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(demo / "model")
    with torch.no_grad():
        # A model that always stops at once: every problem that the first one solves is lost.
        other.get_output_embeddings().weight.zero_()
    other.config.tie_word_embeddings = True
    other.save_pretrained(tmp_path / "broken")
    load_demo_tokenizer().save_pretrained(tmp_path / "broken")
    args = arguments(demo, out, "--no-plots")
    args[1:2] = [str(demo / "model"), str(tmp_path / "broken")]
    assert main(args) == 0
    results = json.loads((out / "results.json").read_text())
    assert list(results["models"]) == ["model", "broken"]
    assert (out / "broken" / "results.json").exists()
    right = results["models"]["model"]["metrics"]["greedy"]["value"]
    assert right > 0
    capsys.readouterr()
    assert compare([str(out), "--output", str(tmp_path / "cmp.json")]) == 0
    assert "broken against model" in capsys.readouterr().out
    (pair,) = json.loads((tmp_path / "cmp.json").read_text())
    test = pair["tests"]["greedy"]
    assert (test["method"], test["gained"], test["lost"]) == ("mcnemar", 0, round(12 * right))
    assert test["difference"] == pytest.approx(-right)
    assert len(pair["changed"]["lost"]) == round(12 * right)
    # The same through two directories.
    assert compare([str(out / "model"), str(out / "broken"), "--metric", "greedy"]) == 0


def test_compare_refuses_what_it_cannot_compare(tmp_path, capsys):
    assert compare([str(tmp_path)]) == 2
    assert "no results.json" in capsys.readouterr().err
    (tmp_path / "results.json").write_text("{}")
    assert compare([str(tmp_path)]) == 2
    assert "is not a results.json" in capsys.readouterr().err


def test_published_math_samples_give_the_published_metrics(shared_data, tmp_path, capsys):
    file = shared_data("model_outputs/math_qwen25_samples_100x8.jsonl")
    out = tmp_path / "out"
    assert main(["--samples-file", str(file), "--grader", "qwen25_math", "--output", str(out), "--no-plots"]) == 0
    (summary,) = json.loads((out / "results.json").read_text())["models"].values()
    got = {k: round(100 * v["value"], 1) for k, v in summary["metrics"].items()}
    assert [got[f"pass@{k}"] for k in (1, 2, 4, 8)] == [91.0, 93.3, 95.1, 96.0]
    assert (got["maj@8"], got["maj@8_string"]) == (92.5, 93.0)
    assert got["best@8_orm"] == 94.0
    assert "vote@8_orm" in got
    assert summary["file_verdicts"] == {"agree": 800, "of": 800, "accuracy": 0.91}
    # The file's own verdicts say the same.
    assert main(["--samples-file", str(file), "--keep-verdicts", "--output", str(out), "--no-plots"]) == 0
    (summary,) = json.loads((out / "results.json").read_text())["models"].values()
    kept = {k: round(100 * v["value"], 1) for k, v in summary["metrics"].items()}
    assert [kept[f"pass@{k}"] for k in (1, 2, 4, 8)] == [91.0, 93.3, 95.1, 96.0]
    assert (kept["maj@8"], kept["maj@8_string"]) == (92.5, 93.0)


def test_openai_gsm8k_solutions_give_the_published_accuracies(shared_data, tmp_path):
    file = shared_data("model_outputs/gsm8k_openai_solutions.jsonl")
    out = tmp_path / "out"
    args = ["--samples-file", str(file), "--dataset", str(shared_data("gsm8k/test.jsonl")), "--output", str(out)]
    assert main([*args, "--no-plots", "--no-page"]) == 0
    models = json.loads((out / "results.json").read_text())["models"]
    got = {name: round(s["metrics"]["mean@1"]["value"] * 1319) for name, s in models.items()}
    assert got == {"6b_finetuning": 286, "6b_verification": 515, "175b_finetuning": 458, "175b_verification": 742}
    for s in models.values():
        assert s["file_verdicts"]["agree"] == s["file_verdicts"]["of"] == 1319


def test_samples_file_without_what_it_needs(tmp_path, capsys):
    file = tmp_path / "s.jsonl"
    for row, message in (
        ({"id": 1, "gold": "2"}, "no completion"),
        ({"id": 1, "completion": "2"}, "no gold answer"),
        ({"gold": "1", "completion": "2"}, "neither an id nor a question"),
    ):
        file.write_text(json.dumps(row) + "\n")
        assert main(["--samples-file", str(file), "--output", str(tmp_path / "o")]) == 2
        assert message in capsys.readouterr().err
    row = {"id": 1, "gold": "2", "completion": "#### 2"}
    file.write_text(2 * (json.dumps({**row, "sample": 0}) + "\n"))
    assert main(["--samples-file", str(file), "--output", str(tmp_path / "o")]) == 2
    assert "appears twice" in capsys.readouterr().err
    file.write_text(json.dumps(row) + "\n")
    assert main(["--samples-file", str(file), "--keep-verdicts", "--output", str(tmp_path / "o")]) == 2
    assert "no verdict" in capsys.readouterr().err


def test_page_survives_hostile_text(tmp_path):
    row = {"id": "</script><script>alert(1)</script>", "question": "<b>&", "gold": "2"}
    row["completion"] = "</script><!-- \u2028 <img src=x onerror=alert(1)> #### 2"
    file = tmp_path / "s.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert main(["--samples-file", str(file), "--output", str(tmp_path / "o"), "--no-plots"]) == 0
    page = (tmp_path / "o" / "samples.html").read_text()
    assert page.count("</script>") == 2, "the two of the page itself"
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))
    assert data["problems"][0]["s"]["s"][0]["c"] == row["completion"]


def test_named_prompts():
    p = PROMPTS["chat"].render("What is 1+1?")
    assert p.messages == (
        {
            "role": "user",
            "content": "What is 1+1?\nPlease reason step by step, and put your final answer within \\boxed{}.",
        },
    )
    text = PROMPTS["gsm8k-8shot"].render("Hi {{ x }}?").text
    assert text.startswith("Q: There are 15 trees in the grove.")
    assert text.endswith("The answer is 8.\n\nQ: Hi {{ x }}?\nA:"), "a question is data, never a template"
    assert text.count("Q: ") == 9
    text = PROMPTS["math-4shot"].render("Find $x$.").text
    assert text.endswith("I hope it is correct.\n\nProblem:\nFind $x$.\n\nSolution:")
    assert text.count("Problem:\n") == 5


def test_template_choice_and_files(tmp_path):
    def load(name, **options):
        return load_template(name, **{"kind": "gsm8k", "has_chat_template": False, **options})

    assert load("auto").name == "gsm8k-8shot"
    assert load("auto", kind="math").name == "math-4shot"
    assert load("auto", has_chat_template=True).name == "chat"
    own = tmp_path / "mine.txt"
    own.write_text("Solve: {{ question }}\n=>")
    assert load(str(own)).render("1+1").text == "Solve: 1+1\n=>"
    own.write_text("no place for it")
    with pytest.raises(PromptError, match="has no"):
        load(str(own))
    chat = tmp_path / "mine.json"
    turns = [("system", "S"), ("user", "1?"), ("assistant", "1."), ("user", "{{ question }}!")]
    chat.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns], "stop": ["X"]}))
    template = load(str(chat), has_chat_template=True)
    assert [m["content"] for m in template.render("2?").messages] == ["S", "1?", "1.", "2?!"]
    assert template.stop == ("X",)
    rows = [{"question": f"q{i}", "answer": f"a{i} #### {i}"} for i in range(6)]
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = load("gsm8k-5shot", fewshot_file=str(few)).render("Q?").text
    assert text.startswith("Question: q0\nAnswer: a0 #### 0\n\nQuestion: q1")
    assert text.endswith("Question: q4\nAnswer: a4 #### 4\n\nQuestion: Q?\nAnswer:")
    few.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(PromptError, match="needs 5"):
        load("gsm8k-5shot", fewshot_file=str(few))


def test_data_set_files_and_columns(tmp_path):
    import pandas as pd

    frame = pd.DataFrame(
        {"problem": ["p", "q"], "answer": ["1", "\\frac{1}{2}"], "level": [3, 5], "type": ["Algebra"] * 2}
    )
    frame.to_parquet(tmp_path / "d.parquet")
    frame.to_csv(tmp_path / "d.csv", index=False)
    frame.to_json(tmp_path / "d.json", orient="records")
    sets = [load_problems(str(tmp_path / f"d.{kind}")) for kind in ("parquet", "csv", "json")]
    for s in sets:
        assert s.kind == "math"
        assert [(p.question, p.gold, p.level, p.subject) for p in s.problems][1] == (
            "q",
            "\\frac{1}{2}",
            "Level 5",
            "Algebra",
        )
    assert len({s.fingerprint for s in sets}) == 1
    assert len(load_problems(str(tmp_path / "d.csv"), limit=1)) == 1
    with pytest.raises(DatasetError, match="no column 'nope', but problem"):
        load_problems(str(tmp_path / "d.csv"), question_column="nope")
    with pytest.raises(DatasetError, match="does not exist"):
        load_problems(str(tmp_path / "missing.jsonl"))
    with pytest.raises(DatasetError, match="cannot load data set 'no/such'"):
        load_problems("no/such")


def test_steps_of_a_text_join_to_the_text():
    for text in ("a\nb\n\nc", "\n\na\n", "", "one line", "a\n \nb\n\n"):
        assert "".join(split_text(text)) == text
    assert split_text("a\n\nb") == ["a\n\n", "b"]


def test_report_of_a_training_run(tmp_path, capsys):
    import numpy as np
    import pandas as pd

    run = tmp_path / "run"
    (run / "checkpoint-2").mkdir(parents=True)
    (run / "completions").mkdir()
    history = [
        {"step": s, "reward": 0.1 * s, "rewards/f/mean": 0.2, "kl": float("nan"), "entropy": 1.0, "my/metric": 3.0}
        for s in (1, 2)
    ]
    history.append({"step": 2, "reward": 0.9, "train_runtime": 5.0})
    (run / "checkpoint-2" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    for s in (1, 2):
        pd.DataFrame(
            {
                "step": [s] * 3,
                "prompt": [[{"role": "user", "content": "q"}]] * 3,
                "completion": ["1 = 1\n2 = 3"] * 3,
                "f": [1.0, None, float("nan")],
                "prm/steps": [np.array([1.0, np.nan])] * 3,
                "advantage": [0.5] * 3,
            }
        ).to_parquet(run / "completions" / f"completions_{s:05d}.parquet")
    assert report([str(run), "--completions", "2"]) == 0
    assert "4 completions of 2 of 2 steps" in capsys.readouterr().out
    assert (run / "report" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    page = (run / "report" / "report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))
    panels = {p["title"]: p["series"] for p in data["panels"]}
    assert set(panels) == {"Reward", "Reward by function", "Entropy", "my"}
    assert panels["Reward"][0]["points"] == [[1.0, 0.1], [2.0, 0.9]]
    row = data["completions"][0]["rows"][0]
    assert (row["prompt"], row["steps"]["prm/steps"], row["values"]["f"]) == ("user: q", [1.0, None], 1.0)


def test_report_of_no_run(tmp_path, capsys):
    assert report([str(tmp_path / "none")]) == 2
    assert "no directory" in capsys.readouterr().err
    assert report([str(tmp_path)]) == 2
    assert "no trainer_state.json" in capsys.readouterr().err
    (tmp_path / "trainer_state.json").write_text('{"log_history": []}')
    assert report([str(tmp_path)]) == 2
    assert "no logged metrics" in capsys.readouterr().err
