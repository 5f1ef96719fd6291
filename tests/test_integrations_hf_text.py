"""Padded text in the Hugging Face Trainer: precision, checkpointing, compilation, irreducible losses."""

import inspect

import pytest
import torch

import rholoss as rho

transformers = pytest.importorskip("transformers", reason="pip install 'rholoss[hf]'")
datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets")

from rholoss.integrations.huggingface import RhoTrainer  # noqa: E402

WORDS, ROWS, TRAINED, KEEP = 40, 48, 4, 0.25


def texts(rows=ROWS, seed=0):
    """Rows of 3 to 12 tokens; the class says whether token 7 is among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 13, (rows,), generator=generator).tolist()
    tokens = [torch.randint(1, WORDS, (n,), generator=generator).tolist() for n in lengths]
    return datasets.Dataset.from_dict(
        {
            "input_ids": tokens,
            "attention_mask": [[1] * len(row) for row in tokens],
            "labels": [int(any(token < 8 for token in row)) for row in tokens],
            "remark": ["is not for the model"] * rows,
        }
    )


def pad(items):
    """As a padding collator does it, without a tokenizer."""
    width = max(len(item["input_ids"]) for item in items)
    assert set(items[0]) == {"input_ids", "attention_mask", "labels"}
    batch = {
        name: torch.tensor([item[name] + [0] * (width - len(item[name])) for item in items])
        for name in ("input_ids", "attention_mask")
    }
    return {**batch, "labels": torch.tensor([item["labels"] for item in items])}


def tiny_bert(layers=1):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)


def run(folder, select, model=None, dataset=None, more=None, **options):
    model = tiny_bert() if model is None else model
    shapes = []
    # Of the inner module: `torch.compile` and accelerate exchange the outer forward.
    model.bert.embeddings.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(
            (module.training, torch.is_grad_enabled(), tuple(kwargs["input_ids"].shape))
        ),
        with_kwargs=True,
    )
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    settings |= {"per_device_train_batch_size": TRAINED, "num_train_epochs": 1, "logging_steps": 1}
    trainer = RhoTrainer(
        model,
        transformers.TrainingArguments(str(folder), **{**settings, **options}),
        train_dataset=texts() if dataset is None else dataset,
        data_collator=pad,
        selector=select,
        **(more or {}),
    )
    trainer.train()
    return trainer, shapes


def selector(**options):
    chosen = []
    il = torch.rand(ROWS, generator=torch.Generator().manual_seed(1))
    tap = [lambda step, stats, c: chosen.append(c.index.tolist())]
    return rho.Selector("rho", irreducible=il, keep=KEEP, on_scores=tap, **options), chosen


def test_columns_are_cut_to_the_longest_selected_row(tmp_path):
    select, chosen = selector()
    _, shapes = run(tmp_path, select)
    lengths = [len(row) for row in texts()["input_ids"]]
    trained = [shape for training, _, shape in shapes if training]
    assert trained == [(TRAINED, max(lengths[i] for i in rows)) for rows in chosen]
    scored = [shape for training, _, shape in shapes if not training]
    assert [rows for rows, _ in scored] == [16] * 3
    assert any(cut < whole for (_, cut), (_, whole) in zip(trained, scored, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"label_smoothing_factor": 0.1},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"gradient_accumulation_steps": 3},
        {"dataloader_num_workers": 1},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore:.*use_reentrant.*", "ignore:.*fork.*:DeprecationWarning")
def test_options_of_the_trainer_leave_the_first_choice_as_it_is(tmp_path, options):
    plain, first = selector()
    before = [p.clone() for p in tiny_bert().parameters()]
    run(tmp_path, plain)
    select, chosen = selector()
    trainer, shapes = run(tmp_path, select, **options)
    assert chosen[0] == first[0]
    assert len(chosen) == 3
    assert select.ledger.trained == 3 * TRAINED
    for old, new in zip(before, trainer.model.parameters(), strict=True):
        assert new.grad is None or new.grad.abs().sum() == 0
        assert new.dtype == torch.float32
        if new.ndim == 2 and new.shape[0] != 32:  # not the positions, of which few are used
            assert not torch.equal(old, new), "a weight that was never trained"
    scored = [grad for training, grad, _ in shapes if not training]
    assert scored.count(True) == 0


def test_scoring_in_bf16_is_scoring_in_bf16(tmp_path):
    kinds = []

    def loss(model, batch):
        labels = batch.pop("labels")
        kinds.append(torch.is_autocast_enabled("cpu"))
        logits = model(**batch).logits
        kinds.append(logits.dtype)
        return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")

    run(tmp_path, selector(loss=loss)[0], bf16=True)
    assert kinds[0] is True
    assert set(kinds[1::2]) == {torch.float32}  # accelerate hands logits back in float32


def test_irreducible_losses_from_a_hugging_face_model_and_data_set(tmp_path):
    columns = ["input_ids", "attention_mask", "labels"]
    holdout, train = (texts(seed=s).select_columns(columns) for s in (1, 0))
    il = rho.fit_irreducible(
        tiny_bert,
        holdout,
        score=train,
        collate_fn=pad,
        epochs=2,
        batch_size=16,
        labels=train["labels"],
        progress=False,
        out=tmp_path / "il",
    )
    again = rho.Irreducible.load(tmp_path / "il")
    assert torch.equal(again.lookup(torch.arange(ROWS)), il.lookup(torch.arange(ROWS)))
    chosen = []
    tap = [lambda step, stats, c: chosen.append((stats, c))]
    run(tmp_path, rho.Selector("rho", irreducible=il, keep=KEEP, on_scores=tap), dataset=train)
    stats, c = chosen[0]
    assert torch.equal(stats.irreducible_loss, il.lookup(stats.index))
    by_hand = (stats.loss - stats.irreducible_loss).topk(TRAINED).indices
    assert sorted(stats.index[by_hand].tolist()) == sorted(c.index.tolist())


def test_lengths_are_grouped_over_the_candidates(tmp_path):
    known = inspect.signature(transformers.TrainingArguments).parameters
    by_length = (
        {"train_sampling_strategy": "group_by_length"}
        if "train_sampling_strategy" in known
        else {"group_by_length": True}
    )
    select, _ = selector()
    trainer = run(tmp_path, select, **by_length)[0]
    sampler = trainer.get_train_dataloader().batch_sampler.sampler
    assert sampler.batch_size == TRAINED / KEEP
