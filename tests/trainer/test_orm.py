"""Outcome reward models: the pointwise trainer, and scoring what it or TRL's RewardTrainer made."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from trl_grpo_plus.reward_models import ORMConfig, ORMTrainer, OutcomeRewardModel

TOKENS = ["<pad>", "<eos>", "<user>", "<assistant>", *"0123456789+=? abc\n"]
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"


@pytest.fixture
def tokenizer():
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(TOKENS[:4])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="a", chat_template=CHAT
    )


def classifier(num_labels=1, **kwargs):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(TOKENS), max_position_embeddings=64, num_labels=num_labels, **shape, **kwargs)
    return LlamaForSequenceClassification(config).eval()


def rows(count=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(count):
        a, b, right = (int(torch.randint(0, n, (), generator=generator)) for n in (3, 3, 2))
        data.append({"prompt": f"{a}+{b}?", "completion": f"={a + b if right else a + b + 1}", "label": bool(right)})
    return Dataset.from_list(data)


def arguments(path, **kwargs):
    defaults = {
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "per_device_train_batch_size": 16,
        "max_steps": 2,
        "disable_tqdm": True,
        "logging_steps": 1000,
    }
    return ORMConfig(str(path), **{**defaults, **kwargs})


PROMPTS, COMPLETIONS = ["1+1?", "1+2?", "2+2?"], ["=2", "=4 abc", "=4\n"]


def test_scores_are_the_models_outputs_at_the_end_token(tokenizer):
    model = classifier(initializer_range=0.4)
    expected = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = [TOKENS.index(char) for char in prompt + completion] + [1]
        with torch.no_grad():
            hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
            expected.append(model.score(hidden).item())
    assert max(expected) - min(expected) > 1e-2
    for batch_size in (1, 2, 8):
        scorer = OutcomeRewardModel(model, tokenizer, batch_size=batch_size, output="logit")
        assert scorer(prompts=PROMPTS, completions=COMPLETIONS, answer=["2"] * 3) == pytest.approx(expected, abs=1e-5)
    probability = OutcomeRewardModel(model, tokenizer).score(PROMPTS, COMPLETIONS)
    assert probability == pytest.approx(torch.tensor(expected).sigmoid().tolist(), abs=1e-5)
    # The end token that a policy wrote itself is not doubled.
    assert OutcomeRewardModel(model, tokenizer).score(["1+1?"], ["=2<eos>"]) == pytest.approx(
        probability[:1], abs=1e-6
    )


def test_conversations(tokenizer):
    model = classifier(initializer_range=0.4)
    scorer = OutcomeRewardModel(model, tokenizer, output="logit")
    ids = [TOKENS.index(t) for t in ("<user>", *"1+1?", "<eos>", "<assistant>", *"=2", "<eos>")]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits.item()
    prompt, reply = [{"role": "user", "content": "1+1?"}], [{"role": "assistant", "content": "=2"}]
    assert scorer.score([prompt, prompt], [reply, "=2"]) == pytest.approx([expected] * 2, abs=1e-5)


def test_pointwise_training(tokenizer, tmp_path):
    trainer = ORMTrainer(
        classifier(), arguments(tmp_path, max_steps=400, learning_rate=5e-3), None, rows(), rows(64, 1), tokenizer
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_auc"] > 0.98
    assert metrics["eval_accuracy"] > 0.9
    assert metrics["eval_brier"] < 0.1
    assert 0 <= metrics["eval_ece"] < 0.2
    trainer.save_model()
    scorer = OutcomeRewardModel.from_pretrained(tmp_path)
    right, wrong = scorer.score(["1+1?", "1+1?"], ["=2", "=3"])
    assert right > 0.8 > 0.2 > wrong
    assert trainer.as_reward_model().score(["1+1?", "1+1?"], ["=2", "=3"]) == pytest.approx([right, wrong], abs=1e-5)
    assert scorer.__name__ == tmp_path.name


def test_loss_is_binary_cross_entropy_however_a_step_is_cut(tokenizer, tmp_path):
    data = rows(12)
    data = data.map(lambda row, i: {"label": [0.0, 1.0, 0.3][i % 3]}, with_indices=True, features=None)
    gradients, model = [], classifier()
    for micro, accumulation in ((12, 1), (3, 4)):
        trainer = ORMTrainer(
            classifier(),
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
        before = trainer.model.score.weight.detach().clone()
        trainer.train()
        gradients.append(before - trainer.model.score.weight.detach())
    logits = []
    for row in data:
        ids = [TOKENS.index(char) for char in row["prompt"] + row["completion"]] + [1]
        logits.append(model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1]))
    binary_cross_entropy_with_logits(torch.cat(logits), torch.tensor(data["label"][:]).float()).backward()
    assert torch.allclose(gradients[0], model.score.weight.grad, atol=1e-6)
    assert torch.allclose(gradients[1], model.score.weight.grad, atol=1e-6)


def test_adapter(tokenizer, tmp_path):
    from peft import LoraConfig

    classifier(initializer_range=0.3).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    trainer = ORMTrainer(
        str(tmp_path / "base"),
        arguments(tmp_path / "out", max_steps=3, learning_rate=1e-2),
        train_dataset=rows(16),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    trainer.save_model()
    scorer = OutcomeRewardModel.from_pretrained(tmp_path / "out")
    expected = trainer.as_reward_model().score(PROMPTS, COMPLETIONS)
    assert scorer.score(PROMPTS, COMPLETIONS) == pytest.approx(expected, abs=1e-5)
    base = OutcomeRewardModel.from_pretrained(tmp_path / "base").score(PROMPTS, COMPLETIONS)
    assert base != pytest.approx(expected, abs=1e-3)


def test_a_model_of_trls_reward_trainer(tokenizer, tmp_path):
    from trl import RewardConfig, RewardTrainer

    pairs = Dataset.from_list(
        [
            {"prompt": f"{a}+{b}?", "chosen": f"={a + b}", "rejected": f"={a + b + 1}"}
            for a in range(3)
            for b in range(3)
        ]
    )
    config = RewardConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        max_steps=150,
        learning_rate=5e-3,
        gradient_checkpointing=False,
        disable_tqdm=True,
        logging_steps=1000,
    )
    trainer = RewardTrainer(classifier(), config, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    scorer = OutcomeRewardModel.from_pretrained(tmp_path, output="logit")
    right = scorer.score(pairs["prompt"][:], pairs["chosen"][:])
    wrong = scorer.score(pairs["prompt"][:], pairs["rejected"][:])
    assert all(a > b for a, b in zip(right, wrong, strict=True))
    # The ids that the trainer gave the model are those that are scored.
    batch = trainer.data_collator([trainer.train_dataset[0]])
    with torch.no_grad():
        logits = trainer.model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    assert logits.tolist() == pytest.approx([right[0], wrong[0]], abs=1e-4)


def test_too_long_and_mistakes(tokenizer, tmp_path, caplog):
    model = classifier()
    assert OutcomeRewardModel(model, tokenizer).max_length == 64
    with pytest.raises(ValueError, match="Completion 1 with its prompt has 11 tokens, more than max_length=8"):
        OutcomeRewardModel(model, tokenizer, max_length=8).score(PROMPTS, COMPLETIONS)
    scores = OutcomeRewardModel(model, tokenizer, max_length=8, too_long="skip").score(PROMPTS, COMPLETIONS)
    assert [score is None for score in scores] == [False, True, False]
    assert "1 of 3 completions are longer" in caplog.text
    with pytest.raises(ValueError, match="one output; LlamaForSequenceClassification has 2"):
        OutcomeRewardModel(classifier(2), tokenizer)
    with pytest.raises(ValueError, match='output must be "logit"'):
        OutcomeRewardModel(model, tokenizer, output="sigmoid")
    with pytest.raises(ValueError, match="no column 'label'"):
        ORMTrainer(model, arguments(tmp_path), None, rows(4).remove_columns("label"), None, tokenizer)
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 2"):
        bad = Dataset.from_list([{"prompt": "1", "completion": "2", "label": 2}])
        ORMTrainer(model, arguments(tmp_path), None, bad, None, tokenizer)
    ORMTrainer(model, arguments(tmp_path, max_length=7), None, rows(8), None, tokenizer)
    trainer = ORMTrainer(
        model,
        arguments(tmp_path, max_length=8),
        None,
        Dataset.from_list(
            [{"prompt": p, "completion": c, "label": 1} for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
        ),
        None,
        tokenizer,
    )
    assert len(trainer.train_dataset) == 2
    assert "1 of 3 rows are longer than max_length=8" in caplog.text
