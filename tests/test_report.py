import base64
import io
import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from rholoss.demo.data import load
from rholoss.demo.study import Result
from rholoss.demo.summary import summarise
from rholoss.errors import RholossError
from rholoss.report import demo, page


def record(method, seed, high, wrong):
    curve = np.linspace(0.4, high, 8).round(4).tolist()
    return {
        "method": method,
        "seed": seed,
        "settings": {"epochs": 2, "limit": 400, "rholoss": "0.1.0"},
        "step": list(range(10, 90, 10)),
        "seconds": [0.25 * (i + 1) for i in range(8)],
        "accuracy": curve,
        "wrong_by_epoch": [wrong, 0.12],
        "correct_by_epoch": [0.5, 0.7],
        "selecting_seconds": 0.5,
        "date": "2026-01-02T03:04:05+00:00",
        "torch": "2.6 <&> </script>",
        "numpy": "2",
        "python": "3.11",
        "device": "CPU",
    }


@pytest.fixture(scope="module")
def result():
    splits = load(400)
    irreducible = np.random.default_rng(0).exponential(size=400).astype(np.float32)
    irreducible[splits["train"].wrong] += 5
    ends = {"uniform": (0.8, 0.1), "loss": (0.5, 0.6), "rho": (0.9, 0.03)}
    records = [
        record(m, s, high + s / 50, wrong) for s in (0, 1) for m, (high, wrong) in ends.items()
    ]
    return Result(records, summarise(records, 1.5), irreducible, splits, None)


@pytest.fixture(scope="module")
def html(result, tmp_path_factory):
    path = demo.write(result, tmp_path_factory.mktemp("page") / "report.html")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]  # nothing temporary is left
    return path.read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Elements with their attributes, and the text that a reader sees."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self.scripts, self.inside = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = None if tag in ("script", "style") else self.inside

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))


@pytest.fixture(scope="module")
def outline(html):
    return Outline(html)


def test_the_page_loads_nothing_from_a_network(html, outline):
    for tag, attributes in outline.elements:
        assert tag not in ("link", "iframe", "img", "object", "embed")
        assert not ({"src", "href", "action"} & attributes.keys())
    styles = re.findall(r"<style>(.*?)</style>", html, re.S)
    assert "@import" not in "".join(styles)
    assert all(u.startswith('"data:') for s in styles for u in re.findall(r"url\(([^)]*)", s))
    assert html.count("plotly.js v") == 1  # inlined, once
    assert len(outline.scripts) == 2


def test_every_figure_has_a_place_axes_and_words(html, outline):
    figures = json.loads(re.search(r"const figures = (.*);\n", outline.scripts[1])[1])
    places = {a["id"]: a for _, a in outline.elements if a.get("class") == "chart"}
    assert figures.keys() == places.keys()
    assert len(figures) == 5
    for name, figure in figures.items():
        assert places[name]["role"] == "img"
        assert len(places[name]["aria-label"]) > 40
        for axis in ("xaxis", "yaxis"):
            assert figure["layout"][axis]["title"]["text"]
        assert figure["data"]


def test_curves_hold_the_means_and_the_band_of_the_seeds(result):
    figure = demo.accuracy_by_step(result)["figure"]
    rho = next(t for t in figure["data"] if t["name"] == "RHO-LOSS" and "fill" not in t)
    band = next(t for t in figure["data"] if t["name"] == "RHO-LOSS" and "fill" in t)
    own = [r["accuracy"] for r in result.records if r["method"] == "rho"]
    assert rho["x"] == list(range(10, 90, 10))
    assert rho["y"] == pytest.approx(100 * np.mean(own, axis=0))
    assert band["y"][:8] == pytest.approx(100 * np.max(own, axis=0))
    assert band["y"][8:] == pytest.approx(100 * np.min(own, axis=0)[::-1])


def test_seconds_of_rho_include_the_irreducible_losses(result):
    traces = demo.accuracy_by_second(result)["figure"]["data"]
    first = {t["name"]: t["x"][0] for t in traces if "fill" not in t}
    assert first == {"Uniform": 0.25, "Training loss": 0.25, "RHO-LOSS": 1.75}


def test_the_reader_is_told_the_result_good_and_bad(outline, result):
    for text in [result.summary.headline, *result.summary.improved, *result.summary.not_improved]:
        assert text in outline.text
    assert "What did not improve" in outline.text
    assert "rholoss demo --epochs 2 --seeds 2 --limit 400" in outline.text
    assert "2026-01-02" in outline.text
    assert "2.6 <&> </script>" in outline.text  # escaped, not obeyed


def test_shares_picked_are_drawn_by_epoch(result):
    traces = {t["name"]: t for t in demo.picked_wrong(result)["figure"]["data"]}
    assert traces["RHO-LOSS"]["x"] == [1, 2]
    assert traces["RHO-LOSS"]["y"] == pytest.approx([3.0, 12.0])
    traces = {t["name"]: t for t in demo.picked_correct(result)["figure"]["data"]}
    assert traces["Uniform"]["y"] == pytest.approx([50.0, 70.0])


def test_the_histogram_counts_each_group_to_a_hundred(result):
    right, wrong = demo.histogram(result)["figure"]["data"]
    assert sum(right["y"]) == pytest.approx(100, abs=0.01)
    assert sum(wrong["y"]) == pytest.approx(100, abs=0.01)
    assert (
        np.average(wrong["x"], weights=wrong["y"]) > np.average(right["x"], weights=right["y"]) + 3
    )


def test_the_highest_irreducible_losses_are_shown_with_both_labels(result):
    found, train = demo.highest(result), result.splits["train"]
    order = np.argsort(-result.irreducible)
    for card, row in zip(found["all"], order[:24], strict=True):
        assert (card["given"], card["true"]) == (train.given[row], train.true[row])
        assert card["wrong"] == (card["given"] != card["true"])
    assert not any(card["wrong"] for card in found["right"])
    picture = Image.open(io.BytesIO(base64.b64decode(found["sprite"].split(",")[1])))
    shown = 255 - np.asarray(picture)
    assert shown.shape == (28, 28 * 36)
    np.testing.assert_array_equal(shown[:, 28:56], train.images[order[1]])
    assert found["all"][0]["position"] == "0.0000%"
    assert found["right"][-1]["position"] == "100.0000%"


def test_json_cannot_close_its_script():
    text = page.for_script({"a": "</script><!--", "b": [1.5, None]})
    assert "<" not in text
    assert json.loads(text) == {"a": "</script><!--", "b": [1.5, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        page.for_script(float("nan"))


def test_prose_keeps_numbers_with_their_units():
    assert page.prose("93.1 % in 4 s, <b> 5 steps") == "93.1&nbsp;% in 4&nbsp;s, &lt;b&gt; 5 steps"


def test_a_failed_write_leaves_the_old_page(tmp_path):
    path = tmp_path / "page.html"
    page.write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        page.write(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("module", ["jinja2", "plotly", "PIL.Image"])
def test_a_missing_extra_is_named(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    name = module.split(".")[0]
    with pytest.raises(RholossError, match=rf"needs `{name}`.*pip install 'rholoss\[report\]'"):
        page.check_extra()
