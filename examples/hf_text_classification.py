"""Hugging Face: intents of bank customers (Banking77), a fifth of the labels wrong.

    python examples/hf_text_classification.py --data banking77 --model sentence-transformers/all-MiniLM-L6-v2

`--data` holds train.csv and test.csv (text,category), as in banking_data of
https://github.com/PolyAI-LDN/task-specific-datasets. Half of the training file fits the irreducible
losses, the other half is trained on.
"""

import argparse

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainingArguments,
)

import rholoss as rho
from rholoss.integrations.huggingface import RhoTrainer
from rholoss.noise import uniform_noise

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", required=True)
parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
parser.add_argument("--out", default="out")
parser.add_argument("--epochs", type=float, default=10, help="passes over the candidates")
parser.add_argument("--il-epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=1e-4)
given = parser.parse_args()
torch.manual_seed(0)

files = {name: f"{given.data}/{name}.csv" for name in ("train", "test")}
data = load_dataset("csv", data_files=files, cache_dir=f"{given.out}/cache")
names = sorted(set(data["train"]["category"]))
tokenizer = AutoTokenizer.from_pretrained(given.model)


def prepare(rows):
    return {
        **tokenizer(rows["text"], truncation=True, max_length=64),
        "labels": [names.index(name) for name in rows["category"]],
    }


data = data.map(prepare, batched=True, remove_columns=["text", "category"])
noisy = uniform_noise(data["train"]["labels"], len(names), 0.2, seed=0).labels
noisy = data["train"].remove_columns("labels").add_column("labels", noisy.tolist())
halves = noisy.train_test_split(0.5, seed=0)
train, holdout = halves["train"], halves["test"]


def make_model():
    return AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=len(names))


def accuracy(output):
    return {"accuracy": float((output.predictions.argmax(1) == output.label_ids).mean())}


collate = DataCollatorWithPadding(tokenizer)
il = rho.fit_irreducible(
    make_model, holdout, score=train, collate_fn=collate, labels=train["labels"], batch_size=32,
    epochs=given.il_epochs, optimizer=lambda p: torch.optim.AdamW(p, lr=given.lr),
)  # fmt: skip
select = rho.Selector("rho", irreducible=il, keep=0.1)
settings = TrainingArguments(
    given.out, per_device_train_batch_size=32, num_train_epochs=given.epochs,
    learning_rate=given.lr, report_to=[], save_strategy="no",
)  # fmt: skip
trainer = RhoTrainer(
    make_model(), settings, train_dataset=train, data_collator=collate,
    eval_dataset=data["test"], compute_metrics=accuracy, selector=select,
)  # fmt: skip
trainer.train()
print(f"test accuracy {trainer.evaluate()['eval_accuracy']:.1%}")
print(select.ledger)
