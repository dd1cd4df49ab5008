"""The process reward model trainer: TRL's ids and loss, and what it has beyond them."""

import json
import math
from unittest.mock import MagicMock

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from trl_grpo_plus.reward_models import PRMConfig, PRMTrainer, ProcessRewardModel
from trl_grpo_plus.reward_models.prm_trainer import StepCollator, step_cross_entropy

ALPHABET = "0123456789+-= abcdefghijklmnopqrstuvwxyz?.\n#"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def tokenizer():
    tokens = ["<bos>", "<eos>", "<pad>", "<user>", "<a>", *ALPHABET]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(tokens[:5])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="?",
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def config_of(tokenizer, **kwargs):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **{**shape, **kwargs})


def classifier(tokenizer, seed=0):
    torch.manual_seed(seed)
    return LlamaForTokenClassification(config_of(tokenizer, num_labels=2))


def rows(count=16, seed=0):
    """Steps like `3+4=7`; a step is right if its result is."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(count):
        steps, labels = [], []
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            a, b, right = (int(torch.randint(0, n, (), generator=generator)) for n in (3, 3, 2))
            steps.append(f"{a}+{b}={a + b if right else a + b + 1}")
            labels.append(bool(right))
        data.append({"prompt": "add?", "completions": steps, "labels": labels})
    return Dataset.from_list(data)


def arguments(path, **kwargs):
    defaults = {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "disable_tqdm": True,
        "logging_steps": 1000,
    }
    return PRMConfig(str(path), **{**defaults, **kwargs})


# --- TRL's token ids ------------------------------------------------------------------------------------------------

ROW = {
    "prompt": "Which number is larger, 9.8 or 9.11?",
    "completions": ["11 is greater than 8.", "Hence, 9.11 > 9.8."],
    "labels": [True, False],
}


@pytest.fixture
def mock_tokenizer():
    ids = {
        ROW["prompt"]: [465, 6766, 318, 298],
        ROW["completions"][0]: [4, 322, 12],
        ROW["completions"][1]: [4995, 11, 22],
        "\n": [1030],
        "\n\n": [1030, 7],
    }
    tokenizer = MagicMock(spec=PreTrainedTokenizerBase)
    tokenizer.bos_token_id = 0
    tokenizer.eos_token_id = 2
    tokenizer.side_effect = lambda text, add_special_tokens: {"input_ids": ids[text]}
    tokenizer.encode.side_effect = lambda text, add_special_tokens: ids[text]
    return tokenizer


def tokenized(tokenizer, row=ROW, **kwargs):
    defaults = {
        "step_separator": "\n",
        "max_length": None,
        "max_completion_length": None,
        "train_on_last_step_only": False,
        "is_eval": False,
    }
    return PRMTrainer.tokenize_row(features=row, tokenizer=tokenizer, **{**defaults, **kwargs})


def test_ids_and_labels_are_those_of_trl(mock_tokenizer):
    assert tokenized(mock_tokenizer) == {
        "input_ids": [0, 465, 6766, 318, 298, 4, 322, 12, 1030, 4995, 11, 22, 1030],
        "labels": [-100] * 8 + [1] + [-100] * 3 + [0],
    }
    assert tokenized(mock_tokenizer, train_on_last_step_only=True)["labels"] == [-100] * 12 + [0]
    assert tokenized(mock_tokenizer, train_on_last_step_only=True, is_eval=True)["labels"][8] == 1
    assert tokenized(mock_tokenizer, max_length=9) == {
        "input_ids": [0, 465, 6766, 318, 298, 4, 322, 12, 1030],
        "labels": [-100] * 8 + [1],
    }
    cut = tokenized(mock_tokenizer, max_completion_length=5)
    assert cut["input_ids"] == [0, 465, 6766, 318, 298, 4, 322, 12, 1030, 4995]
    assert cut["labels"] == [-100] * 8 + [1, -100]
    two = tokenized(mock_tokenizer, step_separator="\n\n")
    assert two["input_ids"][5:10] == [4, 322, 12, 1030, 7]
    assert two["labels"][5:10] == [-100, -100, -100, -100, 1]


def test_soft_and_missing_labels_are_kept(mock_tokenizer):
    labels = tokenized(mock_tokenizer, {**ROW, "labels": [0.75, None]})["labels"]
    assert labels == [-100] * 8 + [0.75] + [-100] * 4
    with pytest.raises(ValueError, match=r"in \[0, 1\].*got 2"):
        tokenized(mock_tokenizer, {**ROW, "labels": [2, 0]})
    with pytest.raises(ValueError, match=r"2 completions \(steps\) and 1 labels"):
        tokenized(mock_tokenizer, {**ROW, "labels": [True]})


def test_against_trl(tokenizer, tmp_path):
    """Where TRL still has its trainer: the same ids, and the same weights after training."""
    trl_prm = pytest.importorskip("trl.experimental.prm", reason="TRL has no PRMTrainer from 1.14 on")
    shared = {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "disable_tqdm": True,
    }
    weights, ids = [], []
    for trainer_class, config_class in ((trl_prm.PRMTrainer, trl_prm.PRMConfig), (PRMTrainer, PRMConfig)):
        trainer = trainer_class(
            model=classifier(tokenizer),
            args=config_class(str(tmp_path), **shared),
            train_dataset=rows(),
            processing_class=tokenizer,
        )
        ids.append([trainer.train_dataset[:][column] for column in ("input_ids", "labels")])
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert ids[0] == ids[1]
    assert torch.equal(*weights) or torch.allclose(*weights, atol=1e-6)
    assert not torch.allclose(
        weights[0], torch.cat([p.flatten() for p in classifier(tokenizer).parameters()]), atol=1e-3
    )


def test_defaults_are_those_of_trl(tmp_path):
    args = PRMConfig(str(tmp_path), use_cpu=True)
    assert (args.learning_rate, args.logging_steps, args.gradient_checkpointing) == (1e-5, 10, True)
    assert (args.max_length, args.max_completion_length, args.step_separator) == (1024, None, "\n")
    assert (args.disable_dropout, args.train_on_last_step_only, args.dataset_num_proc) == (True, False, None)
    assert args.bf16 is False


# --- Loss -----------------------------------------------------------------------------------------------------------


def test_loss_on_hard_labels_is_cross_entropy():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 7, 2), torch.full((3, 7), -100)
    labels[0, 2], labels[0, 6], labels[2, 1] = 1, 0, 1
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    assert step_cross_entropy(logits, labels).item() == pytest.approx(expected.item(), abs=1e-6)
    junk = torch.where((labels == -100)[..., None], torch.tensor(1e6), logits)
    assert step_cross_entropy(junk, labels).item() == pytest.approx(expected.item(), abs=1e-6)


def test_loss_on_soft_labels_by_hand():
    logits = torch.tensor([[[0.0, math.log(3.0)]]], requires_grad=True)  # p(right) = 3/4
    loss = step_cross_entropy(logits, torch.tensor([[0.6]]))
    assert loss.item() == pytest.approx(-(0.6 * math.log(0.75) + 0.4 * math.log(0.25)), abs=1e-6)
    loss.backward()
    assert logits.grad[0, 0].tolist() == pytest.approx([-0.15, 0.15], abs=1e-6)
    nothing = step_cross_entropy(logits, torch.tensor([[-100.0]]))
    assert nothing.item() == 0 and nothing.requires_grad


def test_soft_labels_are_learned_as_they_are(tokenizer, tmp_path):
    data = Dataset.from_list([{"prompt": "q", "completions": ["a", "b"], "labels": [0.9, 0.3]}] * 4)
    trainer = PRMTrainer(
        classifier(tokenizer), arguments(tmp_path, max_steps=80, learning_rate=5e-3), None, data, data, tokenizer
    )
    trainer.train()
    assert trainer.as_reward_model().score_steps(["q"], [["a", "b"]])[0] == pytest.approx([0.9, 0.3], abs=0.02)
    assert trainer.evaluate()["eval_brier"] < 1e-3


def test_micro_batches_do_not_change_the_gradient(tokenizer, tmp_path):
    data = rows(8)
    gradients = []
    for micro, accumulation in ((8, 1), (2, 4), (1, 8)):
        trainer = PRMTrainer(
            classifier(tokenizer),
            arguments(
                tmp_path,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=accumulation,
                optim="sgd",
                learning_rate=1.0,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                max_steps=1,
            ),
            train_dataset=data,
            processing_class=tokenizer,
        )
        before = torch.cat([p.detach().clone().flatten() for p in trainer.model.parameters()])
        trainer.train()
        gradients.append(before - torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert gradients[0].abs().max() > 1e-3
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)
    assert torch.allclose(gradients[0], gradients[2], atol=1e-6)


# --- Heads, stages, adapters ----------------------------------------------------------------------------------------


def test_trained_model_is_found_by_path_and_scores_as_it_was_trained(tokenizer, tmp_path):
    train, test = rows(256), rows(64, seed=1)
    trainer = PRMTrainer(
        classifier(tokenizer),
        arguments(tmp_path, max_steps=500, learning_rate=5e-3, per_device_train_batch_size=16, step_separator="\n\n"),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_auc"] > 0.98
    assert metrics["eval_accuracy"] > 0.9
    assert metrics["eval_first_error_f1"] > 0.85
    assert 0 <= metrics["eval_ece"] < 0.2
    trainer.save_model()
    saved = json.loads((tmp_path / "prm_format.json").read_text())
    assert saved == {"name": "token_classification", "options": {"separator": "\n\n"}}
    prm = ProcessRewardModel.from_pretrained(tmp_path)
    scores = prm.score_steps(test["prompt"], test["completions"])
    ours = trainer.as_reward_model(batch_size=3).score_steps(test["prompt"], test["completions"])
    for a, b in zip(scores, ours, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    # What the trainer's own forward pass says at the labels.
    batch = StepCollator(tokenizer.pad_token_id)(list(trainer.eval_dataset))
    with torch.no_grad():
        logits = AutoModelForTokenClassification.from_pretrained(tmp_path)(batch["input_ids"]).logits
    flat = logits.softmax(-1)[..., 1][batch["labels"] != -100].tolist()
    assert [score for row in scores for score in row] == pytest.approx(flat, abs=1e-4)


def test_language_model_head(tokenizer, tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(tokenizer))
    trainer = PRMTrainer(
        model,
        arguments(tmp_path, max_steps=500, learning_rate=5e-3, per_device_train_batch_size=16),
        train_dataset=rows(256),
        eval_dataset=rows(64, seed=1),
        processing_class=tokenizer,
    )
    trainer.train()
    assert trainer.evaluate()["eval_auc"] > 0.98
    trainer.save_model()
    prm = ProcessRewardModel.from_pretrained(tmp_path)
    assert prm.format.name == "token_pair"
    good, bad = prm.score_steps(["add?", "add?"], [["1+1=2"], ["1+1=3"]])
    assert good[0] > bad[0] + 0.2


def test_head_first_then_all(tokenizer, tmp_path):
    model = classifier(tokenizer)
    body = {name: p.detach().clone() for name, p in model.named_parameters() if not name.startswith("score")}
    head = model.score.weight.detach().clone()

    def moved():
        return max((p - body[n]).abs().max().item() for n, p in model.named_parameters() if n in body)

    trace = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trace.append((moved(), (model.score.weight - head).abs().max().item()))

    trainer = PRMTrainer(
        model,
        arguments(tmp_path, max_steps=5, head_first_steps=3, head_learning_rate=1e-2, learning_rate=1e-3),
        train_dataset=rows(32),
        processing_class=tokenizer,
        callbacks=[Look()],
    )
    trainer.train()
    assert [body_moved > 0 for body_moved, _ in trace] == [False, False, False, True, True]
    assert trace[0][1] == pytest.approx(1e-2, rel=0.05)  # the first step of Adam is the learning rate
    assert all(p.requires_grad for p in model.parameters())
    rates = sorted({group["initial_lr"] for group in trainer.optimizer.param_groups})
    assert rates == [1e-3, 1e-2]
    with pytest.raises(ValueError, match="head_first_steps and head_learning_rate are for a new head"):
        PRMTrainer(
            LlamaForCausalLM(config_of(tokenizer)),
            arguments(tmp_path, head_first_steps=3),
            train_dataset=rows(4),
            processing_class=tokenizer,
        )


@pytest.mark.parametrize("task_type", [None, "TOKEN_CLS"])
def test_adapter(tokenizer, tmp_path, task_type):
    from peft import LoraConfig

    classifier(tokenizer).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    trainer = PRMTrainer(
        str(tmp_path / "base"),
        arguments(tmp_path / "out", max_steps=3, learning_rate=1e-2),
        train_dataset=rows(16),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task_type),
    )
    trainable = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert all("lora" in name or "score" in name for name in trainable)
    assert any("score" in name for name in trainable)
    untrained = ProcessRewardModel.from_pretrained(tmp_path / "base").score_steps(["add?"], [["1+1=2", "1+2=4"]])[0]
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "out" / "adapter_config.json").exists()
    expected = trainer.as_reward_model().score_steps(["add?"], [["1+1=2", "1+2=4"]])[0]
    prm = ProcessRewardModel.from_pretrained(tmp_path / "out")
    assert prm.score_steps(["add?"], [["1+1=2", "1+2=4"]])[0] == pytest.approx(expected, abs=1e-5)
    assert untrained != pytest.approx(expected, abs=1e-3)


def test_conversational_prompts(tokenizer, tmp_path):
    messages = [{"role": "user", "content": "add?"}]
    row = {"prompt": messages, "completions": ["1+1=2"], "labels": [True]}
    ids = tokenized(tokenizer, row)["input_ids"]
    assert tokenizer.decode(ids) == "<bos><user>add?<a>1+1=2\n"
    trainer = PRMTrainer(
        classifier(tokenizer), arguments(tmp_path), None, Dataset.from_list([row] * 4), None, tokenizer
    )
    trainer.train()
    encoded = trainer.prm_format.encode(tokenizer, messages, ["1+1=2\n"])
    assert encoded.input_ids == ids
    assert encoded.positions == [len(ids) - 1]


def test_resumed_training_ends_where_it_would_have(tokenizer, tmp_path):
    def trainer(path, **kwargs):
        options = {"max_steps": 6, "learning_rate": 1e-2, "head_first_steps": 2, "head_learning_rate": 2e-2}
        return PRMTrainer(
            classifier(tokenizer),
            arguments(path, **options, **kwargs),
            train_dataset=rows(32),
            processing_class=tokenizer,
        )

    whole = trainer(tmp_path / "a", save_strategy="steps", save_steps=3)
    whole.train()
    resumed = trainer(tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_cut_labels_are_counted(tokenizer, tmp_path, caplog):
    data = Dataset.from_list(
        [
            {"prompt": "q", "completions": ["a", "b", "c"], "labels": [True] * 3},
            {"prompt": "q", "completions": ["a"], "labels": [True]},
        ]
    )
    # <bos>q a\n b\n c\n
    PRMTrainer(classifier(tokenizer), arguments(tmp_path, max_length=5), None, data, None, tokenizer)
    assert "cut 2 step labels off 1 of 2 rows" in caplog.text


def test_mistakes_are_named(tokenizer, tmp_path):
    args, data = arguments(tmp_path), rows(4)
    with pytest.raises(ValueError, match="needs a train_dataset"):
        PRMTrainer(classifier(tokenizer), args, processing_class=tokenizer)
    with pytest.raises(ValueError, match="needs the tokenizer"):
        PRMTrainer(classifier(tokenizer), args, train_dataset=data)
    with pytest.raises(ValueError, match="no column 'labels'"):
        PRMTrainer(classifier(tokenizer), args, None, data.remove_columns("labels"), None, tokenizer)
    three = LlamaForTokenClassification(config_of(tokenizer, num_labels=3))
    with pytest.raises(ValueError, match="two classes; LlamaForTokenClassification has 3"):
        PRMTrainer(three, args, None, data, None, tokenizer)
    with pytest.raises(
        ValueError, match="does not fit a LlamaForTokenClassification: load it with AutoModelForCausalLM"
    ):
        PRMTrainer(classifier(tokenizer), arguments(tmp_path, head="token_pair"), None, data, None, tokenizer)
    with pytest.raises(ValueError, match="good_token 'yes' must be one token"):
        PRMTrainer(
            LlamaForCausalLM(config_of(tokenizer)), arguments(tmp_path, good_token="yes"), None, data, None, tokenizer
        )
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        PRMConfig(str(tmp_path), max_length=0)
    with pytest.raises(ValueError, match="step_separator must not be empty"):
        PRMConfig(str(tmp_path), step_separator="")


# --- In GRPO --------------------------------------------------------------------------------------------------------


def test_a_reward_models_path_trains_a_policy(tmp_path):
    """By path in GRPOPlusTrainer: the scores that are logged are those of the sampled ids, in the model's layout."""
    from reward_fns import gsm8k_reward
    from trl_grpo_plus import GRPOPlusConfig, GRPOPlusTrainer
    from trl_grpo_plus.demo import load_demo_policy, load_demo_tokenizer, make_problems

    tokenizer, path = load_demo_tokenizer(), tmp_path / "tiny-prm"
    torch.manual_seed(0)
    config = config_of(tokenizer, num_labels=2, initializer_range=0.3, pad_token_id=tokenizer.pad_token_id)
    model = LlamaForTokenClassification(config).eval()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    args = GRPOPlusConfig(
        str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        max_steps=1,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=32,
        logging_steps=1,
        beta=0.0,
        disable_tqdm=True,
    )
    trainer = GRPOPlusTrainer(
        load_demo_policy(),
        gsm8k_reward,
        args,
        make_problems(8, 0),
        processing_class=tokenizer,
        process_reward_funcs=str(path),
    )
    (prm,) = trainer.process_reward_funcs
    calls, score = [], prm.score_steps

    def recorded(prompts, steps, completion_ids):
        calls.append((prompts, steps, completion_ids, score(prompts, steps, completion_ids)))
        return calls[-1][-1]

    prm.score_steps = recorded
    trainer.train()
    ((prompts, steps, completion_ids, scores),) = calls
    for prompt, texts, ids, row in zip(prompts, steps, completion_ids, scores, strict=True):
        # The layout by hand: the sampled tokens with each newline as the separator, the end token left out.
        ids = [i for i in ids if i != tokenizer.eos_token_id]
        newline = tokenizer.convert_tokens_to_ids("\n")
        ids = tokenizer(prompt)["input_ids"] + ids + [newline] * (ids[-1] != newline)
        prompt_length = len(tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            probability = model(torch.tensor([ids])).logits[0].softmax(-1)[:, 1]
        expected = [probability[t].item() for t, i in enumerate(ids) if i == newline and t >= prompt_length]
        assert row == pytest.approx(expected, abs=1e-5)
        assert len(row) == len(texts)
    # A last step that was cut off is not scored by the trainer.
    kept = [
        score
        for row, ids in zip(scores, completion_ids, strict=True)
        for score in (row if tokenizer.eos_token_id in ids else row[:-1])
    ]
    logged = next(log for log in trainer.state.log_history if "process/tiny-prm/step_mean" in log)
    assert logged["process/tiny-prm/step_mean"] == pytest.approx(sum(kept) / len(kept), abs=1e-5)
