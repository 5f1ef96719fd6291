"""Data on the host: the same batches, choices and weights as with data on the device."""

import numpy as np
import pytest
import torch
from torch import nn

import rholoss as rho
from rholoss.engine import CropFlip, Evaluator, Resident, Streamed, Trainer, fit_resident
from rholoss.errors import RholossError

N, STEPS = 500, 25
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (N, 3, 8, 8), dtype=torch.uint8, generator=GENERATOR)
LABELS = torch.randint(0, 4, (N,), generator=GENERATOR)
IL = torch.rand(N, generator=GENERATOR)
PIXELS = {"mean": (0.5,) * 3, "std": (0.2,) * 3, "augment": CropFlip(pad=1), "device": "cpu"}


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    )


def trained(data, steps=STEPS, **options):
    made = Trainer(
        make_model(), data, total_steps=STEPS, irreducible=IL, candidates=80, seed=3, **options
    )
    made.seen = []
    made.on_flush.append(lambda step, index, losses: made.seen.extend(index))
    made.train(steps)
    made.flush()
    return made


def alike(one, other):
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs) and all(map(torch.equal, one.seen, other.seen))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"overlap": True}, {"method": "uniform"},
        {"schedule": rho.window(4, 15)}, {"schedule": rho.annealed(STEPS, switch=0.4, drop=0.2)},
    ],
    ids=str,
)  # fmt: skip
def test_a_run_is_the_same_wherever_the_data_is(options):
    assert alike(
        trained(Resident(IMAGES, LABELS, **PIXELS), **options),
        trained(Streamed(IMAGES, LABELS, **PIXELS), **options),
    )


def test_a_file_that_is_read_only_will_do(tmp_path):
    np.save(tmp_path / "images.npy", IMAGES.numpy())
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    assert alike(
        trained(Resident(IMAGES, LABELS, **PIXELS)), trained(Streamed(mapped, LABELS, **PIXELS))
    )


def test_batches_parts_and_other_targets_are_those_of_resident_data():
    here, there = Resident(IMAGES, LABELS, **PIXELS), Streamed(IMAGES, LABELS, **PIXELS)
    rows = torch.tensor([7, 499, 7, 0])
    drawn = here.draw(4, torch.Generator().manual_seed(5))
    assert torch.equal(drawn, there.draw(4, torch.Generator().manual_seed(5)))
    part = torch.arange(3, N, 2)
    for one, other, at in (
        (here, there, rows),
        (here.take(part), there.take(part), rows[[0, 2, 3]]),
        (here.take(part).take(part[:9]), there.take(part).take(part[:9]), torch.arange(9)),
        (here.with_targets(3 - LABELS), there.with_targets(3 - LABELS), rows),
    ):
        for draw in (None, drawn[:, : len(at)] if len(at) <= 4 else None):
            for ours, theirs in zip(one.batch(at, draw), other.batch(at, draw), strict=True):
                assert torch.equal(ours, theirs)
        assert torch.equal(one.ids, other.ids)


def test_plain_inputs_and_ids_of_their_own():
    x = IMAGES.float().flatten(1)
    data = Streamed(x, LABELS, ids=torch.arange(N) + 1000, device="cpu")
    found, labels = data.batch(torch.tensor([4, 2]))
    assert torch.equal(found, x[[4, 2]])
    assert torch.equal(labels, LABELS[[4, 2]])
    assert data.ids[4] == 1004


def test_irreducible_losses_and_evaluation_take_it_too():
    made = [
        fit_resident(make_model, kind(IMAGES, LABELS, **PIXELS), folds=2, epochs=1)
        for kind in (Resident, Streamed)
    ]
    losses = [il.lookup(torch.arange(N)) for il in made]
    assert torch.equal(*losses)
    results = [
        Evaluator(make_model(), kind(IMAGES, LABELS, **PIXELS), num_classes=4)()
        for kind in (Resident, Streamed)
    ]
    assert results[0] == results[1]


def test_a_resumed_run_goes_on_with_the_next_rows(tmp_path):
    whole = trained(Streamed(IMAGES, LABELS, **PIXELS))
    first = trained(Streamed(IMAGES, LABELS, **PIXELS), steps=8)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = trained(Streamed(IMAGES, LABELS, **PIXELS), steps=3)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    second.seen = list(first.seen)
    second.train(STEPS - 8)
    second.flush()
    assert alike(whole, second)


def test_what_was_not_foreseen_is_fetched_then():
    data = Streamed(IMAGES, LABELS, **PIXELS)
    window = data.window(6)
    window.prefetch(torch.tensor([1, 2, 3]))
    rows = torch.tensor([9, 8])
    window.bring(rows)
    x, y = window.batch(rows)
    assert torch.equal(x, data.batch(rows)[0])
    assert torch.equal(y, LABELS[[9, 8]])


def test_bad_arguments():
    with pytest.raises(RholossError, match="but have 500, 3 and 500"):
        Streamed(IMAGES, LABELS[:3])
    with pytest.raises(RholossError, match="lie on meta already"):
        Streamed(IMAGES.to("meta"), LABELS)
