"""Make docs/reference.md from the docstrings: `python tools/reference.py`."""

from __future__ import annotations

import dataclasses
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
COMMENT = re.compile(r"^    (\w+): [^#]*  # (.*)$", re.M)  # on a field of a dataclass
WIDTH = 100


def made() -> str:
    """The page."""
    lines = [HEAD]
    for title, (module, names) in SECTIONS.items():
        lines += [f"## {title}", ""]
        for name in names.split():
            lines += described(importlib.import_module(module), name)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def described(module: Any, name: str) -> Iterator[str]:
    """A name, how it is called, what its docstring says, and its public methods."""
    thing = getattr(module, name)
    place = module.__name__ if module.__name__ != "rholoss" else "rho"
    yield from (f"### {name}", "")
    if isinstance(thing, dict):  # METHODS
        yield from (
            f"`{place}.{name}`: a dict of all methods by name, with what each of them reads:",
            "",
        )
        for key, method in thing.items():
            yield f"- `{key}`: {', '.join(sorted(method.needs)) or 'nothing'}"
        yield ""
        return
    if not inspect.isclass(thing) and not inspect.isroutine(thing):  # a type of functions
        yield from ("`" + re.sub(r"\b\w+\.", "", str(thing)) + "`", "")
        return
    yield from ("```text", called(f"{place}.{name}", thing), "```", "")
    doc = inspect.getdoc(thing) or ""
    yield from markdown(doc)
    yield ""
    if dataclasses.is_dataclass(thing) and "Args:" not in doc and "Attributes:" not in doc:
        fields = COMMENT.findall(inspect.getsource(thing))
        yield from ("**Attributes**", "", *(f"- `{name}`: {told}" for name, told in fields), "")
    methods = [*methods_of(thing)] if inspect.isclass(thing) else []
    if methods:
        yield from ("**Methods and properties**", "", *methods, "")


def methods_of(kind: type) -> Iterator[str]:
    """The methods and properties that a class defines itself, without those that a base of ours has."""
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
        summary, _, rest = (inspect.getdoc(value) or "").partition("\n\n")
        if summary:
            yield f"- `.{name}{brackets}`: {summary.replace(chr(10), ' ')}"
            if rest:
                yield from ("", *(f"  {line}".rstrip() for line in markdown(rest)), "")


def called(name: str, thing: Any) -> str:
    """The call as it is written, on one line if it fits."""
    parts = arguments(thing)
    line = f"{name}({', '.join(parts)})"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def arguments(thing: Any) -> list[str]:
    """The names and defaults of the arguments; their meaning is in the docstring."""
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
    """A default as the page shows it; `...` if it has no short form (an object, a lambda)."""
    told = value.__name__ if callable(value) and hasattr(value, "__name__") else repr(value)
    return "..." if told.startswith("<") else told


def markdown(doc: str) -> Iterator[str]:
    """A docstring as Markdown: sections of arguments become lists, indented code stays as it is."""
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
