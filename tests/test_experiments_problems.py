"""Labels and splits of the bench: noise by its name, human labels, CIFAR-100 Relevance, CINIC's own split."""

import numpy as np
import pytest
import torch

from experiments.bench import problems
from experiments.bench.problems import Arrays, Problems, label_set, relevance
from experiments.datasets import Images
from experiments.studies import fig2, table2, table3
from rholoss.errors import RholossError


def arrays(num=2000, num_classes=10, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(num) % num_classes)
    images = np.zeros((num, 3, 32, 32), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = np.arange(num) % 256, np.arange(num) // 256
    part = Images(images, labels)
    return Arrays(part, np.arange(num) % 2 == 1, Images(images[:200], labels[:200]), num_classes)


def test_noise_by_its_name():
    data = arrays()
    clean = label_set("clean", "x", data)
    assert not clean.corrupted.any()
    ten = label_set("noise 10 %", "x", data)
    assert ten.corrupted.sum() == 200
    assert ((ten.labels != data.train.labels) == ten.corrupted).all()
    authors = label_set("noise 10 % any", "x", data)
    assert 160 <= authors.corrupted.sum() < 200  # about a tenth of 200 drew their own label
    assert ((authors.labels != data.train.labels) == authors.corrupted).all()
    assert label_set("noise 20 %", "x", data).corrupted.sum() == 400
    half = label_set("structured 50 %", "x", data)
    assert half.corrupted.sum() == 300  # half of each of three classes


def test_the_same_noise_whatever_was_drawn_before():
    first = label_set("noise 10 %", "x", arrays()).labels
    np.random.default_rng().random(5)
    assert (first == label_set("noise 10 %", "x", arrays()).labels).all()


def test_unknown_labels_are_told():
    with pytest.raises(RholossError, match=r"`labels` is 'worse', which cinic10 does not have"):
        label_set("worse", "cinic10", arrays())
    # Not taken for 'any' and 'at random', nor looked for among human labels.
    for name in ("noise 10 % first", "structured 50 % any", "noise 10%", "worst"):
        with pytest.raises(RholossError, match=rf"`labels` is '{name}', .* for cifar10 'aggre'"):
            label_set(name, "cifar10", arrays())


def test_human_labels_of_another_data_set_are_told(tmp_path):
    (tmp_path / "cifar-n").mkdir()
    data = arrays()
    for labels in (data.train.labels[1:], data.train.labels + 5):
        np.savez(tmp_path / "cifar-n" / "CIFAR-10_human.npz", worse_label=labels)
        with pytest.raises(
            RholossError, match=r"The human labels 'worse' are .* has 2000 training"
        ):
            label_set("worse", "cifar10", data, tmp_path)


def test_relevance_keeps_twenty_classes_whole_and_six_percent_of_the_others():
    thin = relevance(arrays(10_000, 100))
    counts = np.bincount(thin.train.labels, minlength=100)
    assert sorted(counts) == [6] * 80 + [100] * 20
    rare = counts[thin.train.labels] == 6
    assert (thin.low_relevance == rare).all()
    assert 0.19 < rare.mean() < 0.20  # 480 of 2480
    assert thin.holdout.mean() == pytest.approx(0.5, abs=0.01)
    # The test set follows the same classes: a rare one has 6 % of about two images there, that is none.
    assert set(np.unique(thin.test.labels)) <= set(np.flatnonzero(counts == 100))
    assert len(thin.test.labels) > 20


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setitem(problems.DATASETS, "made", lambda root: arrays())
    return Problems()


def test_training_labels_are_noisy_and_the_holdout_comes_both_ways(made):
    problem = made.get("made", "noise 10 %", "half")
    clean = torch.as_tensor(arrays().train.labels)
    assert torch.equal(problem.clean.targets.cpu(), clean[problem.train.ids.cpu()])
    assert torch.equal(problem.holdout.targets.cpu(), clean[problem.holdout.ids.cpu()])
    for noisy in (problem.train, problem.noisy_holdout):
        ids = noisy.ids.cpu()
        assert torch.equal(noisy.targets.cpu(), problem.targets[ids])
        assert torch.equal(noisy.targets.cpu() != clean[ids], problem.corrupted[ids])
        assert 0.05 < float(problem.corrupted[ids].float().mean()) < 0.15


def test_rows_and_ids_stay_together(made):
    problem = made.get("made", "clean", "half")
    for data in (problem.train, problem.holdout):
        x, _ = data.batch(torch.arange(len(data)))
        pixels = ((x[:, 0, 0, :2] + 1) * 127.5).round().long()
        assert torch.equal(pixels[:, 0] + 256 * pixels[:, 1], data.ids)
    assert problem.corrupted is None


def test_the_whole_set_has_no_holdout_and_images_are_shared(made):
    whole = made.get("made", "clean", "whole")
    assert whole.holdout is None
    assert whole.noisy_holdout is None
    assert len(whole.train) == 2000
    noisy = made.get("made", "noise 10 %", "whole")
    assert noisy.train.inputs is whole.train.inputs
    assert made.get("made", "noise 10 %", "whole") is noisy


def test_unknown_names_are_told(made):
    with pytest.raises(RholossError, match=r"`dataset` is 'cifar11'; known are cifar10, cifar100"):
        made.get("cifar11", "clean", "half")
    with pytest.raises(RholossError, match=r"`part` is 'third'; use 'half' or 'whole'"):
        made.get("made", "clean", "third")


def test_cinic_has_a_split_of_its_own(monkeypatch):
    def part(name, root):
        value = {"train": 1, "valid": 2, "test": 3}[name]
        images = np.full((6, 3, 32, 32), value, np.uint8)
        return Images(images, np.arange(6) % 10)

    monkeypatch.setattr(problems, "cinic10", part)
    problem = Problems().get("cinic10", "clean", "half")
    assert problem.train.ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert problem.holdout.ids.tolist() == [6, 7, 8, 9, 10, 11]
    x, _ = problem.holdout.batch(torch.arange(1))
    assert float(x[0, 0, 0, 0]) == pytest.approx((2 / 255 - 0.4789) / 0.2421, rel=1e-4)


def test_table_3_trains_on_what_is_the_training_set_of_each():
    """CIFAR's is halved elsewhere and whole here; CINIC-10 has a holdout set of its own, left out here."""
    parts = {cell.dataset: cell.part for cell in table3.STUDY.cells()}
    assert parts == {"cifar10": "whole", "cifar100": "whole"}
    uniform, chosen = table3.CINIC10.groups[0].arms.values()
    assert uniform == table2.CINIC10.groups[0].arms["uniform"]
    assert chosen == fig2.CINIC10.groups[0].arms["RHO-LOSS, no holdout"]
