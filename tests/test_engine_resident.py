import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rholoss.engine import CropFlip, Resident, Streamed
from rholoss.engine.resident import _check_memory, memory_needed
from rholoss.errors import RholossError

IMAGES = torch.randint(
    0, 256, (10, 3, 8, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
LABELS = torch.arange(10)
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


def normalised(images):
    pixels = images.float() / 255
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def test_rows_come_normalised_and_in_order():
    data = Resident(IMAGES, LABELS, mean=MEAN, std=STD, device="cpu")
    rows = torch.tensor([3, 0, 3])
    x, y = data.batch(rows)
    assert torch.allclose(x, normalised(IMAGES[rows]), atol=1e-5)
    assert y.tolist() == [3, 0, 3]
    assert len(data) == 10


def test_one_number_is_for_all_channels():
    one, each = (
        Resident(IMAGES, LABELS, mean=mean, std=std, device="cpu")
        for mean, std in ((0.5, np.float32(0.25)), ([0.5] * 3, [0.25] * 3))
    )
    rows = torch.arange(10)
    assert torch.equal(one.batch(rows)[0], each.batch(rows)[0])


def test_pixels_of_floats_are_in_0_to_1():
    whole, floats = (
        Resident(images, LABELS, mean=MEAN, std=STD, device="cpu")
        for images in (IMAGES, IMAGES.float() / 255)
    )
    rows = torch.arange(10)
    assert torch.allclose(whole.batch(rows)[0], floats.batch(rows)[0], atol=1e-5)


def test_without_a_draw_the_images_are_whole():
    data = Resident(IMAGES, LABELS, augment=CropFlip(pad=2), device="cpu")
    x, _ = data.batch(LABELS)
    assert torch.equal(x, IMAGES.float())


def test_crops_and_flips_are_those_of_the_padded_image():
    data = Resident(IMAGES, LABELS, augment=CropFlip(pad=2), device="cpu")
    drawn = data.draw(10, torch.Generator().manual_seed(1))
    x, _ = data.batch(LABELS, drawn)
    padded = F.pad(IMAGES, (2, 2, 2, 2)).float()
    for row in range(10):
        top, left = (drawn[:2, row] * 5).long().tolist()
        crop = padded[row, :, top : top + 8, left : left + 6]
        assert torch.equal(x[row], crop.flip(2) if drawn[2, row] < 0.5 else crop)
    assert (drawn[2] < 0.5).any()
    assert (drawn[2] >= 0.5).any()


def test_every_place_is_drawn_as_often():
    data = Resident(IMAGES, LABELS, augment=CropFlip(pad=1, flip=False), device="cpu")
    drawn = data.draw(6000, torch.Generator().manual_seed(0))
    tops = (drawn[0] * 3).long()
    assert torch.bincount(tops).tolist() == pytest.approx([2000] * 3, rel=0.08)
    x, _ = data.batch(torch.zeros(6000, dtype=torch.long), drawn)
    assert x.flatten(1).unique(dim=0).shape[0] == 9


def test_what_is_no_image_is_left_as_it_is():
    data = Resident(torch.arange(12.0).view(4, 3), torch.zeros(4), ids=[7, 5, 3, 1], device="cpu")
    x, _ = data.batch(torch.tensor([2]))
    assert x.tolist() == [[6, 7, 8]]
    assert data.ids.tolist() == [7, 5, 3, 1]
    assert data.draw(1, torch.Generator()) is None


def test_memory_is_known_before_it_is_taken():
    assert memory_needed(IMAGES, LABELS, None) == 10 * (3 * 8 * 6 + 8 + 8)
    assert memory_needed(IMAGES, LABELS, CropFlip(pad=2)) == 10 * (3 * 12 * 10 + 8 + 8)
    assert memory_needed(IMAGES, torch.zeros(10, 7), None) == 10 * (3 * 8 * 6 + 7 * 4 + 8)
    assert memory_needed(IMAGES.numpy(), [0] * 10) == 10 * (3 * 8 * 6 + 8 + 8)


def test_memory_that_torch_keeps_for_later_is_free(monkeypatch):
    free = [100]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 2**30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(free.pop() + 1000))
    _check_memory(800, torch.device("cuda", 0))
    assert free == [1100]
    _check_memory(800, torch.device("cuda", 0))  # it fits: nothing is given back
    assert free == [1100]
    with pytest.raises(
        RholossError, match=r"needs 0\.00 GiB on cuda:0.*`rholoss\.engine\.Streamed`"
    ):
        _check_memory(8000, torch.device("cuda", 0))


def test_what_does_not_fit_together_is_told():
    with pytest.raises(
        RholossError, match="must have as many rows, and at least one, but have 10, 9 and 10"
    ):
        Resident(IMAGES, LABELS[:9], device="cpu")
    with pytest.raises(RholossError, match=r"`augment` is for images \[N, C, H, W\]"):
        Resident(torch.zeros(10, 4), LABELS, augment=CropFlip(), device="cpu")
    for given in ({"mean": MEAN}, {"std": STD}, {"mean": MEAN[:2], "std": STD}):
        with pytest.raises(RholossError, match="one value, or one for each of 3 channels, but are"):
            Resident(IMAGES, LABELS, device="cpu", **given)
    with pytest.raises(RholossError, match="for each of 1 channels"):  # and not three of one
        Resident(IMAGES[:, :1], LABELS, mean=MEAN, std=STD, device="cpu")
    with pytest.raises(RholossError, match="`targets` has 9 rows, but the data has 10"):
        Resident(IMAGES, LABELS, device="cpu").with_targets(LABELS[:9])


@pytest.mark.parametrize(
    ("ids", "some"),
    [
        ([f"image {i}" for i in range(10)], "'image 0', 'image 1', 'image 2'"),
        (torch.arange(10) - 1, "-1, 8"),
        (torch.arange(10) * 10**9, "0, 9000000000"),
    ],
)
@pytest.mark.parametrize("kind", [Resident, Streamed])
def test_ids_that_no_table_can_be_kept_by_are_refused(kind, ids, some):
    with pytest.raises(RholossError, match=f"`ids` hold {some}, but the engine keeps tables by id"):
        kind(IMAGES, LABELS, ids=ids, device="cpu")
