"""Run the tests of the library and the integrations against the oldest and the newest supported versions.

    make compat        or        python tools/compat.py [oldest between newest trl] [--folder DIR]

Each set of versions gets a virtual environment of its own in a folder that is thrown away (or kept, with
`--folder`, to be used again). The output goes to tests/full/compat_<set>.txt; nothing of it names the
machine.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTPUTS = ROOT / "tests" / "full"
TOOLS = [
    *("pytest", "hypothesis", "rich", "typer", "safetensors", "pyarrow", "setuptools"),
    *("jinja2", "plotly", "pillow", "webdataset"),
]
FRAMEWORKS = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "lightning",
    "trl",
    "peft",
    "numpy",
)
SETS = {
    "oldest": [
        *(
            "torch==2.6.0",
            "numpy<2.3",
            "transformers==4.57.1",
            "accelerate==1.3.0",
            "lightning==2.5.0",
        ),
        "datasets==4.0.0",
    ],
    "between": ["torch==2.11.0", "transformers==5.17.0", "accelerate", "lightning", "datasets"],
    "newest": ["torch", "transformers", "accelerate", "lightning", "datasets"],
    "trl": ["torch==2.13.0", "trl", "peft", "transformers", "accelerate", "datasets"],
}
OTHERS = ("integrations", "experiments", "bench", "docs", "layout", "package")
QUIET = ["--quiet", "--disable-pip-version-check"]


def install(folder: Path, packages: list[str]) -> Path:
    """A virtual environment with these packages; one that is there already is used again."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", *QUIET, *packages, *TOOLS], check=True)
    return python


def versions(python: Path) -> str:
    """What is installed of the frameworks, as they say themselves."""
    code = (
        "import sys\nfrom importlib.metadata import version, PackageNotFoundError\n"
        "print('python', '.'.join(map(str, sys.version_info[:3])), end='')\n"
        f"for name in {FRAMEWORKS}:\n"
        "    try: print(',', name, version(name), end='')\n"
        "    except PackageNotFoundError: pass\n"
    )
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout


def library() -> list[str]:
    """The files that test the library itself."""
    names = sorted(path.name for path in (ROOT / "tests").glob("test_*.py"))
    return [
        f"tests/{name}" for name in names if not name.startswith(tuple(f"test_{o}" for o in OTHERS))
    ]


def integrations() -> list[str]:
    """The files that test an integration. Those for a GPU are run there."""
    names = sorted(path.name for path in (ROOT / "tests").glob("test_integrations_*.py"))
    return [f"tests/{name}" for name in names if not name.endswith("_gpu.py")]


def run_tests(python: Path) -> tuple[str, bool]:
    """The last line of each file's tests, and why some were skipped or failed."""
    report, fine = [], True
    places = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    around = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    # A process for each integration: what they set up for a process, others would find.
    for name, paths in [("the library", library()), *((path, [path]) for path in integrations())]:
        # Warnings of old versions about new Pythons and the like are theirs, not ours.
        command = [
            python,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
            "-rsfE",
            "-m",
            "not gpu and not full",
            *paths,
        ]
        done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        told = [line for line in lines if line.startswith(("SKIPPED", "FAILED", "ERROR"))]
        last = next(
            (s for s in reversed(lines) if re.search(r"\d+ (passed|failed|skipped|error)", s)), "?"
        )
        report += [f"{name}: {last.strip('= ')}", *(f"    {line}" for line in told)]
        fine &= done.returncode in (0, 5)  # 5: all were skipped
    return "\n".join(report).replace(str(ROOT.parent), ".."), fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", default=list(SETS), help=f"of {', '.join(SETS)}")
    parser.add_argument("--folder", type=Path, help="keep the environments here")
    given = parser.parse_args()
    all_fine = True
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.sets:
            print(f"{name}: installing", flush=True)
            python = install((given.folder or Path(temporary)) / name, SETS[name])
            print(f"{name}: testing", flush=True)
            report, fine = run_tests(python)
            head = f"`make compat`, {name}, {time.strftime('%Y-%m-%d')}: {versions(python)}"
            fresh = OUTPUTS / f"compat_{name}.tmp"
            fresh.write_text(f"{head}\n\n{report}\n")
            print(fresh.read_text(), flush=True)
            fresh.replace(fresh.with_suffix(".txt"))
            all_fine &= fine
    return 0 if all_fine else 1


if __name__ == "__main__":
    sys.exit(main())
