"""The pages once more, to be looked at with the mouse: one self-contained file, made and not committed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.bench import plots
from experiments.bench.cell import Group, Study
from experiments.bench.claims import FAILS, HOLDS, IN_PART, Claim
from experiments.bench.numbers import Results
from experiments.bench.report import (
    PROTOCOL,
    TABLES,
    Lines,
    claims_table,
    curves_of,
    how_many,
    remarks,
    slug,
    tally,
    where,
)
from rholoss.report import page

# Okabe and Ito's colours; with another dash they serve again. The two that matter look as in the demo.
COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#882255", "#B8A800")
STYLES = tuple(itertools.product(("solid", "dash", "dot"), COLOURS))
FIXED = {"uniform": ("dot", page.GREY), "RHO-LOSS": ("solid", page.BLUE)}
FREE = {"fixedrange": False}  # a part of the figure may be looked at closely
LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)?([^)/]+)/README\.md\)")
CODE = re.compile(r"`([^`]+)`")

BODY = """
<style>
section h3 { margin: 3rem 0 .6rem; } td { vertical-align: top; } figure { margin: 1.2rem 0; }
.holds, .holds a { color: var(--good); font-weight: 600; }
.fails, .fails a { color: var(--bad); font-weight: 600; }
.open, .open a { color: var(--soft); }
@media (max-width: 46rem) {
  .stack td { display: block; text-align: left; white-space: normal; }
  .stack td::before { display: block; font-size: .9rem; }
  .stack td:first-child { font-weight: 600; }
  .stack td:empty { display: none; }
}
</style>
<header><h1>{{ title }}</h1>
<p class="lead">{{ tally }} <a href="#claims">See them</a>.</p>
<details><summary>How to read the numbers</summary><p class="soft">{{ protocol }}</p></details>
<nav><ul>
{% for study in studies %}<li><a href="#{{ study.name }}">{{ study.title }}</a>: {{ study.ran }}</li>
{% endfor %}</ul></nav></header>
<main>
<section id="claims"><h2>What the paper claims</h2>{{ table(claims, "stack") }}</section>
{% for study in studies %}
<section id="{{ study.name }}"><h2>{{ study.title }}</h2>
<p class="soft">{{ study.where }}</p>
{% if study.note %}<p>{{ marked(study.note) }}</p>{% endif %}
{% for group in study.groups %}<h3>{{ group.title }}</h3>
{% for block in group.blocks %}
{% if block.chart %}<figure><div class="chart" id="{{ block.chart }}"></div></figure>
{% elif block.rows %}{{ table(block.rows) }}
{% else %}<p class="soft">{{ marked(block.text) }}</p>
{% endif %}
{% endfor %}
{% endfor %}
</section>
{% endfor %}
</main>
"""
# With the class `stack` each row is a box of its own on a narrow screen, and its cells have the head's words.
TABLE = """{% macro table(rows, kind="") %}<div class="scroll"><table class="{{ kind }}">
<thead><tr>{% for cell in rows[0] %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in rows[1:] %}<tr>{% for cell in row %}<td{% if kind and not loop.first %} \
data-label="{{ rows[0][loop.index0] }}"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endmacro %}"""


def write_html(
    studies: Mapping[str, Study], claims: Sequence[Claim], out: Path, folder: Path
) -> Path:
    """Make `<folder>/index.html` of the runs below `out`; returns its path."""
    results = Results.read(out)
    figures: dict[str, Any] = {}
    every = [_study(study, results, figures) for study in studies.values()]
    shown = {study["name"]: study for study in every if study["groups"]}
    rows = _rows(claims_table(claims, studies, results).split("\n"))
    body = _render(
        title="The paper's experiments, run again",
        tally=tally(claims, studies, results),
        protocol=PROTOCOL.replace("*", ""),
        studies=list(shown.values()),
        claims=[_linked(row, shown) for row in rows],
        marked=lambda text: _marked(text, shown),
    )
    shell = page.render("page.html.j2", title="The paper's experiments", figures=figures)
    # The last one: plotly's script comes before it, and in the figures no tag can stand.
    before, tag, after = shell.rpartition("<body>\n")
    folder.mkdir(parents=True, exist_ok=True)
    return page.write(folder / "index.html", before + tag + body + after)


def _render(**context: Any) -> str:
    environment = page.need("jinja2").Environment(autoescape=True, trim_blocks=True)
    return str(environment.from_string(TABLE + BODY).render(**context))


def _study(study: Study, results: Results, figures: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a study; its figures go to `figures`, by the names of their places."""
    groups = []
    for group in study.groups:
        lines = {name: results.of(arm) for name, arm in group.arms.items()}
        if any(lines.values()):
            blocks = list(_blocks(study, group, lines, results, figures))
            groups.append({"title": group.title, "blocks": blocks})
    return {
        "name": study.name,
        "title": study.title,
        "note": study.note,
        "ran": how_many(study, results),
        "where": re.sub(r"\[(\w+)\]\([^)]*\)", r"\1", where(study, results)),
        "groups": groups,
    }


def _blocks(
    study: Study, group: Group, lines: Lines, results: Results, figures: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for name in group.show:
        if name in TABLES:
            made = TABLES[name](group, lines)
            yield {"rows": _rows(made)}
            yield from ({"text": line} for line in made if line and not line.startswith("|"))
            continue
        for kind, curve, ylabel, xlabel in curves_of(group, name):
            traces = list(_traces(plots.with_points(lines, curve)))
            if traces:
                place = f"{study.name}-{slug(group.title)}-{kind}"
                figures[place] = page.figure(
                    traces, xlabel, ylabel, hovermode="closest", xaxis=FREE, yaxis=FREE
                )
                yield {"chart": place}
    yield from ({"text": text} for text in remarks(group, results, study.seeds))


def _traces(curves: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """A line for each arm, and the area from its lowest to its highest seed."""
    styles = iter(STYLES)
    for name, found in curves.items():
        dash, colour = FIXED.get(name) or next(styles)
        xs, middle, low, high = plots.band(found)
        if len(found) > 1:
            yield page.band(name, xs, low, high, colour)
        yield page.line(name, xs, middle, colour, dash, legendgroup=name)


def _rows(lines: Sequence[str]) -> list[list[Any]]:
    """The cells of a table in Markdown, its head first."""
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if set(row[0].strip()) != {"-"}]


def _linked(row: Sequence[str], shown: Container[str]) -> list[Any]:
    """Links to pages become links within this one, or words where the study is not `shown`."""
    link = page.need("markupsafe").Markup('<a href="#{}">{}</a>')

    def cell(text: str) -> Any:
        found = LINK.fullmatch(text)
        if not found:
            return text
        told = link.format(found[2], found[1]) if found[2] in shown else found[1]
        return _coloured(told, found[1])

    return [cell(text) for text in row]


def _marked(text: str, shown: Container[str]) -> Any:
    """A note in Markdown as HTML: its links, as in `_linked`, and its code."""
    markup = page.need("markupsafe")

    def link(found: re.Match[str]) -> str:
        return f'<a href="#{found[2]}">{found[1]}</a>' if found[2] in shown else found[1]

    return markup.Markup(CODE.sub(r"<code>\1</code>", LINK.sub(link, str(markup.escape(text)))))


def _coloured(told: Any, verdict: str) -> Any:
    """What holds and what does not is seen before it is read."""
    kinds = {IN_PART: "part", HOLDS: "holds", FAILS: "fails"}
    kind = next((kind for words, kind in kinds.items() if verdict.startswith(words)), "open")
    return page.need("markupsafe").Markup('<span class="{}">{}</span>').format(kind, told)
