"""The language studies: readers, cells, and runs on tiny stand-ins."""

import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fixtures_language import WORDS, write_bundle

from experiments import processes, records
from experiments.language import cells, tasks

pytest.importorskip("transformers", reason="pip install 'rholoss[hf]'")

from experiments.language import __main__ as command
from experiments.language import train


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(autouse=True)
def nothing_was_run_yet(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RESULTS", tmp_path / "committed.jsonl")


@pytest.fixture
def bench(bundle, tmp_path):
    return train.Bench(bundle / "model", bundle, tmp_path / "il", torch.device("cpu"), il_epochs=1)


def test_texts_are_read_halved_and_padded(bundle):
    model = bundle / "model"
    train_half, holdout, test = tasks.load(tasks.TASKS["cola"], model, bundle)
    assert (len(train_half), len(holdout), len(test)) == (650, 650, 70)
    assert train_half.tokens.shape == (650, 48)
    batch = train_half.rows(torch.tensor([3, 5]))
    assert torch.equal(batch["attention_mask"].sum(1), train_half.length[[3, 5]])
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()
    good = train_half.tokens.eq(5 + WORDS.index("good")).any(1)
    assert torch.equal(good.long(), train_half.labels)  # labels stand beside their texts
    assert not train_half.wrong.any()
    first, _, _ = tasks.load(tasks.TASKS["sst2"], model, bundle)
    assert len(first) == 25


def test_rows_are_as_wide_as_the_longest_and_that_changes_no_loss(bench):
    half = bench.texts(tasks.TASKS["cola"])[0]
    model = bench.make(tasks.TASKS["cola"]).eval()
    rows = torch.arange(20)
    narrow, wide = half.rows(rows), half.rows(rows, 48)
    assert narrow["input_ids"].shape == (20, int(half.length[:20].max()))
    assert narrow["input_ids"].shape[1] < wide["input_ids"].shape[1] == 48
    with torch.no_grad():
        losses = [train.losses(model, batch, bench.device) for batch in (narrow, wide)]
    assert torch.allclose(*losses, atol=1e-6)
    widths = []
    for method in ("loss", "uniform"):
        run = train.Run(cells.Cell("cola", method, 0), bench)
        run.model.register_forward_pre_hook(
            lambda _m, _a, inputs: widths.append(inputs["input_ids"].shape), with_kwargs=True
        )
        run.step()
    candidates = next(train.candidates(650, 0))
    all_of_them, some = (int(half.length[rows].max()) for rows in (candidates, candidates[:32]))
    assert widths == [(320, all_of_them), (32, all_of_them), (32, some)]


def test_a_fifth_of_bankings_labels_is_wrong_and_the_test_set_is_clean(bundle):
    parts = tasks.load(tasks.TASKS["banking77"], bundle / "model", bundle)
    assert sum(int(part.wrong.sum()) for part in parts[:2]) == round(0.2 * 308)
    assert int(parts[2].wrong.sum()) == 0
    assert set(parts[2].labels.tolist()) == set(range(77))


def test_missing_texts_are_named(tmp_path, bundle):
    with pytest.raises(FileNotFoundError, match=r"sst2 \(train\.tsv\) was expected at"):
        tasks.load(tasks.TASKS["sst2"], bundle / "model", tmp_path)


def test_the_bundle_holds_the_texts_and_half_the_weights(bundle, tmp_path):
    path = Path(__file__).parents[1] / "tools" / "pack_language.py"
    pack = runpy.run_path(str(path))
    for name, files in (
        ("SST-2", ["train.tsv", "dev.tsv"]),
        ("banking77", ["train.csv", "test.csv"]),
    ):
        (tmp_path / "in" / name).mkdir(parents=True)
        for file in files:
            shutil.copy(bundle / name / file, tmp_path / "in" / name / file)
    shutil.copytree(bundle / "cola", tmp_path / "in" / "cola")
    pack["pack_texts"](tmp_path / "in", tmp_path / "out")
    task = tasks.TASKS["sst2"]
    before, after = (
        tasks.load(task, bundle / "model", where) for where in (bundle, tmp_path / "out")
    )
    assert torch.equal(before[0].tokens, after[0].tokens)
    with pytest.raises(SystemExit, match="has no texts; give the folder that holds CoLA as --data"):
        pack["pack_texts"](tmp_path / "out" / "model", tmp_path / "out")


def test_the_paper_has_its_methods_and_the_fair_protocol_both_ways_to_count():
    found = list(cells.paper(["cola"], [0, 1]))
    assert len(found) == len(set(found)) == 2 * 8
    timed = list(cells.fair(["cola"], [0], 40.0))
    assert len(timed) == len({cell.key() for cell in timed}) == 19
    counted = {(cell.method, cell.il_counts) for cell in timed}
    both = {
        (method, counts)
        for method in ("rho", "annealed", "filtered", "annealed_fresh")
        for counts in (True, False)
    }
    unscored = ("uniform", "random_half", "remembered", "measured")
    assert counted == {(name, False) for name in unscored} | both


def test_matthews_correlation():
    guess, label = torch.tensor([1, 1, 0, 0, 1, 0]), torch.tensor([1, 0, 0, 0, 1, 1])
    tp, tn, fp, fn = 2, 2, 1, 1
    by_hand = (tp * tn - fp * fn) / ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    assert train.matthews(guess.double(), label.double()) == pytest.approx(by_hand)
    assert train.matthews(torch.ones(4).double(), torch.tensor([0, 1, 0, 1]).double()) == 0.0


def test_biases_and_norms_do_not_decay(bench):
    model = bench.make(tasks.TASKS["cola"])
    deep, flat = train.adamw(model.parameters(), 2e-5).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert all("LayerNorm" in names[id(p)] or "bias" in names[id(p)] for p in flat["params"])
    assert not any("LayerNorm" in names[id(p)] or "bias" in names[id(p)] for p in deep["params"])
    assert len(deep["params"]) + len(flat["params"]) == len(names)
    assert (deep["weight_decay"], flat["weight_decay"]) == (0.02, 0.0)


def test_settings_are_those_of_the_paper():
    assert (cells.CANDIDATES, round(cells.KEEP * cells.CANDIDATES)) == (320, 32)
    settings = {name: (t.lr, t.epochs, t.targets) for name, t in tasks.TASKS.items()}
    assert settings["cola"] == (2e-5, 100, (0.75, 0.80))
    assert settings["sst2"] == (2e-5, 15, (0.825, 0.90))


def test_texts_of_several_lines_keep_their_words_apart(tmp_path):
    (tmp_path / "banking77").mkdir()
    for name in ("train", "test"):
        content = 'text,category\n"lost\ncard",intent\nmoney,other\n'
        (tmp_path / "banking77" / f"{name}.csv").write_text(content)
    task = tasks.TASKS["banking77"]
    texts, names = tasks._read(task, task.train, tmp_path)
    assert texts == ["lost\ncard", "money"]
    assert names == ["intent", "other"]


def test_the_small_model_has_two_layers_of_the_same_weights(bench):
    small, same = (bench.make(tasks.TASKS["cola"], size) for size in ("small", "same"))
    assert len(small.bert.encoder.layer) == 2
    assert len(same.bert.encoder.layer) == 3
    one, other = (m.bert.encoder.layer[0].attention.self.query.weight for m in (small, same))
    assert torch.equal(one, other)
    assert one.dtype == torch.float32


def test_svp_keeps_the_tenth_of_highest_entropy(bench):
    half = bench.texts(tasks.TASKS["cola"])[0]
    proxy = bench.make(tasks.TASKS["cola"])
    rows = train.core_set(proxy, half, bench.device)
    assert len(rows) == 65
    with torch.no_grad():
        batch = half.rows(torch.arange(650))
        batch.pop("labels")
        p = proxy.eval()(**batch).logits.softmax(1)
    entropy = torch.distributions.Categorical(p).entropy()
    assert entropy[rows].min() >= entropy.sort(descending=True).values[64] - 1e-5


def test_svp_trains_on_rows_that_are_fixed(bench):
    run = train.Run(cells.Cell("cola", "svp", 0), bench)
    assert len(set(run.rows.tolist())) == 65
    seen = []
    run.select.on_scores.append(lambda step, stats, chosen: seen.extend(chosen.index.tolist()))
    for _ in range(2):
        run.step()
    assert len(seen) == 64
    assert set(seen) <= set(run.rows.tolist())


def test_irreducible_losses_are_kept_in_one_small_file(bench, monkeypatch):
    task = tasks.TASKS["cola"]
    first = bench.fitted(task, "small")
    assert first.loss.shape == (650,)
    assert first.seconds > 0
    (kept,) = bench.store.iterdir()
    assert kept.stat().st_size < 10_000
    monkeypatch.setattr(train.rho, "fit_irreducible", None)  # not called again
    again = train.Bench(bench.model, bench.data, bench.store, bench.device, il_epochs=1)
    found = again.fitted(task, "small")
    assert torch.equal(found.loss, first.loss)
    assert torch.equal(found.core_set, first.core_set)
    assert found.seconds == first.seconds
    other = train.Bench(bench.model, bench.data, bench.store, bench.device, il_epochs=2)
    with pytest.raises(TypeError):  # of another fit nothing is taken
        other.fitted(task, "small")


def test_runs_write_lines_and_a_page_and_are_not_run_twice(bundle, tmp_path, capsys, monkeypatch):
    out = tmp_path / "language" / "runs.jsonl"
    common = [
        "--data",
        str(bundle),
        "--store",
        str(tmp_path / "il"),
        "--out",
        str(out),
        "--seeds",
        "0",
        "--tasks",
        "cola",
        "--il-epochs",
        "1",
    ]
    command.main(["paper", *common, "--epochs", "1"])
    lines = list(records.read(out))
    assert [line["cell"]["method"] for line in lines] == [*cells.PAPER_METHODS, "rho"]
    for line in lines:
        assert line["steps"] == 3  # 650 rows: 320, 320 and 10 candidates
        assert line["trained"] == 65
        assert line["curve"][-1][0] == 3
        scores = line["cell"]["method"] in ("loss", "grad_norm", "grad_norm_is", "rho")
        assert line["scored"] == (650 if scores else 0)
    capsys.readouterr()
    command.main(["paper", *common, "--epochs", "1"])
    assert "0 runs to do" in capsys.readouterr().out
    monkeypatch.setattr(command, "RESULTS", out)  # what is committed is made again on demand alone
    with pytest.raises(SystemExit, match="--again needs --out"):
        command.main(["paper", *common, "--again"])
    elsewhere = ["paper", *common, "--epochs", "1", "--methods", "uniform"]
    elsewhere[elsewhere.index(str(out))] = str(tmp_path / "again.jsonl")
    for words, number in (
        (elsewhere, 0),
        ([*elsewhere, "--again"], 1),
        ([*elsewhere, "--again"], 0),
    ):
        command.main(words)
        assert f"{number} runs to do" in capsys.readouterr().out
    command.main(["report", "--out", str(tmp_path / "again.jsonl")])
    assert (tmp_path / "again.md").exists()
    assert not (tmp_path / "README.md").exists()
    command.main(["report", "--out", str(out)])
    page = (out.parent / "README.md").read_text()
    assert "cola, the paper's protocol" not in page  # runs that were cut short are other runs
    assert not list(out.parent.glob("*.png"))  # runs that were cut short are not plotted
    options = common[: common.index("--il-epochs")]
    whole = ["--methods", "uniform", "rho", "--seconds", "-1"]
    capsys.readouterr()
    command.main(
        ["paper", *options, "--epochs", "1", *whole]
    )  # nor do these fits stand for whole ones
    assert "2 runs to do" in capsys.readouterr().out
    made = [cells.cell_of(line) for line in lines]
    assert {cell.method for cell in made if cell.shortened} == set(cells.PAPER_METHODS)
    made = cells.paper(["cola"], [0], il_epochs=1)
    assert {c.method for c in made if c.shortened} == {"rho", "svp", "negative_il"}
    assert str(tmp_path) not in page


def test_processes_share_the_runs(tmp_path, monkeypatch):
    made = []

    def run_cell(cell, bench):
        made.append(cell)
        return {"curve": []}

    monkeypatch.setattr(train, "run_cell", run_cell)
    encoder = SimpleNamespace(encoder=cells.MINILM)
    monkeypatch.setattr(command, "_bench", lambda a: encoder)
    (tmp_path / command.PACE).write_text("{}")
    everything = list(cells.paper(["cola"], [0]))
    assert processes.claim(tmp_path, everything[2].key())  # by another process, which is at it
    common = ["paper", "--tasks", "cola", "--seeds", "0", "--claims", str(tmp_path)]
    command.main([*common, "--out", str(tmp_path / "runs.jsonl")])
    assert made == [*everything[:2], *everything[3:]]
    command.main([*common, "--out", str(tmp_path / "more.jsonl")])
    assert len(made) == len(everything) - 1
    encoder.encoder = "albert-base-v2"  # other runs, whatever is there of the first
    command.main([*common, "--out", str(tmp_path / "runs.jsonl")])
    assert [cell.encoder for cell in made[-len(everything) :]] == ["albert-base-v2"] * 8


def test_what_cannot_be_run_is_told_before_anything_is_loaded(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"has no folder `model`.*pack_language\.py"):
        command.main(["paper", "--data", str(tmp_path), "--out", str(tmp_path / "runs.jsonl")])
    with pytest.raises(SystemExit, match="--budget 0: give more than 0 seconds"):
        command.main(["fair", "--budget", "0"])
    with pytest.raises(SystemExit, match=r"mine\.jsonl has no runs"):
        command.main(["report", "--out", str(tmp_path / "mine.jsonl")])
    with pytest.raises(SystemExit):
        command.main(["paper", "--methods", "rhoo"])
    assert "invalid choice: 'rhoo'" in capsys.readouterr().err


def test_a_line_names_the_command_without_how_it_was_shared_out(monkeypatch):
    words = "paper --tasks cola --store=x/y --seconds 300 --side-by-side 4 --seeds 0 1 --claims z"
    monkeypatch.setattr("sys.argv", ["experiments.language", *words.split(), "--seconds", "270"])
    expected = "python -m experiments.language paper --tasks cola --seeds 0 1"
    assert command._about()["command"] == expected
