"""fedsim as it is built and installed: alone, and beside another package of its name."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import pytest
from test_architecture import ROOT, SOURCES, packages

import fedsim
import fedsim_dp
from fedsim.errors import EXTRAS

PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
IMPORT_OF = {"dp-accounting": "dp_accounting", "grpcio": "grpc", "markdown-it-py": "markdown_it"}
IMPORT_OF |= {"mlflow-skinny": "mlflow", "pyyaml": "yaml"}
WITH = {"jax": "jaxlib", "jinja2": "markupsafe"}  # which come with them
TEMPLATES = {"fedsim/data/chatml-tools.jinja", "fedsim/trust/templates/report.md.jinja"}
BLOCKER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}.split():
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def imports_of(requirements):
    """Import names of requirements, those of fedsim's own extras left out."""
    names = [re.split(r"[\[>=]", requirement)[0] for requirement in requirements]
    found = {IMPORT_OF.get(name, name) for name in names if name != "fedsim-dp"}
    return found | {WITH[name] for name in found & WITH.keys()}


def test_fedsim_imports_the_core_and_packages_that_have_the_extra_of_pyproject():
    extras = {name: imports_of(PROJECT["optional-dependencies"][name]) for name in EXTRAS}
    assert extras == {name: set(names.split()) for name, names in EXTRAS.items()}
    others = set().union(*map(packages, SOURCES)) - {"fedsim"} - set(sys.stdlib_module_names)
    assert others <= imports_of(PROJECT["dependencies"]).union(*extras.values())


def test_epsilon_needs_the_core_alone():
    code = """
import fedsim
print(fedsim.__version__)
step = fedsim.StepEvent(noise_multiplier=1.0, sampling_prob=0.01)
print(fedsim.accounting.epsilon([(step, 10)], delta=1e-6) < 1)
from fedsim.cli.main import main
main("account uls --num-steps 10 --sampling-prob 0.01 --noise-multiplier 1 --delta 1e-6".split())
main("calibrate els --epsilon 3 --num-steps 9 --sampling-prob 0.1 --delta 1e-5 --json".split())
try:
    fedsim.train
except fedsim.ConfigError as error:
    print(error)
main("train uls --data pydocs --epsilon 1 --num-steps 2 --engine local --run-dir never".split())
"""
    words = [sys.executable, "-c", BLOCKER.format(names=" ".join(EXTRAS.values())) + code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    *answers, said = done.stdout.splitlines()
    assert answers[:2] == [fedsim.__version__, "True"] and answers[2].startswith("epsilon 0.")
    line = "the package {} is not installed: pip install -e '.[train]' in a clone of fedsim"
    assert said == line.format("pyarrow") and done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"fedsim: error: {line.format('jax')}"
    assert "Traceback" not in done.stderr


def test_an_import_that_is_not_ours_ends_with_the_remedy(tmp_path):
    shutil.copy(fedsim_dp.__file__, tmp_path)
    (tmp_path / "fedsim").mkdir()
    (tmp_path / "fedsim/__init__.py").write_text("'Federated simulations.'\n")
    words = [sys.executable, "-S", "-c", "import fedsim_dp; fedsim_dp.main()"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "fedsim: error: `import fedsim` is not fedsim-dp: pip uninstall fedsim && pip install "
        "--force-reinstall --no-deps -e . in a clone of fedsim-dp\n"
    )


@pytest.mark.slow
def test_the_light_core_of_the_wheel_accounts_outside_the_repository(tmp_path):
    """Both distributions are built; the wheel is installed alone, in a clean environment."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "fedsim_dp.py"):
        shutil.copy(ROOT.parent / name, tmp_path / name)
    shutil.copytree(ROOT, tmp_path / "fedsim", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    run([sys.executable, "-c", build], tmp_path)
    (sdist,) = (tmp_path / "dist").glob("fedsim_dp-*.tar.gz")
    (wheel,) = (tmp_path / "dist").glob("fedsim_dp-*-py3-none-any.whl")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for names in (packed, zipfile.ZipFile(wheel).namelist()):
        assert {"fedsim_dp.py", "fedsim/py.typed", *TEMPLATES} <= set(names)
    environment, outside = tmp_path / "environment", tmp_path / "outside"
    outside.mkdir()
    venv.create(environment, with_pip=True)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
    run([*pip, wheel, "-c", ROOT.parent / "constraints.txt"], outside)
    program = environment / "bin" / "fedsim"
    assert run([program, "--version"], outside) == f"fedsim {PROJECT['version']}\n"
    words = "account uls --num-steps 9 --sampling-prob 0.01 --noise-multiplier 1 --delta 1e-6"
    assert 0 < json.loads(run([program, *words.split(), "--json"], outside))["epsilon"] < 1
    absent = "import fedsim, importlib.util as u; print([u.find_spec(n) for n in ('jax', 'ray')])"
    assert run([environment / "bin" / "python", "-c", absent], outside) == "[None, None]\n"


def run(words, directory):
    """Run a command without this environment's paths. Returns: its stdout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
