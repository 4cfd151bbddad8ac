"""What is handed on as a source distribution is all that it takes to test, document and run it."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import pytest
from test_architecture import ROOT

REPOSITORY = ROOT.parent
TEMPLATE = "fedsim/trust/templates/report.md.jinja"
BACKEND = "from setuptools import build_meta as b; b"


def test_a_clone_in_the_current_directory_does_not_hide_the_package(tmp_path):
    """A directory named fedsim that is no package is a namespace package, unless a path has one."""
    clone = tmp_path / "fedsim"
    (clone / "fedsim").mkdir(parents=True)
    (clone / "fedsim" / "__init__.py").touch()
    copy_top(clone)
    run([sys.executable, "-c", f"{BACKEND}.build_editable({str(tmp_path)!r})"], clone)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    find = "import site; site.addsitedir('site'); import fedsim; print(fedsim.__file__)"
    found = run([sys.executable, "-S", "-c", find], tmp_path)
    assert found == f"{clone / 'fedsim' / '__init__.py'}\n"


@pytest.mark.slow
@pytest.mark.ci
def test_the_light_core_of_the_wheel_accounts_outside_the_repository(tmp_path):
    """Both distributions are built; the wheel is installed alone, in a clean environment."""
    copy_top(tmp_path)
    shutil.copytree(ROOT, tmp_path / "fedsim", ignore=shutil.ignore_patterns("__pycache__"))
    run([sys.executable, "-c", f"{BACKEND}.build_sdist('dist'); b.build_wheel('dist')"], tmp_path)
    (sdist,) = (tmp_path / "dist").glob("fedsim_dp-*.tar.gz")
    (wheel,) = (tmp_path / "dist").glob("fedsim_dp-*-py3-none-any.whl")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for names in (packed, zipfile.ZipFile(wheel).namelist()):
        assert {"fedsim_dp.py", "fedsim/py.typed", TEMPLATE} <= set(names)
    environment, outside = tmp_path / "environment", tmp_path / "outside"
    outside.mkdir()
    venv.create(environment, with_pip=True)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
    run([*pip, wheel, "-c", REPOSITORY / "constraints.txt"], outside)
    fedsim = environment / "bin" / "fedsim"
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert run([fedsim, "--version"], outside) == f"fedsim {version}\n"
    words = "account uls --num-steps 9 --sampling-prob 0.01 --noise-multiplier 1 --delta 1e-6"
    assert 0 < json.loads(run([fedsim, *words.split(), "--json"], outside))["epsilon"] < 1
    absent = "import fedsim, importlib.util as u; print([u.find_spec(n) for n in ('jax', 'ray')])"
    assert run([environment / "bin" / "python", "-c", absent], outside) == "[None, None]\n"


def copy_top(directory):
    for name in ("pyproject.toml", "README.md", "LICENSE", "fedsim_dp.py"):
        shutil.copy(REPOSITORY / name, directory / name)


def run(words, directory):
    """Run a command without this environment's paths. Returns: its stdout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
