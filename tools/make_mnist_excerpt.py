"""Make src/rholoss/demo/mnist.xz, the demo's excerpt of MNIST, from the four official idx files.

    python tools/make_mnist_excerpt.py train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz \
        t10k-images-idx3-ubyte.gz t10k-labels-idx1-ubyte.gz

The files may be plain, .gz or .xz. No row is drawn at random:
    train    12,000   rows 0, 5, 10, ... of the training file
    holdout   6,000   rows 2, 12, 22, ... of the training file
    test      4,000   rows 0, 1, 5, 6, 10, 11, ... of the test file
The digits come as often as in the files (not balanced), the images are unchanged and the labels are
MNIST's own: the demo flips labels when it loads them. Takes about 15 seconds.
"""

from __future__ import annotations

import argparse
import gzip
import io
import lzma
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rholoss.demo.data import read_idx, write_idx

TARGET = Path(__file__).resolve().parents[1] / "src" / "rholoss" / "demo" / "mnist.xz"
# Found by trying: four bits of the pixel before as context, and no alignment, suit these images.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]


def read(path: Path) -> np.ndarray:
    """An idx file, plain or packed."""
    openers = {".gz": gzip.open, ".xz": lzma.open}
    stream: BinaryIO
    with openers.get(path.suffix, open)(path, "rb") as stream:  # type: ignore[operator]
        return read_idx(stream)


def excerpt(
    train_images: np.ndarray,
    train_labels: np.ndarray,
    test_images: np.ndarray,
    test_labels: np.ndarray,
) -> bytes:
    """The six idx arrays, one after the other, not yet packed."""
    test = np.arange(len(test_labels)) % 5 < 2
    stream = io.BytesIO()
    for images, labels, rows in (
        (train_images, train_labels, slice(0, None, 5)),
        (train_images, train_labels, slice(2, None, 10)),
        (test_images, test_labels, test),
    ):
        write_idx(stream, images[rows])
        write_idx(stream, labels[rows])
    return stream.getvalue()


def main() -> None:
    """Read the command line, write the excerpt."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", type=Path, default=TARGET)
    arguments = vars(parser.parse_args())
    out = arguments.pop("out")
    packed = lzma.compress(
        excerpt(**{name: read(path) for name, path in arguments.items()}), filters=FILTERS
    )
    draft = out.with_name(out.name + ".tmp")
    draft.write_bytes(packed)
    os.replace(draft, out)
    print(f"{out}: {len(packed):,} bytes")


if __name__ == "__main__":
    main()
