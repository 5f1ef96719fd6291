"""Every Python block of the documentation runs, one page in one go."""

import re
from pathlib import Path

import pytest
from tools import reference

import rholoss
import rholoss.engine

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
FIGURES = [*ROOT.glob("benchmarks/results/*.md"), *ROOT.glob("experiments/results/**/*.md")]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = list(BLOCK.finditer(page.read_text()))
    names: dict = {"__name__": page.stem}
    for block in blocks:
        line = page.read_text()[: block.start()].count("\n") + 1
        code = "\n" * line + block.group(1)
        exec(compile(code, str(page), "exec"), names)


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md", ROOT / "examples/README.md", *sorted(FIGURES)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        there = page.parent / target if target else page
        assert anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


def anchors(page):
    """Those that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_lists_every_page():
    assert {page.name for page in ROOT.glob("docs/*.md")} == {
        line.split("](")[1].split(")")[0]
        for line in (ROOT / "docs/index.md").read_text().splitlines()
        if "](" in line
    } | {"index.md"}


def test_the_examples_are_listed():
    listed = re.findall(r"\| \[(\w+\.py)\]", (ROOT / "examples/README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in ROOT.glob("examples/*.py"))


def test_every_public_name_is_on_a_page():
    text = "\n".join(page.read_text() for page in PAGES if page != reference.PAGE)
    missing = [name for name in rholoss.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing


def test_the_reference_is_what_the_docstrings_say():
    """Else: python tools/reference.py."""
    assert reference.PAGE.read_text() == reference.made()


def test_the_reference_has_every_public_name():
    there = {name for _, names in reference.SECTIONS.values() for name in names.split()}
    assert there >= {*rholoss.__all__, *rholoss.engine.__all__}
