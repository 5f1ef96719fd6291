"""Which options count, and what they reach of the targets, is read off the rows."""

from benchmarks import missed, options, pages

AHEAD = "folded, following means, overlapped, ahead"
ABOUT = {"command": "c", "device": "H200", "torch": "t", "python": "p", "date": "x"}
SIZE = {"data": "CIFAR-10", "noise": 0.0, "k": 32, "candidates": 320, "seed": 0}


def run(option, accuracy, **other):
    row = {"mode": "train", "steps": 3000, "compile": True, "ms": 1.0}
    return {**SIZE, **ABOUT, **row, "option": option, "accuracy": accuracy, **other}


def look(option, spearman=0.95, shared=0.9, **other):
    row = {"mode": "scores", "steps": 1000, "compile": False, "moment": 100}
    figures = {"spearman": spearman, "shared": shared}
    return {**SIZE, **ABOUT, **row, "option": option, **figures, **other}


def steps(**ms):
    rows = {"uniform 32": 1.0, "rho 32 of 320": 2.0, **ms}
    about = {**ABOUT, "floor_ms": 0.1, "started": "2026-11-20T10:00"}
    return [{"row": row, "ms": each, **about} for row, each in rows.items()]


def test_an_option_that_agrees_on_that_device_is_held_against_the_target():
    timed = steps(**{f"rho 32 of 320, {AHEAD}; combined": 1.6, "rho 32 of 320, overlapped": 1.3})
    best = {
        "2.00x (rho 32 of 320)": [run("exact", 85.0), run(AHEAD, 84.9)],  # its scores are not known
        f"1.60x (rho 32 of 320, {AHEAD}; combined)": [
            run("exact", 85.0),
            run(AHEAD, 84.9),
            look(AHEAD),
        ],
    }
    for told, rows in best.items():
        page = "\n".join(pages.step_page(timed, rows))
        assert f"| <= 1.5x uniform; hoped for: 1.25x | {told} |" in page
        elsewhere = [{**row, "device": "another"} for row in rows]
        assert "1.25x | 2.00x (rho 32 of 320) |" in "\n".join(pages.step_page(timed, elsewhere))
    assert f"| {AHEAD} | 1.60x | yes |  |" in page
    assert "| overlapped | 1.30x |  |  |" in page
    faster = steps(**{f"rho 32 of 320, {AHEAD}": 1.4})
    page = "\n".join(pages.step_page(faster, rows))
    assert "best option that counts | <= 1.5x uniform; hoped for: 1.25x | 1.40x | met |" in page
    assert "best option that counts" not in page.partition("## Targets missed")[2]


def test_what_counts_but_was_not_timed_is_told():
    digits = {"data": "digits", "noise": 0.1, "device": "cpu"}
    rows = [run("exact", 90.0, **digits), run(AHEAD, 90.0, **digits), look(AHEAD, **digits)]
    timed = steps(**{"rho 32 of 320, folded": 1.7})
    page = "\n".join(pages.step_page(timed, rows))
    assert f"| folded | 1.70x |  |  |\n| {AHEAD} | not timed yet |  | yes |" in page
    assert missed.section([], pages._against_uniform, options.of_steps(rows)) == []


def test_an_option_fails_by_what_is_known_and_is_open_else():
    rows = [run("exact", 85.0), run("uniform", 60.0), run("overlapped", 83.0), look("proxy", 0.5)]
    rows += [run("folded", 85.0), look("overlapped, ahead")]
    verdicts = options.Compared(rows).verdicts()
    failed = {"overlapped": False, "proxy": False}
    assert verdicts == {**failed, "folded": None, "overlapped, ahead": None}
    page = "\n".join(options.agreement_page(rows))
    told = "none counts so far. Open: *folded*; *overlapped, ahead*."
    assert f"- CIFAR-10, 0% wrong labels, 32 of 320, H200: {told}" in page
