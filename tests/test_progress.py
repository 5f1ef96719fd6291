"""Progress: silent when disabled, a line now and then in a log, a bar on a terminal."""

import io
import sys

import pytest

from rholoss import progress
from rholoss.progress import Bar, clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (6.6, "0:07"), (760, "12:40"), (3723, "1:02:03")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_disabled_prints_nothing_even_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    with Bar(2, "fitting", enabled=False) as bar:
        bar.advance(2, note="loss 0.31")
    assert terminal.getvalue() == ""
    assert bar.done == 2


def test_a_log_gets_lines_with_note_elapsed_and_remaining_time(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Bar(100, "fitting") as bar:
        now[0] = 4.0
        bar.advance(10)  # too early for a line
        now[0] = 10.0
        bar.advance(10, note="loss 0.31")
        now[0] = 11.0
        bar.advance(10)
        now[0] = 12.0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "fitting: 20 %, loss 0.31, 0:10 elapsed, 0:40 left",
        "fitting: 30 %, loss 0.31, 0:12 elapsed, 0:28 left",
    ]


def test_work_of_hours_does_not_fill_a_log(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Bar(2, "runs") as bar:
        for second in range(1, 7201):
            now[0] = float(second)
            bar.advance(1 / 3600)
    lines = capsys.readouterr().err.splitlines()
    assert 150 < len(lines) < 350  # not 1,440
    assert lines[-1].startswith("runs: 100 %, 2:00:00 elapsed")


def test_short_work_leaves_no_line_in_a_log(capsys):
    with Bar(3, "scoring") as bar:
        bar.advance(3)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch):
    pytest.importorskip("rich")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    with Bar(4, "scoring [x]") as bar:
        bar.advance(1)
        bar.advance(3, note="loss [0.25]")  # brackets are text, not markup
    shown = terminal.getvalue()
    for part in ("scoring [x]", "loss [0.25]", "100%", "elapsed", "left"):
        assert part in shown


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_a_bar_leaves_room_for_the_share_and_the_time_left(monkeypatch, columns):
    pytest.importorskip("rich")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    with Bar(100, "fitting irreducible-loss model") as bar:
        bar.advance(100, note="epoch 12, loss 0.7546, lowest 0.7512 at epoch 11")
    *_, last = (line for line in terminal.getvalue().splitlines() if "fitting" in line)
    for part in ("fitting irreducible-loss model", "100%", ":00", "left", "epoch 12,"):
        assert part in last


def test_without_rich_a_terminal_gets_lines(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with Bar(2, "scoring") as bar:
        bar.advance(2)
    assert terminal.getvalue().startswith("scoring: 100 %, 0:00 elapsed")
