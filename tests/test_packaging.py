"""What is handed on as a source distribution is all that it takes to test, document and run it."""

import shutil
import subprocess
import sys
import tarfile
import tomllib

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
