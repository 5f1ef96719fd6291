"""The toy maps: kinds of points as they are said to be, what is counted, and a page and picture from it."""

import numpy as np
import pytest
import torch

from experiments import records
from experiments.toy_maps import page, run
from experiments.toy_maps.problem import BULKS, ISLAND_Y, KINDS, RING, SHARES, clean, holdout, make
from experiments.toy_maps.run import METHODS, PHASES, Run, train_one


def test_points_are_of_their_kind():
    plane = make(6000, seed=1)
    share = torch.bincount(plane.kind, minlength=4) / len(plane)
    np.testing.assert_allclose(share.numpy(), SHARES, atol=0.02)
    x, y = plane.x.numpy(), plane.y.numpy()
    redundant, useful, noisy, outlying = (plane.kind.numpy() == number for number in range(4))
    near = np.linalg.norm(x[:, None] - BULKS, axis=2).argmin(1)
    assert (near[redundant] == y[redundant]).mean() > 0.999
    assert np.abs(x[useful, 1] - ISLAND_Y).max() < 1.2
    radius = np.linalg.norm(x[outlying], axis=1)
    assert RING[0] <= radius.min()
    assert radius.max() <= RING[1]
    assert 0.4 < y[outlying].mean() < 0.6
    # Wrong labels: in the bulks they disagree with the bulk, and the islands have their part of them.
    low = noisy & (x[:, 1] < 1)
    assert (near[low] != y[low]).mean() > 0.999
    assert (x[noisy, 1] > 1).mean() == pytest.approx(SHARES[1] / (SHARES[0] + SHARES[1]), abs=0.05)


def test_neighbouring_islands_are_of_different_classes():
    plane = make(6000, seed=2, shares=(0.0, 1.0, 0.0, 0.0))
    number = ((plane.x[:, 0] + 3.5) / 1.4).round().long().clamp(0, 5)
    assert (number % 2 == plane.y).float().mean() > 0.99


def test_holdout_and_test_points_have_no_outliers_and_the_test_no_noise():
    assert set(holdout(2000, 0).kind.tolist()) == {0, 1, 2}
    assert set(clean(2000, 0).kind.tolist()) == {0, 1}


def test_shares_are_of_the_picks_of_a_phase(monkeypatch):
    train = make(200, seed=0)
    picked = torch.stack([torch.arange(10) + step for step in range(PHASES[-1][1])]) % 200
    found = Run("rho", picked, [], []).shares(train)
    start, stop = PHASES[1]
    kinds = train.kind[picked[start:stop]].flatten()
    assert found[1] == pytest.approx(
        [(kinds == number).float().mean().item() for number in range(4)]
    )
    assert all(sum(phase) == pytest.approx(1) for phase in found)


@pytest.fixture(scope="module")
def short():
    """One seed, a few steps, irreducible losses that know the kinds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "PHASES", ((0, 8), (8, 24)))
        patch.setattr(page, "PHASES", ((0, 8), (8, 24)))
        train = make(1600, seed=0)
        il = torch.where(train.kind >= 2, 3.0, 0.1)  # noisy and outlying points cannot be foreseen
        yield train, {method: train_one(method, train, il, seed=0) for method in METHODS}


def test_all_methods_see_the_same_candidates_and_rho_leaves_what_cannot_be_learnt(short):
    train, runs = short
    order = torch.randperm(1600, generator=torch.Generator().manual_seed(0)).split(run.CANDIDATES)
    for found in runs.values():
        assert found.picked.shape == (24, 16)
        assert set(found.picked[0].tolist()) <= set(order[-1].tolist())
        assert len(found.accuracy) == len(found.maps) == 2
    bad = {m: (train.kind[r.picked] >= 2).float().mean().item() for m, r in runs.items()}
    assert bad["rho"] < 0.05 < bad["uniform"] < bad["loss"]


def test_the_picture_and_the_page(short, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from PIL import Image

    from experiments.toy_maps import draw

    train, runs = short
    monkeypatch.setattr(draw, "PHASES", run.PHASES)
    draw.draw(train, runs, tmp_path / "maps.png")
    with Image.open(tmp_path / "maps.png") as image:
        assert min(image.size) > 300
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=10**6)}
    for kind in KINDS:  # the strips have each kind in its own colour
        assert tuple(bytes.fromhex(draw.COLOURS[kind][1:])) in colours
    assert list(tmp_path.iterdir()) == [tmp_path / "maps.png"]


def test_the_page_has_the_means_of_all_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PHASES", ((0, 8), (8, 24)))

    def line(seed, share):
        result = {
            "accuracy": [0.5, share],
            "shares": [[0.7, 0.1, 0.1, 0.1], [share, 1 - share, 0, 0]],
        }
        about = {
            "command": "c",
            "device": "cpu",
            "torch": "t",
            "python": "p",
            "date": "d",
            "seconds": 1.0,
        }
        return {"seed": seed, "runs": dict.fromkeys(METHODS, result), **about}

    for seed, share in ((0, 0.9), (1, 0.4), (0, 0.2)):  # seed 0 was run again
        records.append(tmp_path / "runs.jsonl", line(seed, share))
    page.write(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "Means over 2 seeds (0, 1):" in text
    assert "The picture shows seed 0." in text
    page.write(tmp_path, pictured=5)
    assert "The picture shows seed 5." in (tmp_path / "README.md").read_text()
    assert "|  | 9-24 | 30 | 70 | 0 | 0 | 30.0 |" in text
