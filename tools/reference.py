"""Make docs/reference.md from the docstrings: `python tools/reference.py`."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"
HEAD = """# Reference

Every public name with its arguments, made from the docstrings by `python tools/reference.py`;
`help(name)` in Python says the same. `rho` stands for `import rholoss as rho`. How things go together
is on [the other pages](index.md).
"""
SECTIONS = {
    "Selection": ("rholoss", "Selector Scorer METHODS Method Stats Selection boltzmann coreset"),
    "When to select": ("rholoss", "constant warm_up window annealed"),
    "Data": ("rholoss", "WithIndex WithIrreducible Stream"),
    "Irreducible losses": (
        "rholoss",
        "fit_irreducible score_irreducible Irreducible LiveIrreducible Ladder",
    ),
    "Cost and verdict": ("rholoss", "Ledger"),
    "Without scoring": ("rholoss", "Planned Remembered wrong_labels"),
    "Ranks that only score": ("rholoss", "ScoringWorkers"),
    "Hugging Face": (
        "rholoss.integrations.huggingface",
        "RhoTrainer RhoMixin",
    ),
    "Language models": ("rholoss.integrations.causal_lm", "CausalLMLoss"),
    "Lightning": ("rholoss.integrations.lightning", "RhoCallback"),
    "The engine": (
        "rholoss.engine",
        "Trainer Resident Streamed CropFlip Evaluator Evaluation fit_resident fit_ladder losses_of "
        "adamw one_cycle",
    ),
    "The engine: cheaper scoring": (
        "rholoss.engine",
        "Cheaper Folded Shortlist Gate Reuse LowerResolution Proxy Recorded",
    ),
    "The engine: plans": (
        "rholoss.engine",
        "Plan Situation Epoch Memory InfoBatch RandomShare",
    ),
}
FIELDS = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
ENTRY = re.compile(r"^ {4}(\S[^:]*): ?(.*)$")
WIDTH = 100


def made() -> str:
    """The page."""
    lines = [HEAD]
    for title, (module, names) in SECTIONS.items():
        lines += [f"## {title}", ""]
        for name in names.split():
            lines += described(importlib.import_module(module), name)
    return "\n".join(lines)


def described(module: Any, name: str) -> Iterator[str]:
    """A name, how it is called, what its docstring says, and its public methods."""
    thing = getattr(module, name)
    place = module.__name__ if module.__name__ != "rholoss" else "rho"
    yield from (f"### {name}", "")
    if isinstance(thing, dict):  # METHODS: names and what they stand for
        yield from (f"`{place}.{name}`: " + ", ".join(f"`{key}`" for key in thing) + ".", "")
        return
    if not inspect.isclass(thing) and not inspect.isroutine(thing):  # a type of functions
        yield from ("`" + re.sub(r"\b\w+\.", "", str(thing)) + "`", "")
        return
    yield from ("```text", called(f"{place}.{name}", thing), "```", "")
    yield from markdown(inspect.getdoc(thing) or "")
    yield ""
    methods = [*methods_of(thing)] if inspect.isclass(thing) else []
    if methods:
        yield from ("**Methods and properties**", "", *methods, "")


def methods_of(kind: type) -> Iterator[str]:
    """Those that it has of its own; what a base of ours has is told there."""
    known = {
        name for base in kind.__mro__[1:] if "rholoss" in base.__module__ for name in vars(base)
    }
    for name, value in vars(kind).items():
        if name.startswith("_") or name in known:
            continue
        if isinstance(value, property):
            value, brackets = value.fget, ""
        elif inspect.isroutine(value) or isinstance(value, classmethod | staticmethod):
            value = getattr(kind, name)
            brackets = "(" + ", ".join(arguments(value)) + ")"
        else:
            continue
        told = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
        if told:
            yield f"- `.{name}{brackets}`: {told}"


def called(name: str, thing: Any) -> str:
    parts = arguments(thing)
    line = f"{name}({', '.join(parts)})"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def arguments(thing: Any) -> list[str]:
    """Names and defaults; what they may be is in the docstring."""
    parts: list[str] = []
    star = False
    for p in inspect.signature(thing).parameters.values():
        if p.name == "self" or p.name.startswith("_"):
            continue
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
        star |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        prefix = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        parts.append(prefix + p.name + ("" if p.default is p.empty else f"={default(p.default)}"))
    return parts


def default(value: Any) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    told = repr(value)
    return "..." if told.startswith("<") else told  # a field's factory, an object


def markdown(doc: str) -> Iterator[str]:
    """Sections of arguments become lists; code that is set in stays so."""
    fields = False
    for line in doc.splitlines():
        if FIELDS.match(line):
            fields = True
            yield from (f"**{line[:-1]}**", "")
        elif fields and (entry := ENTRY.match(line)):
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            yield f"- {names}: {entry[2]}"
        else:
            fields = fields and (line.startswith(" ") or not line)
            yield f"  {line.strip()}" if fields and line else line


if __name__ == "__main__":
    PAGE.write_text(made())
