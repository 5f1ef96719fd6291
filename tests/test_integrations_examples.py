"""The examples of the frameworks run, on small real data."""

import csv
import lzma
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
INTENTS, ROWS = 4, 240


def run(name, capsys, *arguments):
    torch.set_num_threads(1)
    argv, sys.argv = sys.argv, [name, *arguments]
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = argv
    return capsys.readouterr().out


def accuracy(printed):
    return float(re.search(r"test accuracy ([\d.]+)%", printed).group(1))


@pytest.mark.parametrize(
    "name", ["hf_text_classification", "lightning_images", "fabric_loop", "accelerate_loop"]
)
def test_examples_are_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("lightning_images.py", "lightning"),
        ("fabric_loop.py", "lightning"),
        ("accelerate_loop.py", "accelerate"),
    ],
)
def test_images(name, framework, capsys):
    pytest.importorskip(framework)
    printed = run(name, capsys)
    assert accuracy(printed) > 85
    assert "steps 120 | trained 3840 of 38400 candidates (10%), 38400 scored" in printed


@pytest.fixture
def banking(data_dir, tmp_path):
    """Some rows of some intents, as CSV files."""
    for name in ("train", "test"):
        plain, packed = (data_dir / "banking77" / f"{name}.csv{end}" for end in ("", ".xz"))
        if not plain.exists() and not packed.exists():
            pytest.skip(f"Banking77 is not in {data_dir}; set RHOLOSS_DATA")
        text = plain.read_bytes() if plain.exists() else lzma.decompress(packed.read_bytes())
        header, *rows = csv.reader(text.decode().splitlines())
        kept = sorted({category for _, category in rows})[:INTENTS]
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            some = [row for row in rows if row[1] in kept][: ROWS * 2]
            csv.writer(file).writerows([header, *some])
    return tmp_path


def tiny_model(folder, texts):
    """A small BERT with a vocabulary of these texts, as a checkpoint folder."""
    transformers = pytest.importorskip("transformers")
    words = sorted(set(re.findall(r"[a-z]+", " ".join(texts).lower())))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=32, max_position_embeddings=64, initializer_range=0.1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertModel(config)
    with torch.no_grad():  # it is not pretrained and has seconds to learn: let words stand out
        model.embeddings.word_embeddings.weight.normal_()
        model.embeddings.position_embeddings.weight.zero_()
    model.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")  # there is no GPU
def test_text(banking, capsys):
    pytest.importorskip("datasets")
    with (banking / "train.csv").open() as file:
        model = tiny_model(banking / "model", [row["text"] for row in csv.DictReader(file)])
    folder, out = str(banking), str(banking / "out")
    options = ["--data", folder, "--out", out, "--model", str(model), "--lr", "1e-2"]
    printed = run(
        "hf_text_classification.py", capsys, *options, "--epochs", "40", "--il-epochs", "20"
    )
    assert accuracy(printed) > 75  # 40 steps, a fifth of the labels wrong; chance is 25
    assert re.search(r"steps 40 \| trained \d+ of \d+ candidates \(1\d%\)", printed)
