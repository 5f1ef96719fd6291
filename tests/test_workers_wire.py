"""Who scores for whom, and what goes over the wire."""

import multiprocessing
import os
import socket
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from fixtures_workers import WAIT, network, parts

from rholoss.errors import RholossError
from rholoss.workers import serve, weights, wire
from rholoss.workers.ranks import Role, environment_of, role_of


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, Role(0, 2, 4)), (1, Role(1, 2, 4)), (2, Role(0, 2, 4, 0)), (5, Role(1, 2, 4, 3))],
)
def test_the_last_ranks_score_and_each_trainer_has_as_many(rank, expected):
    found = role_of(4, {"RANK": str(rank), "WORLD_SIZE": "6"})
    assert found == expected
    assert found.workers_each == 2


def test_without_workers_nothing_changes():
    assert role_of(0, {}) == Role(0, 1, 0)
    assert environment_of(role_of(0, {}), {}) == {}


@pytest.mark.parametrize("workers", [-1, 1, 2, 6, 7])
def test_a_number_of_workers_that_does_not_divide_is_told(workers):
    with pytest.raises(
        RholossError, match=rf"`workers` is {workers} of 6 .* can be 0, 3, 4, 5;"
    ) as e:
        role_of(workers, {"RANK": "0", "WORLD_SIZE": "6"})
    assert "torchrun" in str(e.value)


def test_trainers_see_a_smaller_world_and_workers_look_like_their_trainer():
    # Two nodes of four; the last four of eight ranks score, and one of the first node would not fit.
    at = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    changed = environment_of(role_of(4, at), at)
    assert (changed["RANK"], changed["WORLD_SIZE"], changed["LOCAL_WORLD_SIZE"]) == ("1", "4", "4")
    again = {**at, **changed}
    assert environment_of(role_of(4, again), again) == changed  # asked twice
    at = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    changed = environment_of(role_of(2, at), at)
    assert (changed["RANK"], changed["WORLD_SIZE"], changed["LOCAL_WORLD_SIZE"]) == ("1", "2", "2")
    assert changed["RHOLOSS_WORKER"] == "1"
    assert role_of(2, {**at, **changed}) == Role(1, 2, 2, 1)


def test_weights_arrive_in_bfloat16_and_buffers_as_they_are(monkeypatch):
    monkeypatch.setattr(weights, "PIECE", 100)
    model, other = network(norm=True), network(norm=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        model[1].running_var.uniform_(1, 2)
        model[1].num_batches_tracked.fill_(2**40 + 1)
    packed = weights.pack(model, 7)
    numbers = sum(p.numel() for p in model.parameters())
    assert len(packed.bytes()) == weights.num_bytes(model)
    assert 0 <= weights.num_bytes(model) - (2 * numbers + 2 * 8 * 4 + 8) < 9 * 16
    with torch.no_grad():
        expected = [p.bfloat16().float() for p in model.parameters()]
        buffers = [buffer.clone() for buffer in model.buffers()]
        for tensor in model.state_dict().values():
            tensor.zero_()  # what was packed stays as it was
    pieces = packed.pieces()
    assert [head["last"] for head, _ in pieces] == [False] * (len(pieces) - 1) + [True]
    weights.unpack(other, bytearray(b"".join(piece for _, piece in pieces)))
    assert all(map(torch.equal, expected, other.parameters()))
    assert all(map(torch.equal, buffers, other.buffers()))


def test_layouts_differ_where_shapes_do():
    assert weights.layout(network()) == weights.layout(network())
    assert weights.layout(network()) != weights.layout(network(norm=True))
    assert weights.layout(network()) != weights.layout(network().half())


@dataclass
class Record:
    image: torch.Tensor
    name: list


def test_batches_of_any_structure_arrive_whole():
    batch = {
        "index": ["a", "b"],
        "pair": (torch.ones(2, 3), torch.tensor([1, 2])),
        "half": torch.ones(2).bfloat16(),
        "array": np.arange(2.0),
        "record": Record(torch.zeros(2, 1), ["x", "y"]),
        "none": None,
        "number": 3,
        "numpy": np.float32(0.5),
    }
    sent = wire.to_bytes(serve.leaves_of(batch))
    blank = {**batch, "index": [], "pair": (torch.ones(0), torch.ones(0)), "number": 0}
    found = serve.with_leaves(blank, wire.from_bytes(sent))
    assert found["index"] == ["a", "b"]
    assert found["record"].name == ["x", "y"]
    assert isinstance(found["array"], np.ndarray)
    assert (found["array"] == batch["array"]).all()
    assert torch.equal(found["pair"][0], batch["pair"][0])
    assert found["half"].dtype == torch.bfloat16
    assert (found["none"], found["number"], found["numpy"]) == (None, 3, 0.5)


def test_nothing_that_was_received_runs_code():
    class Harm:
        def __reduce__(self):
            return os.getcwd, ()

    with pytest.raises(Exception, match=r"(?i)weights_only|unsupported"):
        wire.from_bytes(wire.to_bytes(Harm()))


def test_a_stranger_without_the_key_is_not_let_in():
    came = []
    door = wire.Door("127.0.0.1", came.append)
    try:
        with pytest.raises(Exception, match=r"(?i)digest|rejected"):
            wire.connect("127.0.0.1", door.port, b"wrong")
        silent = socket.create_connection(("127.0.0.1", door.port))  # says nothing, blocks nobody
        friend = wire.connect("127.0.0.1", door.port, door.key)
        end = time.monotonic() + WAIT
        while not came and time.monotonic() < end:
            time.sleep(0.01)
        assert len(came) == 1
        wire.send(friend, {"kind": "hello"}, b"x" * 100_000)
        assert wire.receive(came[0]) == ({"kind": "hello", "body": True}, b"x" * 100_000)
        friend.close()
        with pytest.raises(wire.LOST):
            wire.receive(came[0])
        silent.close()
    finally:
        door.close()


def test_several_nodes_are_not_told_a_loopback_address(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert wire.own_host() == ("127.0.0.1", "127.0.0.1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert wire.own_host() == ("", "localhost")


def test_the_first_trainer_runs_the_store_where_torchrun_does_not(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")  # any that is free
    host = wire.meeting_place(hosts=True)
    monkeypatch.setenv("MASTER_PORT", str(host.underlying_store.port))
    wire.meeting_place().set("where", "here")
    assert host.get("where") == b"here"


def test_a_worker_whose_trainer_is_through_before_it_is_ready_ends_quietly():
    select, model, loader = parts()
    here, there = multiprocessing.Pipe()
    there.close()  # the trainer has left
    assert serve.serve(here, 0, select, model, loader, {}) == 0


def test_rows_that_cannot_be_stacked_are_refused():
    batch = {"index": torch.arange(3), "x": [torch.zeros(2), torch.zeros(1), torch.zeros(4)]}
    with pytest.raises(
        RholossError, match=r"batch\['x'\] has an entry for each example that is not"
    ):
        serve.check_carried(batch, 3, ())
    serve.check_carried(batch, 3, ("batch['x']",))
    serve.check_carried({**batch, "x": ["a", "b", "c"]}, 3, ())
