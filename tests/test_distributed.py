"""The same choice on 2 and 4 processes as on one."""

import itertools
import json

import numpy as np
import pytest
import ranks_task as task
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks_run import launch
from torch.nn import functional as F

import rholoss as rho
from rholoss.distributed import Ranks, assign, is_running, leave
from rholoss.errors import RholossError

needs_fsdp = pytest.mark.skipif(not task.SHARDED, reason="no FSDP2 on the CPU: torch is too old")


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    """What each check returned, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    return {**launch("ranks_task.py", request.param, folder), "folder": folder}


def alone(ranks, method="rho", **options):
    """One process with the candidates of all ranks."""
    given = {"irreducible": task.problem()[2], "keep": 0.1, **options}
    model, select = task.network(), rho.Selector(method, **given)
    chosen = task.train(model, select, [task.rows_of(s, ranks) for s in range(task.STEPS)])
    return model, chosen, select


def same_parameters(results, model):
    for result in results:
        for ours, theirs in zip(result["parameters"], model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-6)


def together(results, step):
    """The ids that all ranks trained on at a step, in rank order."""
    return torch.cat([result["chosen"][step] for result in results]).tolist()


@pytest.mark.parametrize(
    ("check", "method", "options"),
    [
        ("global_ddp", "rho", {}),
        ("global_by_number", "rho", {}),
        ("global_importance", "grad_norm_is", {}),
        ("global_uniform", "uniform", {}),
        pytest.param("global_fsdp", "rho", {}, marks=needs_fsdp),
    ],
)
def test_the_global_choice_is_that_of_one_process(found, check, method, options):
    results = found[check]
    ranks = len(results)
    model, chosen, select = alone(ranks, method, **options)
    for step in range(task.STEPS):
        assert sorted(together(results, step)) == sorted(chosen[step].tolist())
        assert {len(result["chosen"][step]) for result in results} == {4}
    same_parameters(results, model)
    ledgers = [result["ledger"] for result in results]
    for count in ("candidates", "trained", "scored"):
        assert sum(ledger[count] for ledger in ledgers) == getattr(select.ledger, count)
    if method == "rho":
        scores = torch.cat([result["score"] for result in results]).sort().values
        torch.testing.assert_close(scores, select.selection.score.sort().values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("check", ["local_ddp", pytest.param("local_fsdp", marks=needs_fsdp)])
def test_the_local_choice_is_that_of_each_rank_with_its_own_candidates(found, check):
    results = found[check]
    ranks, model = len(results), task.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y, il = task.problem()
    for step in range(task.STEPS):
        ids = []
        for rank in range(ranks):
            select = rho.Selector("rho", irreducible=il, keep=0.1)
            ids.append(select(model, task.batch_of(task.rows_of(step, ranks, rank)))[0])
            assert results[rank]["chosen"][step].tolist() == ids[rank].tolist()
        optimizer.zero_grad()
        F.cross_entropy(model(x[torch.cat(ids)]), y[torch.cat(ids)]).backward()
        optimizer.step()
    same_parameters(results, model)


def test_a_live_model_stays_one_model(found):
    results = found["global_live"]
    live = rho.LiveIrreducible(task.network(), lambda p: torch.optim.SGD(p, lr=0.1))
    model, chosen, _ = alone(len(results), irreducible=live)
    for step in range(task.STEPS):
        assert sorted(together(results, step)) == sorted(chosen[step].tolist())
    same_parameters(results, model)
    for result in results:
        for ours, theirs in zip(result["live"], task.parameters(live.model), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_auto_off_stops_all_ranks_or_none(found):
    """Only the first finds selection dear: 9 and 0.5 times the rest, which is above 2 on average."""
    for result in found["auto_off"]:
        assert result["score"] is None
        assert result["ledger"]["scored"] == 2 * task.ROWS  # two steps of five
        assert {len(ids) for ids in result["chosen"]} == {4}
        mean = (9.0 + 0.5 * (len(found["auto_off"]) - 1)) / len(found["auto_off"])
        assert f"selecting cost {mean:.2f}x" in result["ledger"]["notes"][0]


@needs_fsdp
def test_fsdp_keeps_no_whole_weights_after_scoring(found):
    assert found["fsdp_is_sharded_after_scoring"] == [[True, True]] * len(found["global_ddp"])
    for result in found["fsdp_scores_see_the_last_step"]:
        for sharded, plain in result:
            torch.testing.assert_close(sharded, plain, rtol=0, atol=1e-6)
        assert not torch.allclose(result[0][0], result[1][0], atol=1e-3)


@needs_fsdp
def test_fsdp_ranks_of_unequal_rows_make_as_many_passes(found):
    for rank, result in enumerate(found["fsdp_uneven_chunks"]):
        for (sharded, plain), fewer in zip(result, (task.ROWS - 3, 1), strict=True):
            assert len(sharded) == (fewer if rank else task.ROWS)
            torch.testing.assert_close(sharded, plain, rtol=0, atol=1e-6)


def test_gradient_accumulation_without_sync(found):
    results = found["accumulation"]
    model, ranks = task.network(), len(results)
    select = rho.Selector("rho", irreducible=task.problem()[2], keep=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for pair in ((0, 1), (2, 3)):
        for step in pair:
            _, x, y = select(model, task.batch_of(task.rows_of(step, ranks)))
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    same_parameters(results, model)


def test_ranks_with_fewer_rows_train_on_as_many(found):
    results = found["uneven_rows"]
    ranks = len(results)
    everything = torch.cat([result["candidates"] for result in results])
    assert len(everything) < ranks * task.ROWS
    wanted = sum(rho.core.num_selected(len(r["candidates"]), 0.2) for r in results) // ranks * ranks
    assert {len(result["chosen"]) for result in results} == {wanted // ranks}
    assert {result["first"] for result in results} == {8}
    select = rho.Selector("rho", irreducible=task.problem()[2], k=wanted)
    expected = select(task.network(), task.batch_of(everything))[0]
    chosen = torch.cat([result["chosen"] for result in results])
    assert sorted(chosen.tolist()) == sorted(expected.tolist())


def test_ids_that_a_sampler_repeats_are_chosen_as_on_one_process(found):
    """997 rows do not divide: the last batches of `DistributedSampler` hold some of the first again."""
    results = found["repeated_ids"]
    model, select = task.network(), rho.Selector("rho", irreducible=task.problem()[2], keep=0.1)
    batches = [torch.cat(parts) for parts in zip(*(r["candidates"] for r in results), strict=True)]
    dealt = torch.cat(batches)
    assert len(set(dealt.tolist())) == 997 < len(dealt) == sum(map(len, batches))
    chosen = task.train(model, select, batches)
    for step, ids in enumerate(chosen):
        assert sorted(together(results, step)) == sorted(ids.tolist())
    same_parameters(results, model)


def test_rows_that_move_stay_whole(found):
    batches = found["rows_stay_whole"]
    x, y, _ = task.problem()
    keys = list(itertools.chain(*(batch["index"] for batch in batches)))
    assert len(set(keys)) == 4 * len(batches)
    assert all(int(key.split("-")[1]) < task.ROWS for key in keys)  # all of them were rank 0's
    for batch in batches:
        ids = torch.tensor([int(key.split("-")[1]) for key in batch["index"]])
        assert len(ids) == 4
        assert torch.equal(batch["x"], x[ids])
        assert torch.equal(batch["labels"], y[ids])
        assert torch.equal(batch["half"], x[ids].bfloat16())
        assert torch.equal(batch["mask"], x[ids] > 0)
        assert isinstance(batch["array"], np.ndarray)
        assert np.array_equal(batch["array"], x[ids].numpy())
        assert torch.equal(batch["nested"][0], x[ids][:, :2])
        assert batch["nested"][1] is None
        assert batch["scale"] == 3.0
        assert batch["empty"].shape == (4, 0)
        assert [row.tolist() for row in batch["ragged"]] == [
            [i] * (i % 5 + 1) for i in ids.tolist()
        ]
        assert isinstance(batch["boxes"], tuple)
        assert [len(row["boxes"]) for row in batch["boxes"]] == [i % 3 for i in ids.tolist()]


def test_ranks_with_the_same_candidates_are_told_once(found):
    first, *others = found["same_candidates"]
    assert len(first) == 1
    assert first[0].startswith(
        "Rank 1 has the same candidates as rank 0, so that both choose the same"
    )
    assert others == [[]] * len(others)


def test_scoring_broadcasts_no_buffers(found):
    for rank, modes in enumerate(found["buffers_are_not_broadcast"]):
        for mode, (scored, trained, training) in modes.items():
            kept = torch.full((16,), rank + 1.0)
            assert torch.equal(scored, kept) == (mode != "train")
            assert (scored - 0.9 * kept).abs().max() < 1.0  # moved by its own candidates at most
            assert training
            # A training pass broadcasts those of rank 0, and then each rank moves its own.
            first = found["buffers_are_not_broadcast"][0][mode][0]
            assert (trained - 0.9 * first).abs().max() < 1.0
            assert mode == "train" or not torch.equal(trained, scored)


def test_one_message_on_every_rank(found):
    by_rank = found["failures"]
    ranks = len(by_rank)
    last = ranks - 1
    expected = {
        "other losses": "RholossError: The ranks differ in the irreducible losses: rank 0 has "
        "'1,000 losses with checksum ",
        "other rows": f"checksum [0-9a-f]{{8}}', rank {last} has '999 losses with",
        "other keep": rf"differ in `keep` and `k`: rank 0 has \[0.1, None\], rank {last} has \[0.2, "
        "None\\]. Start every rank with the same arguments",
        "early sampler": f"On each of the {ranks} ranks: The batch sampler was made for rank 0 of 1, but "
        f"this is rank 0 of {ranks}; make it after the process group",
        "missing loss": f"UnmeasuredLossError: On rank {last} of {ranks}: 1 of 40 candidates have no",
        "on each": f"On each of the {ranks} ranks: The method 'rho' needs irreducible losses",
        "broken model": f"On rank {last} of {ranks}: RuntimeError: no memory left",
        "broken model, global": f"On rank {last} of {ranks}: RuntimeError: no memory left",
        "other width": rf"the shape of a row: rank 0 has .*\(10,\).*rank {last} has .*\(11,\).* pad",
        "and then": "^no error$",
    }
    for name, pattern in expected.items():
        told = {result[name] for result in by_rank}
        assert len(told) == 1, name
        with pytest.raises(AssertionError, match=pattern):
            raise AssertionError(told.pop())


@pytest.mark.parametrize("rows", [997, 241, 2])
def test_the_batch_sampler_deals_every_row_once(found, rows):
    results = [result[rows] for result in found["samplers"]]
    ranks = len(results)
    assert len({len(batches) for batches, _ in results}) == 1  # no rank ends before the others
    dealt = list(itertools.chain(*(itertools.chain(*batches) for batches, _ in results)))
    assert set(dealt) == set(range(rows))
    repeated = len(dealt) - rows
    assert repeated == (max(0, ranks - rows) if rows == 2 else (ranks - 1 if rows == 241 else 0))
    for batches, counted in results:
        assert [len(batch) for batch in batches] == counted
    for parts in zip(*(batches for batches, _ in results), strict=True):
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if rows == 997:  # the parts of a batch are those of one process with the whole batch
        x, y, _ = task.problem()
        data = rho.WithIndex(torch.utils.data.TensorDataset(x[:997], y[:997]))
        whole = rho.Selector("uniform", keep=1.0).batch_sampler(data, 60 * ranks, seed=5)
        for batch, *parts in zip(whole, *(batches for batches, _ in results), strict=True):
            assert batch == list(itertools.chain(*parts))


def test_each_rank_has_a_log_of_its_own_and_its_number_of_ranks_is_kept(found):
    ranks = len(found["logs"])
    folder = found["folder"] / f"logs{ranks}"
    names = ["run.jsonl", *(f"run.rank{rank}.jsonl" for rank in range(1, ranks))]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    for rank, name in enumerate(names):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        chosen = [ids.tolist() for ids in found["local_ddp"][rank]["chosen"]]
        assert [line["index"] for line in lines if line["type"] == "step"] == chosen
        said = found["logs"][rank]["error"]
        assert said.startswith(f"The saved state has ranks 3, but this selector has {ranks}; make")
    with pytest.raises(RholossError, match=f"has ranks {ranks}, but this selector has 1"):
        rho.Selector("rho", irreducible=task.problem()[2], keep=0.1).load_state_dict(
            found["logs"][0]["state"]
        )


@given(
    rows_R=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_every_rank_gets_as_many_and_rows_stay_at_home_if_they_can(rows_R, seed):
    ranks, total = len(rows_R), sum(rows_R)
    k = max(1, np.random.default_rng(seed).integers(total + 1) // ranks) * ranks
    position = np.random.default_rng(seed).permutation(total)[:k]
    owner, trainer = assign(position, rows_R)
    starts = np.cumsum([0, *rows_R])
    assert all(starts[o] <= p < starts[o + 1] for o, p in zip(owner, position, strict=True))
    quota = len(position) // ranks
    if len(position) % ranks == 0:
        assert np.bincount(trainer, minlength=ranks).tolist() == [quota] * ranks
        at_home = np.minimum(np.bincount(owner, minlength=ranks), quota)
        assert np.count_nonzero(owner == trainer) == at_home.sum()


def test_no_rank_leaves_before_the_last_has_come(found):
    last = max(rank["at the end"] for rank in found["left"])
    assert min(rank["left"] for rank in found["left"]) >= last
    assert not any(rank["in a group"] for rank in found["left"])


def test_alone_there_is_nothing_to_leave():
    leave()
    assert not is_running()


def test_an_unknown_choice_is_refused():
    with pytest.raises(RholossError, match="`choice` is 'all'; choose one of local, global"):
        Ranks("all")


def test_on_one_process_a_global_choice_is_a_local_one():
    chosen, theirs = alone(1)[1], alone(1, choice="global")[1]
    assert all(torch.equal(a, b) for a, b in zip(chosen, theirs, strict=True))


def test_ranks_agree_whether_rows_move_at_a_short_last_batch(found):
    assert found["global_short_batches"] == [[2, 2, 1]] * len(found["global_short_batches"])
