"""The tasks: texts as tensors, and the settings of their runs."""

from __future__ import annotations

import csv
import io
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.datasets.files import data_dir, need
from rholoss.noise import uniform_noise

NOISE_SEED = 2022


@dataclass(frozen=True)
class Task:
    """Where the texts are, and how the paper (or we, for Banking77) trains on them."""

    name: str
    folders: tuple[str, str]  # as the official archive unpacks, and as it is packed here
    train: tuple[str, ...]
    test: tuple[str, ...]
    origin: str
    classes: int
    epochs: int  # passes over the candidates
    targets: tuple[float, ...]  # accuracies whose epochs are told
    lr: float = 2e-5
    noise: float = 0.0
    evaluations: int = 1  # an epoch
    width: int = 64  # tokens a row
    il_epochs: int = 3  # of the quick fit of the fair protocol, at this rate for batches of 32
    il_lr: float = 3e-4


TASKS = {
    task.name: task
    for task in (
        Task(
            "cola", ("CoLA", "cola"), ("in_domain_train.tsv",),
            ("in_domain_dev.tsv", "out_of_domain_dev.tsv"), "https://nyu-mll.github.io/CoLA",
            classes=2, epochs=100, targets=(0.75, 0.80), width=48,
        ),
        Task(
            "sst2", ("SST-2", "sst2"), ("train.tsv",), ("dev.tsv",), "https://gluebenchmark.com",
            classes=2, epochs=15, targets=(0.825, 0.90), evaluations=5,
        ),
        Task(
            "banking77", ("banking77", "banking77"), ("train.csv",), ("test.csv",),
            "https://github.com/PolyAI-LDN/task-specific-datasets", classes=77, epochs=100,
            targets=(0.70, 0.80), lr=1e-4, noise=0.2, il_epochs=6,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """Rows of tokens [N, L] with lengths and labels [N]; `wrong` tells which labels were changed."""

    tokens: Tensor
    length: Tensor
    labels: Tensor
    wrong: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Texts:
        """The same rows on a device."""
        return Texts(*(t.to(device) for t in (self.tokens, self.length, self.labels, self.wrong)))

    def and_others(self, others: Texts) -> Texts:
        """These rows, then the others."""
        pairs = zip(vars(self).values(), vars(others).values(), strict=True)
        return Texts(*(torch.cat(pair) for pair in pairs))

    def rows(self, index: Any, width: int | None = None) -> dict[str, Tensor]:
        """What a model takes, with the labels: `width` tokens a row, or as many as the longest row has.

        Most texts are far shorter than the longest of all. Who knows the width beforehand spares a GPU
        the wait for it.
        """
        length = self.length[index]
        width = int(length.max()) if width is None else width
        tokens = self.tokens[index][..., :width]
        mask = torch.arange(tokens.shape[-1], device=tokens.device) < length[..., None]
        return {"input_ids": tokens, "attention_mask": mask.long(), "labels": self.labels[index]}

    # As a data set, for irreducible losses: a whole batch at once, where the loader asks for one.
    __getitem__ = rows
    __getitems__ = rows


def as_it_is(batch: Any) -> Any:
    """A collator for what `__getitems__` has put together already."""
    return batch


def load(task: Task, model: Path, data: Any = None) -> tuple[Texts, Texts, Texts]:
    """Training half (even rows), holdout half (odd rows) and test rows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts, names = _read(task, task.train, data)
    test_texts, test_names = _read(task, task.test, data)
    classes = sorted(set(names))
    if len(classes) != task.classes:
        raise ValueError(
            f"{task.name} has {len(classes)} classes, not {task.classes}: another file?"
        )
    labels = np.array([classes.index(name) for name in names])
    noisy = uniform_noise(labels, task.classes, task.noise, seed=NOISE_SEED)
    every = _tensors(tokenizer, texts, task.width, noisy.labels, noisy.corrupted)
    true = np.array([classes.index(name) for name in test_names])
    test = _tensors(tokenizer, test_texts, task.width, true, np.zeros(len(true), bool))
    halves = [Texts(*(t[k::2] for t in vars(every).values())) for k in (0, 1)]
    return halves[0], halves[1], test


def _tensors(tokenizer: Any, texts: list[str], width: int, labels: Any, wrong: Any) -> Texts:
    made = tokenizer(texts, truncation=True, max_length=width, padding="max_length")
    mask = torch.tensor(made["attention_mask"])
    return Texts(
        torch.tensor(made["input_ids"]),
        mask.sum(1),
        torch.as_tensor(labels),
        torch.as_tensor(wrong),
    )


def _read(task: Task, files: tuple[str, ...], data: Any) -> tuple[list[str], list[str]]:
    """Texts and class names, in the order of the files."""
    found = []
    for file in files:
        content = _content(task, file, data)
        lines = content.splitlines()
        if task.name == "cola":  # source, label, mark, sentence
            found += [(cells[3], cells[1]) for cells in (line.split("\t") for line in lines)]
        elif task.name == "sst2":
            found += [tuple(line.split("\t")[:2]) for line in lines[1:]]
        else:
            # Some texts have several lines.
            found += [tuple(row) for row in list(csv.reader(io.StringIO(content, newline="")))[1:]]
    return [text.strip() for text, _ in found], [name for _, name in found]


def _content(task: Task, file: str, data: Any) -> str:
    official, packed = (data_dir(data) / folder / file for folder in task.folders)
    packed = packed.with_name(packed.name + ".xz")
    if packed.exists() and not official.exists():
        return lzma.decompress(packed.read_bytes()).decode()
    return need(official, f"{task.name} ({file})", task.origin).read_text()
