"""The wheel: built, installed in an empty environment, and the demo started from it."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in (
        "src",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ):  # a clean copy: no build leftovers
        subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place, source]
    subprocess.run(build, check=True, capture_output=True, text=True)
    return next(place.glob("rholoss-*.whl"))


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"rholoss"}
    for needed in ("py.typed", "demo/mnist.xz", "report/demo.html.j2"):
        assert f"rholoss/{needed}" in names


def test_the_demo_starts_from_the_wheel_in_an_empty_environment(wheel, tmp_path):
    """Torch and the other dependencies are lent from this environment; rholoss itself is not."""
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    python = env / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        wheel,
    ]
    subprocess.run(install, check=True, capture_output=True, text=True)
    site = next((env / "lib").glob("python*")) / "site-packages"
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = [python, "-c", "import rholoss; print(rholoss.__file__)"]
    found = subprocess.run(where, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert found.startswith(str(site))
    demo = [
        env / "bin" / "rholoss",
        "demo",
        "--epochs",
        "1",
        "--seeds",
        "1",
        "--out",
        "out",
        "--no-open",
    ]
    run = subprocess.run(demo, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "RHO-LOSS" in run.stdout
    assert (tmp_path / "out" / "report.html").stat().st_size > 1_000_000
