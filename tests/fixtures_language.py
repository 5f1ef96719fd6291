"""Texts in the official layouts, and a tiny encoder, as `tools/pack_language.py` lays them out."""

import lzma
import random
from pathlib import Path

import torch

WORDS = ["bank", "card", "lost", "time", "good", "bad", "film", "money", "was", "the"]


def write_bundle(folder: Path) -> Path:
    import transformers

    draw = random.Random(0)

    def sentence():
        return " ".join(draw.choices(WORDS, k=draw.randint(2, 6)))

    def lines(rows, make):
        return "".join(
            make(text, int("good" in text)) + "\n" for text in (sentence() for _ in range(rows))
        )

    (folder / "cola").mkdir()
    for name, rows in [("in_domain_train", 1300), ("in_domain_dev", 40), ("out_of_domain_dev", 30)]:
        content = lines(rows, lambda text, label: f"src\t{label}\t\t{text}")
        (folder / "cola" / f"{name}.tsv.xz").write_bytes(lzma.compress(content.encode()))
    (folder / "SST-2").mkdir()
    for name in ("train", "dev"):
        content = "sentence\tlabel\n" + lines(50, lambda text, label: f"{text} \t{label}")
        (folder / "SST-2" / f"{name}.tsv").write_text(content)
    (folder / "banking77").mkdir()
    for name in ("train", "test"):
        content = "".join(f'"{sentence()}, please",intent_{row % 77:02}\n' for row in range(308))
        (folder / "banking77" / f"{name}.csv").write_text("text,category\n" + content)
    model = folder / "model"
    model.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (model / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizerFast(str(model / "vocab.txt")).save_pretrained(model)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertModel(config).half().save_pretrained(model)
    return folder
