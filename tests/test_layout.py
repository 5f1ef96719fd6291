"""The shape of the package: who imports whom, how long files are, what importing it does."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rholoss
from rholoss import errors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rholoss"
TESTS = ROOT / "tests"
FILES = sorted(SOURCE.rglob("*.py"))

# Who may import whom. A room is a module or a package of `rholoss`; `errors` is open to all but core.
ROOMS = {
    "core": "",
    "errors": "",
    "dealing": "",
    "scores": "core",
    "picks": "core",
    "quantities": "core",
    "losses": "core",
    "methods": "core scores picks",
    "naming": "losses",
    "data": "core",
    "indexed": "core data sources",
    "schedules": "core",
    "steplog": "core",
    "guard": "core",
    "noise": "core",
    "optimizers": "",
    "progress": "core",
    "packing": "core data",
    "distributed": "core data packing",
    "sources": "core losses",
    "ladder": "core distributed guard sources steplog",
    "arguments": "core ladder losses naming schedules sources",
    "verdict": "steplog",
    "ledger": "verdict",
    "watched": "ledger",
    "sampler": "core data dealing indexed picks",
    "memory": "core",
    "plans": "memory",
    "planned": "core data dealing distributed indexed memory sampler",
    "modes": "core",
    "scoring": "core data losses modes quantities",
    "streams": "core data dealing distributed sources",
    "il": (
        "core data distributed indexed losses modes naming optimizers scoring sources progress "
        "streams il"
    ),
    "state": "selector",
    "selector": (
        "core data methods scoring schedules ledger guard losses quantities sampler sources steplog "
        "arguments distributed ladder state watched"
    ),
    "workers": "core data indexed modes picks sampler selector state steplog workers",
    "coreset": "core data indexed methods scoring losses il progress sources",
    "timing": "core data indexed methods modes scoring losses il progress",
    "advise": "core ledger timing",
}
ENDS = {"demo", "report", "cli", "integrations"}  # may import anything; nobody else imports them
ROOMS["engine"] = " ".join([*ROOMS, "engine"])
ROOMS["__init__"] = " ".join([*ROOMS])
LIBRARIES = {"torch", "numpy"}  # what importing the package may import
HEAVY = {"rich", "typer", "plotly", "jinja2", "pyarrow", "transformers", "lightning", "scipy"}

# Modules whose tests have another name than their own. A package named here has tests by its name.
PACKAGES = {"demo", "report", "cli", "engine", "workers"}
TESTED_BY = {
    "data": "data_batches",
    "il/build": "il_store",
    "il/files": "il_store",
    "il/hashing": "il_fingerprint",
    "il/ids": "il_store",
    "il/parquet": "il_store",
    "il/partial": "il_fit",
    "il/points": "il_fit",
    "il/ranks": "il_spread",
    "il/score": "il_fit",
    "il/train": "il_fit",
    "il/views": "il_fingerprint",
    "integrations/padding": "integrations_hf_parts",
    "arguments": "selector",
    "errors": "layout",
    "modes": "scoring",
    "optimizers": "il_fit",
    "packing": "distributed",
    "state": "selector_run",
    "verdict": "ledger",
    "watched": "ledger",
}


def name_of(path):
    """'il/store' for src/rholoss/il/store.py."""
    return path.relative_to(SOURCE).with_suffix("").as_posix()


def room_of(path):
    return name_of(path).split("/")[0]


def imports(tree):
    """Full names of what is imported, anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are written in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(path):
    known = {room_of(file) for file in FILES}
    for name in imports(ast.parse(path.read_text())):
        package, *rest = name.split(".")
        if package == "rholoss":
            yield rest[0] if rest and rest[0] in known else "__init__"


