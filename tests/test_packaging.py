"""What is handed on as a source distribution is all that it takes to test, document and run it."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
from test_architecture import ROOT

REPOSITORY = ROOT.parent
BUILD = "from setuptools import build_meta; build_meta.build_sdist('dist')"


@pytest.mark.slow
@pytest.mark.ci
def test_a_source_distribution_has_every_file_of_the_repository(tmp_path):
    needed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    pytest.importorskip("setuptools", needed[0].partition(">=")[2])
    asked = ["git", "-C", str(REPOSITORY), "ls-files", "-z"]
    listed = subprocess.run(asked, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone of the repository")
    names = {name for name in listed.stdout.split("\0") if (REPOSITORY / name).is_file()} - {""}
    source = tmp_path / "source"
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next((source / "dist").glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert names - packed == set()


def test_a_wheel_has_the_templates_of_pages_and_the_mark_of_types(tmp_path):
    """Of files that are not modules, only those that pyproject.toml names are installed."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    shutil.copytree(ROOT / "trust", tmp_path / "fedsim" / "trust")
    (tmp_path / "fedsim" / "__init__.py").touch()
    shutil.copy(ROOT / "py.typed", tmp_path / "fedsim")
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next((tmp_path / "dist").glob("*.whl"))) as wheel:
        packed = set(wheel.namelist())
    templates = {path.name for path in (ROOT / "trust" / "templates").iterdir()}
    assert "report.md.jinja" in templates and "fedsim/py.typed" in packed
    assert {f"fedsim/trust/templates/{name}" for name in templates} <= packed
