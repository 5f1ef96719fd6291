import json
import resource

import numpy as np
import pytest
import torch

from rholoss import Selector
from rholoss.errors import RholossError
from rholoss.steplog import StepLog, read_log


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path):
    return [line["step"] for line in read_log(path)]


def write(path, *numbers):
    log = StepLog(path)
    for step in numbers:
        log.add(step, torch.tensor([step, step + 1]), torch.tensor([0.5, 0.25]))
    log.flush()
    return log


def test_one_line_a_step_in_plain_json(tmp_path):
    log = StepLog(tmp_path / "deeper" / "chosen.jsonl")
    log.add(0, torch.tensor([3, 1]), torch.tensor([1.23456789, -0.5]))
    log.mark({"type": "mark", "step": 1, "value": 0.75})
    log.add(1, ["a", "b"], None)
    log.add(2, [np.int64(7)], torch.tensor([-torch.inf]))
    assert not log.path.exists()
    log.flush()
    assert lines(log.path) == [
        {"type": "step", "step": 0, "index": [3, 1], "score": [1.234568, -0.5]},
        {"type": "mark", "step": 1, "value": 0.75},
        {"type": "step", "step": 1, "index": ["a", "b"]},
        {"type": "step", "step": 2, "index": [7], "score": [None]},
    ]
    assert "Infinity" not in log.path.read_text()
    log.flush()
    assert len(lines(log.path)) == 4


def test_a_mark_before_the_first_step_waits_for_it(tmp_path):
    select = Selector("uniform", k=1, log=tmp_path / "log")
    select.mark(0.1)
    select(torch.nn.Linear(1, 1), (torch.arange(2), torch.zeros(2, 1)))
    select.mark(0.2)
    assert [line["type"] for line in lines(tmp_path / "log")] == ["mark", "step", "mark"]


def test_without_a_path_nothing_is_kept():
    log = StepLog(None)
    log.add(0, torch.tensor([1]), None)
    log.mark({"type": "mark", "step": 0})
    log.flush()
    log.rewind(0)
    assert log._waiting == []


def test_what_cannot_be_logged_is_told(tmp_path):
    log = StepLog(tmp_path / "log")
    log.mark({"type": "mark", "step": 0, "value": object()})
    with pytest.raises(TypeError, match="A object cannot be logged"):
        log.flush()
    assert not log.path.exists()


@pytest.mark.parametrize("left", ['{"type": "st', '{"type": "step", "step": 2, "index": [2]}'])
def test_a_line_that_was_cut_off_is_dropped(tmp_path, left):
    path = tmp_path / "log"
    write(path, 0, 1)
    with path.open("a") as file:
        file.write(left)
    assert steps(path) == [0, 1]
    write(path, 2, 3)
    assert [line["step"] for line in lines(path)] == [0, 1, 2, 3]


def test_a_file_that_is_one_cut_off_line(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"ty')
    assert steps(path) == []
    write(path, 0)
    assert [line["step"] for line in lines(path)] == [0]


def test_a_full_disk_leaves_whole_lines_and_what_waits_is_written_later(tmp_path):
    path = tmp_path / "log"
    log = write(path, 0, 1)
    before = path.read_bytes()
    log.add(2, torch.arange(50), None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(OSError, match=r"No space left on device.*log"):
            log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    log.flush()
    assert steps(path) == [0, 1, 2]


def test_rewinding_forgets_later_steps_and_keeps_marks_of_the_steps_done(tmp_path):
    path = tmp_path / "log"
    log = write(path, 0, 1)
    log.mark({"type": "mark", "step": 2, "value": 0.5})  # made when two steps were done
    log.add(2, torch.tensor([1]), None)
    log.mark({"type": "mark", "step": 3, "value": 0.6})
    log.flush()
    log.add(3, torch.tensor([1]), None)
    with path.open("a") as file:
        file.write('{"cut')
    log.rewind(2)
    log.flush()
    assert [(line["type"], line["step"]) for line in lines(path)] == [
        ("step", 0),
        ("step", 1),
        ("mark", 2),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["log"]
    assert lines(path)[0] == {"type": "step", "step": 0, "index": [0, 1], "score": [0.5, 0.25]}


def test_a_directory_is_no_log(tmp_path):
    with pytest.raises(
        RholossError, match=f"`log`='{tmp_path}' is a directory; give the path of a"
    ):
        StepLog(tmp_path)


def test_rewinding_where_there_is_no_file(tmp_path):
    StepLog(tmp_path / "log").rewind(5)
    assert list(tmp_path.iterdir()) == []
