"""`label`, `train-prm` and `score`: what they write and print, and one clear line for each mistake."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch
from datasets import Dataset, load_dataset
from transformers import LlamaConfig, LlamaForTokenClassification

from trl_grpo_plus.cli import main
from trl_grpo_plus.demo import load_demo_policy, load_demo_tokenizer, make_problems
from trl_grpo_plus.reward_models import ProcessRewardModel, ScoredStep
from trl_grpo_plus.reward_models.html import render_scores
from trl_grpo_plus.reward_models.train_prm_command import split_by_prompt

PROMPT = "Tom has 5 apples. He buys 3 more. He loses 6. How many apples does Tom have now?\n"


@pytest.fixture(scope="module")
def prm_path(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("tiny-prm"), load_demo_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=2,
        initializer_range=0.5,
        max_position_embeddings=256,
    )
    LlamaForTokenClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    load_demo_policy().save_pretrained(path)
    load_demo_tokenizer().save_pretrained(path)
    return path


def stepwise(count=12):
    rows = []
    for row in make_problems(count, 0):
        steps = [*row["solution_steps"], row["answer"].splitlines()[-1]]
        rows.append({"prompt": row["prompt"], "completions": steps, "labels": [j % 2 == 0 for j in range(len(steps))]})
    return rows


def test_score_one(prm_path, tmp_path, capsys):
    page = tmp_path / "page" / "scores.html"
    completion = "5 + 3 = 8\n8 - 6 = 2\n#### 2"
    arguments = ["score", str(prm_path), "--prompt", PROMPT, "--completion", completion, "--html", str(page)]
    assert main([*arguments, "--device", "cpu"]) == 0
    expected = ProcessRewardModel.from_pretrained(prm_path).score([PROMPT], [completion])[0]
    out = capsys.readouterr().out
    for step in expected:
        assert re.search(rf"{step.score:.3f} .*{re.escape(step.text.strip())}", out)
        assert f"{step.score:.3f}" in page.read_text()
    assert out.strip().splitlines()[-1].startswith("Next: ")


def test_score_a_file_with_labels(prm_path, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in stepwise()))
    assert main(["score", str(prm_path), "--input", str(path), "--limit", "7", "--no-html", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "... and 2 more" in out
    assert re.search(r"auc\W+0\.\d{3}", out)
    assert not list(tmp_path.glob("*.html"))


class Texts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.texts, self.styles = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "li":
            self.styles.append(dict(attributes))

    def handle_data(self, data):
        self.texts.append(data)


def test_page_shows_scores_and_escapes_text():
    steps = [
        ScoredStep("<script>alert(1)</script> & 2 < 3\n", 0.8),
        ScoredStep("next", 0.25),
        ScoredStep("later", 0.1),
        ScoredStep("cut", None),
    ]
    page = render_scores(["1 < 2?"], [steps], "A & B")
    parser = Texts()
    parser.feed(page)
    assert "script" not in parser.tags
    text = "".join(parser.texts)
    assert "<script>alert(1)</script> & 2 < 3" in text
    assert "1 < 2?" in text and "A & B" in text
    assert [style.get("style") for style in parser.styles] == ["--hue: 96", "--hue: 30", "--hue: 12", None]
    assert [style.get("class") for style in parser.styles] == [None, "first-below", None, "unscored"]
    assert "4 steps, lowest 0.100, product 0.020, first below the threshold: step 2" in text
    assert "http" not in page


def test_label_then_train_then_score(policy_path, tmp_path, capsys):
    problems, labels, model = tmp_path / "problems.jsonl", tmp_path / "labels.parquet", tmp_path / "prm"
    make_problems(8, 0).to_json(problems)
    label = ["label", "--model", str(policy_path), "--dataset", str(problems), "--output", str(labels)]
    label += ["--samples", "2", "--rollouts", "2", "--max-new-tokens", "48", "--temperature", "1.0", "--label", "soft"]
    assert main(label) == 0
    rows = load_dataset("parquet", data_files=str(labels), split="train")
    assert len(rows) == 16
    assert {label for row in rows["labels"] for label in row} <= {0.0, 0.5, 1.0}
    out = capsys.readouterr().out
    assert re.search(r"steps of 16 completions, [\d.]+ % right, \d+ roll-outs", out)
    assert f"Next: trl-grpo-plus train-prm CONFIG.yaml --dataset {labels}" in out

    config = tmp_path / "prm.yaml"
    config.write_text(
        f"model_name_or_path: {policy_path}\noutput_dir: {model}\neval_fraction: 0.3\nmax_steps: 2\nuse_cpu: true\n"
        "bf16: false\nreport_to: []\ngradient_checkpointing: false\nsave_strategy: 'no'\ndisable_tqdm: true\n"
    )
    assert main(["train-prm", str(config), "--dataset", str(labels), "--learning_rate", "1e-3"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"auc\W+(0\.|1\.|nan)", out)
    assert out.strip().splitlines()[-1] == f"Next: train a policy with it, process_reward_funcs: [{model}]"
    assert main(["score", str(model), "--input", str(labels), "--no-html", "--device", "cpu"]) == 0


def test_completions_of_a_prompt_stay_on_one_side():
    data = Dataset.from_list([{"prompt": f"p{i % 40}", "completions": [], "labels": []} for i in range(200)])
    train, held_out = split_by_prompt(data, 0.25, seed=0)
    assert not set(train["prompt"]) & set(held_out["prompt"])
    assert len(train) + len(held_out) == 200
    assert 20 <= len(held_out) <= 80
    assert split_by_prompt(data, 0.25, seed=0)[1]["prompt"][:] == held_out["prompt"][:]
    assert split_by_prompt(data, 0.25, seed=1)[1]["prompt"][:] != held_out["prompt"][:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "PRM"], "give either --prompt and --completion, or --input FILE"),
        (["score", "PRM", "--prompt", "q"], "--prompt and --completion belong together"),
        (["score", "PRM", "--input", "none.jsonl"], "the file none.jsonl does not exist"),
        (
            ["score", "PRM", "--prompt", "q", "--completion", "a", "--delimiter", "("],
            "the step delimiter '(' is neither",
        ),
        (["score", "NOWHERE", "--prompt", "q", "--completion", "a"], "NOWHERE"),
        (["score", "PRM", "--prompt", "q", "--completion", "a", "--format", "qwen"], "no tensor under 'score.0.'"),
        (["score", "PRM", "--format", "x"], "invalid choice: 'x'"),
        (["label", "--model", "m", "--dataset", "d", "--output", "o.json"], "must be a .parquet file"),
        (["label", "--model", "m", "--dataset", "PROBLEMS", "--output", "o.parquet"], "no completions but"),
        (
            ["label", "--model", "m", "--dataset", "ROWS", "--samples", "2", "--output", "o.parquet"],
            "completions already",
        ),
        (
            ["label", "--model", "m", "--dataset", "d", "--output", "o.parquet", "--rollouts", "0"],
            "at least 1, got '0'",
        ),
        (["train-prm", "CONFIG"], "dataset is not set"),
        (["train-prm", "CONFIG", "--dataset", "none.parquet"], "the file none.parquet does not exist"),
        (["train-prm", "CONFIG", "--dataset", "ROWS", "--eval_fraction", "1.5"], "eval_fraction must be at least 0"),
        (["train-prm", "CONFIG", "--dataset", "PROBLEMS"], "no column 'completions'"),
        (["train-prm", "CONFIG", "--nonsense", "1"], "nonsense"),
        (["train-prm", "none.yaml"], "none.yaml"),
    ],
)
def test_mistakes_get_one_line(arguments, message, prm_path, policy_path, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_problems(2, 0).to_json("problems.jsonl")
    Dataset.from_list(stepwise(2)).to_json("rows.jsonl")
    (tmp_path / "config.yaml").write_text(
        f"model_name_or_path: {policy_path}\noutput_dir: out\nuse_cpu: true\nbf16: false\nreport_to: []\n"
    )
    places = {"PRM": str(prm_path), "NOWHERE": str(tmp_path / "nowhere"), "PROBLEMS": "problems.jsonl"}
    places |= {"ROWS": "rows.jsonl", "CONFIG": "config.yaml"}
    assert main([places.get(argument, argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    line = captured.err.strip().splitlines()[-1]
    assert line.startswith(f"trl-grpo-plus {arguments[0]}: ")
    assert message.lower() in line.lower()
    assert "Traceback" not in captured.err
