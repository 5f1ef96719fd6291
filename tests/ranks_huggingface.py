"""A run of the Trainer on two processes, started by torchrun; each writes what it chose to a folder."""

import os
import sys
from pathlib import Path

import torch
from fixtures_integrations import LEARNING_RATE, TRAINED, Classifier, Rows, recorded
from transformers import TrainingArguments

from rholoss.integrations.huggingface import RhoTrainer


def main(folder):
    select, seen = recorded()
    model = Classifier()
    settings = TrainingArguments(
        str(folder / "out"), per_device_train_batch_size=TRAINED // 2, num_train_epochs=2,
        gradient_accumulation_steps=2, use_cpu=True, ddp_backend="gloo", report_to=[],
        disable_tqdm=True, save_strategy="no", max_grad_norm=0.0, ddp_find_unused_parameters=False,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = RhoTrainer(
        model, settings, train_dataset=Rows(), optimizers=(optimizer, constant), selector=select
    )
    metrics = trainer.train().metrics
    result = {
        "candidates": [index.tolist() for index in seen.candidates],
        "chosen": seen.chosen,
        "rows": metrics["train_samples_per_second"] * metrics["train_runtime"],
        "weights": model.net.state_dict(),
    }
    torch.save(result, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
