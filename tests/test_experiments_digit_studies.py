"""Figures 6 and 9 as studies of the bench: their arms, their models, and what they add to the bench."""

import dataclasses
import gzip

import numpy as np
import pytest
import torch

from experiments import records
from experiments.bench import plots
from experiments.bench.cell import Cell
from experiments.bench.claims import NOT_RUN
from experiments.bench.irreducible import Recipe
from experiments.bench.numbers import Results, share_below
from experiments.bench.problems import DATASETS
from experiments.bench.report import SHOWS
from experiments.bench.run import Bench, run
from experiments.bench.training import next_look
from experiments.models import MODELS
from experiments.studies import STUDIES, fig6, fig9
from experiments.studies.digit_claims import DIGIT_CLAIMS
from rholoss import METHODS
from rholoss.demo.data import write_idx


def test_the_network_of_the_digits():
    mlp = MODELS["mlp"](10)
    assert sum(p.numel() for p in mlp.parameters()) == 932_362
    assert mlp(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    for name, p, count in (("mlp_dropout", 0.5, 3), ("small_cnn_dropout", 0.05, 5)):
        dropped = [m.p for m in MODELS[name](10).modules() if "Dropout" in type(m).__name__]
        assert dropped == [p] * count


def test_evaluations_are_even_and_one_is_at_the_end_of_each_epoch():
    looks, step = [], 0
    while step < 186:
        step = next_look(step, 93, 5)
        looks.append(step)
    assert looks == [19, 38, 56, 75, 93, 112, 131, 149, 168, 186]
    assert next_look(40, 93, 5) == 56  # from between
    assert [next_look(step, 78, 1) for step in (0, 77, 78)] == [78, 78, 156]


def test_shares_are_paired_with_the_evaluation_at_the_end_of_their_epoch():
    line = {
        "eval": [(1, 10), (2, 60), (3, 20), (4, 95)],
        "steps_per_epoch": 2,
        "shares": {"correct": [0.1, 0.9]},
    }
    assert share_below(line, "correct", 90) == pytest.approx(10)


def test_steps_to_each_accuracy():
    found = plots.reached({"eval": [(10, 51.0), (20, 50.0), (30, 52.3)]})
    assert found == [(50.0, 10.0), (50.5, 10.0), (51.0, 10.0), (51.5, 30.0), (52.0, 30.0)]


@pytest.mark.parametrize("study", [fig6.STUDY, fig6.OFFICIAL, fig9.STUDY], ids=lambda s: s.name)
def test_studies_name_what_exists(study):
    assert STUDIES[study.name] is study
    for group in study.groups:
        assert set(group.show) <= set(SHOWS)
        for cell in group.arms.values():
            assert cell.dataset in DATASETS
            assert cell.model in MODELS
            assert cell.method in {*METHODS, "svp"}
            assert (cell.il != "none") == (cell.method in ("rho", "negative_il", "svp"))


def test_the_arms_are_the_papers():
    for group in fig6.STUDY.groups:
        assert len(group.arms) == 7
        assert {(c.n_b, c.n_B, c.epochs, c.model) for c in group.arms.values()} == {
            (32, 320, 10, "mlp")
        }
    assert len({group.arms["uniform"].labels for group in fig6.STUDY.groups}) == 4
    for group, model in zip(fig9.STUDY.groups, ("mlp_dropout", "small_cnn_dropout"), strict=True):
        assert {cell.method for cell in group.arms.values()} == {
            "uniform", "rho", "bald", "entropy", "conditional_entropy", "loss_minus_conditional_entropy",
        }  # fmt: skip
        assert {cell.model for cell in group.arms.values()} == {model}
    assert fig6.STUDY.seeds == 3


def test_claims_name_arms_that_exist():
    nothing = Results({}, {}, {})
    for claim in DIGIT_CLAIMS:
        study = STUDIES[claim.study]
        for compare in claim.parts:
            group = next(group for group in study.groups if group.title == compare.group)
            assert {compare.arm, compare.other} <= set(group.arms)
            assert compare.judge(study, nothing) == ("", NOT_RUN)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """MNIST's files with 800 digits, whose class is the place of a bright row."""
    rng = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("digits")
    (root / "MNIST" / "raw").mkdir(parents=True)
    for part, num in (("train", 800), ("t10k", 100)):
        labels = rng.integers(10, size=num)
        images = rng.integers(0, 60, (num, 28, 28))
        images[np.arange(num), 2 * labels + 3] += 150
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            path = root / "MNIST" / "raw" / f"{part}-{kind}-ubyte.gz"
            with gzip.open(path, "wb") as file:
                write_idx(file, values.astype(np.uint8))
    return root


@pytest.mark.parametrize(("method", "il"), [("rho", "mlp, clean holdout"), ("svp", "mlp, clean holdout"),
                                            ("grad_norm_is", "none"), ("bald", "none")])  # fmt: skip
def test_a_run_of_the_digits_from_end_to_end(digits, tmp_path, method, il):
    bench = Bench(digits, folder=tmp_path, recipe=Recipe(epochs=4, batch_size=40))
    model = "mlp_dropout" if method == "bald" else "mlp"
    cell = Cell("mnist", labels="structured 50 %", method=method, il=il, model=model,
                n_b=8, n_B=40, epochs=2, looks=2)  # fmt: skip
    assert run(bench, [("digits", cell)], tmp_path / "out", progress=False) == 1
    (line,) = records.read(tmp_path / "out" / "digits" / "runs.jsonl")
    assert line["error"] is None
    per_epoch = line["steps_per_epoch"]
    assert [step for step, _ in line["eval"]] == [
        -(-per_epoch // 2),
        per_epoch,
        -(-3 * per_epoch // 2),
        2 * per_epoch,
    ]
    assert line["trained"] == 8 * 2 * per_epoch
    assert line["scored"] == (
        400 * 2 // 40 * 40 if method in ("rho", "grad_norm_is", "bald") else 0
    )
    if method == "rho":
        assert line["eval"][-1][1] > 30  # it learns something in these 20 steps
    assert len(line["shares"]["corrupted"]) == 2


def test_a_cell_of_before_is_evaluated_once_an_epoch():
    fields = dataclasses.asdict(Cell())
    del fields["looks"]
    assert Cell.of(fields) == Cell()
