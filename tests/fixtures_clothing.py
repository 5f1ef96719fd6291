"""A tiny Clothing-1M in its official layout."""

from pathlib import Path

import numpy as np
from PIL import Image


def save(path: Path, value: int, size: tuple[int, int] = (32, 32)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, np.uint8)).save(path)


def write_clothing1m(
    root: Path, noisy: dict[str, int], clean: dict[str, int], lists: dict[str, list[str]]
) -> Path:
    """Images of one colour each, by their label; sizes differ from what the models take."""
    folder = root / "clothing1m"
    folder.mkdir(parents=True)
    for name, keys in lists.items():
        (folder / f"{name}_key_list.txt").write_text("".join(f"{key}\n" for key in keys))
        for key in keys:
            save(folder / key, 15 * clean.get(key, noisy.get(key, 0)) + 20, size=(300, 260))
    for name, labels in (("noisy", noisy), ("clean", clean)):
        lines = "".join(f"{key} {label}\n" for key, label in labels.items())
        (folder / f"{name}_label_kv.txt").write_text(lines)
    return root
