"""Result lines survive a kill and name no place of this machine."""

import json
from pathlib import Path

import pytest

from experiments import records
from rholoss.errors import RholossError


def test_lines_come_back_in_order(tmp_path):
    for number in range(3):
        records.append(tmp_path / "a" / "runs.jsonl", {"number": number})
    found = records.read(tmp_path / "a" / "runs.jsonl", tmp_path / "missing.jsonl")
    assert [record["number"] for record in found] == [0, 1, 2]


def test_a_line_cut_short_is_passed_over_and_spoils_no_other(tmp_path):
    path = tmp_path / "runs.jsonl"
    records.append(path, {"number": 0})
    with path.open("a") as file:
        file.write('{"number": 1, "accu')
    records.append(path, {"number": 2})
    assert [record["number"] for record in records.read(path)] == [0, 2]


def test_a_number_that_json_does_not_know_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        records.append(tmp_path / "runs.jsonl", {"loss": float("nan")})
    assert list(records.read(tmp_path / "runs.jsonl")) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_line_for_which_there_is_no_room_is_printed(tmp_path, capsys):
    (tmp_path / "runs.jsonl").symlink_to("/dev/full")
    with pytest.raises(RholossError, match=r"runs.jsonl: .*No space left.* end of that file"):
        records.append(tmp_path / "runs.jsonl", {"accuracy": 91.5})
    assert json.loads(capsys.readouterr().err) == {"accuracy": 91.5}


def test_the_command_names_no_place(monkeypatch):
    words = [
        "study",
        "run",
        "--out",
        "/tmp/x",
        "--labels",
        "noise 10 %",
        "--data=/tmp/y",
        "--seeds",
        "0",
    ]
    monkeypatch.setattr("sys.argv", words)
    command = records.about("experiments")["command"]
    assert command == 'python -m experiments run --labels "noise 10 %" --seeds 0'


def test_a_line_tells_on_how_many_threads_it_was_made(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)  # others give other last digits
    assert records.about("experiments")["threads"] == 7


def test_what_is_missing_is_told_and_how_all_of_it_is_made_again(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    records.append(path, {"seed": 0, "steps": 9})
    assert records.missing(path, ("seed",), [(0,), (1,)]) == [(1,)]
    assert capsys.readouterr().out == "1 runs to do, 1 have their line\n"
    assert records.missing(path, ("seed",), [(0,)]) == []
    told = f"0 runs to do, 1 have their line; `--out FILE` makes them again, in another file than {path}"
    assert capsys.readouterr().out == f"{told}\n"


def test_a_page_takes_the_place_of_no_other(tmp_path):
    committed = tmp_path / "fair_clock" / "runs.jsonl"
    assert records.page_of(committed) == tmp_path / "fair_clock" / "README.md"
    assert records.page_of(Path("again.jsonl")) == Path("again.md")


def test_seconds_of_another_device_are_another_race(tmp_path, monkeypatch):
    committed, out = tmp_path / "committed.jsonl", tmp_path / "out.jsonl"
    monkeypatch.setattr(records, "device", lambda: "a GPU")
    for number, (path, where) in enumerate(
        [(committed, "cpu"), (committed, "a GPU"), (out, "a GPU")]
    ):
        records.append(path, {"number": number, "device": where, "budget": 17})
    found = records.of_this_device([committed], out)
    assert [line["number"] for line in found] == [1, 2]
    everything = records.of_this_device([committed], out, lambda line: line["budget"] == 60)
    assert [line["number"] for line in everything] == [0, 1, 2]
    with pytest.raises(SystemExit, match=r"committed\.jsonl has runs of cpu.* another file"):
        records.of_this_device([], committed)