def imported_at_once(tree):
    """Full names of what is imported when the module is, apart from what only type checkers read."""
    for node in tree.body:
        checked = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not checked and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imports(node)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_one_way(path):
    room = room_of(path)
    if room in ENDS or room == "__main__":
        return
    assert room in ROOMS, f"{room} is new: say in ROOMS what it may import"
    allowed = set(ROOMS[room].split()) | {"errors"} if room not in ("core", "errors") else set()
    assert set(rooms_imported(path)) <= allowed


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_torch_and_numpy_are_imported_with_the_package(path):
    room = room_of(path)
    if room in ENDS or room == "__main__":
        return
    found = {name.split(".")[0] for name in imported_at_once(ast.parse(path.read_text()))}
    foreign = found - set(sys.stdlib_module_names) - {"rholoss"}
    assert foreign <= ({"torch"} if room == "core" else set() if room == "errors" else LIBRARIES)


def test_files_stay_small():
    lines = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert lines["core"] <= 150
    assert {name: n for name, n in lines.items() if n > 400} == {}


def test_every_module_has_tests():
    missing = []
    for path in FILES:
        name = name_of(path)
        if path.name in ("__init__.py", "__main__.py"):
            continue
        if room_of(path) in PACKAGES:
            found = [*TESTS.glob(f"test_{room_of(path)}*.py")]
        else:
            found = [*TESTS.glob(f"test_{TESTED_BY.get(name, name.replace('/', '_'))}.py")]
        missing += [] if found else [name]
    assert not missing, missing
    assert set(TESTED_BY) <= {name_of(path) for path in FILES}, "TESTED_BY names what is gone"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_imports_and_says_what_it_is_for(path):
    name = "rholoss." + name_of(path).replace("/", ".").removesuffix("__init__")
    if path.name == "__main__.py":
        assert ast.get_docstring(ast.parse(path.read_text()))
        return
    assert importlib.import_module(name.rstrip(".")).__doc__


def test_public_names_are_sorted_there_and_documented():
    # As ruff sorts them: constants, then classes, then functions.
    kind = {True: 0, False: 2}
    order = [
        (kind[name.isupper()] if name.isupper() or name.islower() else 1, name)
        for name in rholoss.__all__
    ]
    assert order == sorted(order)
    assert len(set(rholoss.__all__)) == len(rholoss.__all__)
    for name in rholoss.__all__:
        value = getattr(rholoss, name)
        if not callable(value):
            continue
        text = value.__doc__ or ""
        assert text, name
        assert not text.startswith(f"{name}("), f"{name} has only the docstring of a dataclass"
        for part, member in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(member) and not part.startswith("_"):
                assert member.__doc__, f"{name}.{part}"


def test_every_error_can_be_caught_as_one_and_as_a_value_error():
    found = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert len(found) >= 5
    assert all(issubclass(value, errors.RholossError) for value in found)
    assert issubclass(errors.RholossError, ValueError)


def test_the_version_is_that_of_the_package():
    stated = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert rholoss.__version__ == stated.group(1)


IMPORT_ALONE = """
import json, random, sys, warnings
import numpy, torch

def state():
    return [
        torch.get_rng_state().tolist(),
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        repr(random.getstate()),
        repr(numpy.random.get_state()),
        repr(warnings.filters),
    ]

before = state()
import rholoss
print(json.dumps([state() == before, sorted(sys.modules)]))
"""


def test_importing_the_package_imports_nothing_heavy_and_changes_nothing():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE], capture_output=True, text=True, check=True
    )
    unchanged, modules = json.loads(done.stdout)  # and nothing else was printed
    assert unchanged
    assert done.stderr == ""
    assert HEAVY.isdisjoint(modules)
    assert [m for m in modules if m.startswith(tuple(f"rholoss.{end}" for end in ENDS))] == []


def test_no_file_knows_the_machine_it_was_written_on():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    private = re.compile(r"(?<![\w.])/(home|Users|root|work)/\w")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" not in content[:4096]:
            lines = content.decode(errors="replace").splitlines()
            found += [f"{name}:{i}" for i, line in enumerate(lines, 1) if private.search(line)]
    assert found == []
