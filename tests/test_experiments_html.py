"""The page to explore: made of the same lines, whole in one file."""

import json
import re
from dataclasses import replace

import pytest
from fixtures_lines import GROUP, RHO, STUDY, UNIFORM, line, sooner, write

from experiments import __main__ as command
from experiments.bench.claims import Claim
from experiments.bench.html import write_html
from experiments.studies import STUDIES

pytest.importorskip("plotly", reason="the page needs plotly (the extra 'report')")
CLAIM = Claim("It is <faster>", "2 x", "made", [sooner()])


def figures(text):
    return json.loads(re.search(r"const figures = (.*);\n", text)[1])


@pytest.fixture
def text(tmp_path):
    write(
        tmp_path,
        line(UNIFORM, [10, 30, 50, 60], 0),
        line(UNIFORM, [10, 30, 40, 50], 1),
        line(RHO, [20, 55, 72, 74], 0, il_eval=[[10, 80.0], [20, 70.0]]),
    )
    path = write_html({"made": STUDY}, [CLAIM], tmp_path, tmp_path / "new" / "html")
    assert [file.name for file in path.parent.iterdir()] == ["index.html"]
    return path.read_text()


def test_curves_are_means_over_seeds_with_their_spread(text):
    charts = figures(text)
    assert set(charts) == {
        f"made-clean-a-group-{kind}" for kind in ("accuracy", "correct", "corrupted", "il")
    }
    band, uniform, rho = charts["made-clean-a-group-accuracy"]["data"]
    assert (uniform["name"], uniform["y"]) == ("uniform", [10, 30, 45, 55])
    assert (rho["name"], rho["x"], rho["y"]) == ("RHO-LOSS", [1, 2, 3, 4], [20, 55, 72, 74])
    assert band["y"] == [
        10,
        30,
        50,
        60,
        50,
        40,
        30,
        10,
    ]  # there along the highest, back along the lowest
    for place in charts:
        assert f'id="{place}"' in text


def test_tables_and_notes_are_those_of_the_page(text):
    cells = re.findall(r"<td[^>]*>(.*?)</td>", text)
    at = cells.index("RHO-LOSS")
    assert cells[at : at + 7] == ["RHO-LOSS", "1 / 2 (70)", "2", "3", "55.2", "74.0", "1"]
    assert "Not run, or not in full: RHO-LOSS: 1 of 2 seeds." in text
    assert "Another" not in text.rpartition("<body>")[2]  # a group without runs
    assert "It is &lt;faster&gt;" in text
    assert '<span class="holds"><a href="#made">holds (1 of 2 seeds)</a></span>' in text
    assert '<section id="made">' in text


def test_every_link_within_the_page_leads_somewhere(tmp_path):
    write(tmp_path, line(UNIFORM, [10, 30, 50, 60], 0))
    claims = [
        CLAIM,
        Claim(
            "Another", "2 x", "empty", [replace(sooner(), group="Another", arm="loss", other=None)]
        ),
    ]
    studies = {"made": STUDY, "empty": replace(STUDY, name="empty", groups=STUDY.groups[1:2])}
    assert [group.title for group in studies["empty"].groups] == ["Another"]
    text = write_html(studies, claims, tmp_path, tmp_path / "html").read_text()
    shell = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert set(re.findall(r'href="#([^"]+)"', shell)) <= set(re.findall(r'id="([^"]+)"', shell))


def test_notes_are_marked_up(tmp_path):
    write(tmp_path, line(UNIFORM, [10, 30, 50, 60], 0))
    note = "With `--only a<b` as [made](../made/README.md) has it, not [other](../other/README.md)."
    study = replace(STUDY, note=note, groups=(replace(GROUP, note="Of `rholoss.Ladder`."),))
    text = write_html({"made": study}, [CLAIM], tmp_path, tmp_path / "html").read_text()
    assert (
        'With <code>--only a&lt;b</code> as <a href="#made">made</a> has it, not other.</p>' in text
    )
    assert "Of <code>rholoss.Ladder</code>.</p>" in text


def test_claims_can_be_read_on_a_narrow_screen(text):
    assert '<table class="stack">' in text
    assert '<td data-label="verdict"><span class="holds"><a href="#made">' in text
    assert "Of the 1 claims below 1 holds. 1 of the verdicts rest" in text


def test_the_page_stands_alone(text):
    shell = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # plotly's own has addresses
    assert not re.findall(r'(?:src|href)="(?!#)', shell)
    assert text.count("<body>\n") >= 1
    assert text.rstrip().endswith("</html>")


def test_it_is_made_on_demand(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(STUDIES, "made", STUDY)
    write(tmp_path, line(UNIFORM, [10, 30, 50, 60], 0))
    words = ["report", "--study", "made", "--out", str(tmp_path)]
    command.main(words)
    assert not list(tmp_path.rglob("*.html"))
    command.main([*words, "--html", str(tmp_path / "html")])
    assert str(tmp_path / "html" / "index.html") in capsys.readouterr().out
    assert GROUP.title in (tmp_path / "html" / "index.html").read_text()
