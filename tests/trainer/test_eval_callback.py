"""EvalCallback in real training with stock TRL: logs, best checkpoint, resume, and no trace on training itself."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_plus import EvalCallback
from trl_grpo_plus.demo.policy import build_policy, load_demo_policy, load_demo_tokenizer
from trl_grpo_plus.demo.problems import make_problems


def count_ones(completions, **kwargs):
    return [float(c.count("1")) for c in completions]


def make_trainer(output_dir, model=None, **config):
    config = {"max_steps": 4, "save_strategy": "no", "learning_rate": 1e-3, "seed": 1, **config}
    args = GRPOConfig(
        output_dir=str(output_dir),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        bf16=False,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        **config,
    )
    tokenizer = load_demo_tokenizer()
    return GRPOTrainer(
        model=model or build_policy(tokenizer),
        reward_funcs=count_ones,
        args=args,
        train_dataset=make_problems(16, seed=0),
        processing_class=tokenizer,
    )


def callback(trainer, **kwargs):
    defaults = {"every_steps": 2, "max_tokens": 40, "prompt": "plain", "batch_size": 4}
    return EvalCallback(trainer, make_problems(6, seed=1, split="test"), **{**defaults, **kwargs})


def test_pass_at_1_is_logged_and_equals_the_demo_policy_graded_by_hand(tmp_path):
    trainer = make_trainer(tmp_path, model=load_demo_policy(), max_steps=3, learning_rate=0.0)
    problems = make_problems(12, seed=1, split="test")
    cb = EvalCallback(trainer, problems, every_steps=2, max_tokens=80, prompt="plain")
    trainer.add_callback(cb)
    trainer.train()
    logged = {e["step"]: e["eval_math/pass@1"] for e in trainer.state.log_history if "eval_math/pass@1" in e}
    assert sorted(logged) == [0, 2, 3]
    entries = {e["step"]: e for e in trainer.state.log_history if "eval_math/pass@1" in e}
    assert not any(key.startswith("reward") for e in entries.values() for key in e), "training metrics stay together"
    assert [e["step"] for e in trainer.state.log_history if "reward" in e] == [1, 2, 3], "no training entry is lost"

    tokenizer, hits = load_demo_tokenizer(), 0
    for row in problems:
        ids = tokenizer(row["prompt"], return_tensors="pt")
        out = trainer.model.generate(**ids, max_new_tokens=80, do_sample=False)[0, ids["input_ids"].shape[1] :]
        text = tokenizer.decode(out, skip_special_tokens=True)
        hits += text.split("####")[-1].strip() == row["answer"].split("####")[-1].strip()
    assert hits > 0
    assert logged == dict.fromkeys((0, 2, 3), hits / 12)
    rows = [json.loads(line) for line in (tmp_path / "evaluation" / "samples_000002.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert sum(r["correct"] for r in rows) == hits


def test_training_is_the_same_with_and_without_the_callback(tmp_path):
    states = []
    for use in (False, True):
        trainer = make_trainer(tmp_path / str(use))
        if use:
            trainer.add_callback(callback(trainer, num_samples=2, keep_best=False))
        trainer.train()
        states.append({k: v.clone() for k, v in trainer.model.state_dict().items()})
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_best_checkpoint_is_saved_and_survives_rotation(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=6)
    cb = callback(trainer)
    values = iter([0.1, 0.2, 0.5, 0.3])
    monkeypatch.setattr(cb, "evaluate", lambda: {"pass@1": next(values)})
    trainer.add_callback(cb)
    trainer.train()
    assert [(h["step"], h["pass@1"]) for h in cb.history] == [(0, 0.1), (2, 0.2), (4, 0.5), (6, 0.3)]
    best = Path(trainer.state.best_model_checkpoint)
    assert best == tmp_path / "checkpoint-4"
    assert (best / "model.safetensors").exists()
    assert trainer.state.best_metric == 0.5
    assert json.loads((tmp_path / "evaluation" / "best.json").read_text())["checkpoint"] == str(best)
    assert not (tmp_path / "checkpoint-2").exists(), "save_total_limit still rotates the others"


def test_best_checkpoint_without_a_save_strategy(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    cb = callback(trainer)
    values = iter([0.9, 0.2, 0.1])
    monkeypatch.setattr(cb, "evaluate", lambda: {"pass@1": next(values)})
    trainer.add_callback(cb)
    trainer.train()
    # No step beat the model it started from.
    assert not list(tmp_path.glob("checkpoint-*"))


def test_resume_goes_on_with_the_history(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    trainer.add_callback(callback(trainer, keep_best=False))
    trainer.train()
    resumed = make_trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    cb = callback(resumed, keep_best=False)
    resumed.add_callback(cb)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [h["step"] for h in cb.history] == [0, 2, 4]


def test_more_samples_log_votes(tmp_path):
    trainer = make_trainer(tmp_path, model=load_demo_policy())
    cb = callback(trainer, num_samples=3, metric="maj@3", max_tokens=80)
    values = cb.evaluate()
    assert set(values) == {"pass@1", "mean@3", "pass@3", "maj@3", "truncated", "no_answer", "mean_tokens"}
    assert values["pass@3"] >= values["mean@3"]
    assert cb.evaluate() == values, "the same random numbers at every evaluation"


def test_peft_model_is_evaluated_with_its_adapter(tmp_path):
    from peft import LoraConfig, get_peft_model

    tokenizer = load_demo_tokenizer()
    model = get_peft_model(build_policy(tokenizer), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    trainer = make_trainer(tmp_path, model=model)
    before = callback(trainer).evaluate()
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if "lora_" in name and "ref" not in name:
                p.normal_()
    cb = callback(trainer)
    cb.evaluate()
    rows = (tmp_path / "evaluation" / "samples_000000.jsonl").read_text()
    with trainer.model.disable_adapter():
        cb.evaluate()
    assert (tmp_path / "evaluation" / "samples_000000.jsonl").read_text() != rows
    assert before["mean_tokens"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_steps": 0}, "every_steps"),
        ({"metric": "maj@8"}, "num_samples=1"),
        ({"prompt": "chat"}, "chat template"),
        ({"grader": "nonsense"}, "mode"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        callback(make_trainer(tmp_path), **options)


def test_rows_without_answers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no gold answer"):
        EvalCallback(make_trainer(tmp_path), Dataset.from_list([{"prompt": "x"}]), prompt="plain")
