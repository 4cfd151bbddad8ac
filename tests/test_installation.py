"""fedsim without its optional packages, and beside the other distribution with its import."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from test_architecture import ROOT, SOURCES, packages

import fedsim
import fedsim_dp
from fedsim.cli.main import main
from fedsim.installation import (
    DISTRIBUTION,
    EXTRAS,
    MissingPackage,
    expect_installed,
    optional,
    version,
)
from fedsim.run.loggers import SENDING

PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
IMPORT_OF = {"dp-accounting": "dp_accounting", "grpcio": "grpc", "markdown-it-py": "markdown_it"}
IMPORT_OF |= {"mlflow-skinny": "mlflow", "pyyaml": "yaml"}
WITH = {"jax": "jaxlib", "jinja2": "markupsafe"}  # which come with them
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
    found = {IMPORT_OF.get(name, name) for name in names if name != DISTRIBUTION}
    return found | {WITH[name] for name in found & WITH.keys()}


CORE = imports_of(PROJECT["dependencies"])


def run_without(names, code):
    """Run code in a process that cannot import some packages."""
    words = [sys.executable, "-c", BLOCKER.format(names=names) + code]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_a_folder_is_no_package(tmp_path, monkeypatch):
    """W&B makes a folder `wandb`, perhaps in the working directory."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackage, match=r"\[wandb\]"):
        expect_installed("wandb")


def test_every_optional_package_has_the_extra_of_pyproject():
    extras = {name: imports_of(PROJECT["optional-dependencies"][name]) for name in EXTRAS}
    assert extras == {name: set(names.split()) for name, names in EXTRAS.items()}


def packages_of_fedsim():
    return set().union(*map(packages, SOURCES)) - {"fedsim"}


def test_fedsim_imports_nothing_else():
    others = packages_of_fedsim() - set(sys.stdlib_module_names)
    assert others <= CORE.union(*map(str.split, EXTRAS.values()))


def test_an_extra_has_all_that_it_needs_and_all_has_every_command():
    extras = PROJECT["optional-dependencies"]
    assert extras["all"] == [f"{DISTRIBUTION}[{','.join(n for n in EXTRAS if n not in SENDING)}]"]
    alone = {name for name, needs in extras.items() if not needs[0].startswith(DISTRIBUTION)}
    assert alone == {"train"}
    for needs in extras.values():
        named = re.findall(rf"{DISTRIBUTION}\[(.*?)\]", " ".join(needs))
        assert set(",".join(named).split(",")) - {""} <= extras.keys()


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
except Exception as error:
    print(type(error).__name__, error)
main("train uls --data pydocs --epsilon 1 --num-steps 2 --run-dir never".split())
"""
    done = run_without(" ".join(EXTRAS.values()), code)
    *answers, said = done.stdout.splitlines()
    assert answers[:2] == [fedsim.__version__, "True"] and answers[2].startswith("epsilon 0.")
    assert said.startswith("MissingPackage the package jax is not installed: pip install ")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    remedy = "pip install 'fedsim-dp[train]' ('fedsim-dp[all]' for all commands)"
    assert done.stderr.splitlines()[-1] == (
        f"fedsim: error: the package jax is not installed: {remedy}"
    )


@pytest.mark.parametrize(
    "package, words",
    [
        ("ray", "train uls --data nowhere --epsilon 1 --num-steps 2 --run-dir never"),
        ("markdown_it", "audit uls --data nowhere --epsilon 1 --num-steps 2 --run-dir never"),
        ("matplotlib", "recommend --data nowhere --epsilon 1 --num-steps 2 --plot a.png"),
        ("datasets", "data build hf:someone/something --out never"),
    ],
)
def test_a_missing_package_is_said_before_the_work(package, words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)  # its import fails
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert last.startswith(f"fedsim: error: the package {package} is not installed: pip install ")


def test_a_failed_import_of_any_other_package_is_an_error_of_code():
    with pytest.raises(ModuleNotFoundError, match="nobody"), optional():
        raise ModuleNotFoundError("No module named 'nobody'", name="nobody.knows")
    with pytest.raises(MissingPackage, match=r"'fedsim-dp\[ray\]'"), optional():
        raise ModuleNotFoundError("No module named 'ray.util'", name="ray.util")
    expect_installed("jax", "duckdb")


def test_the_version_is_that_of_pyproject():
    assert fedsim.__version__ == version() == PROJECT["version"]
    assert version("no-such-package") == "none"


# ---- The other distribution ---------------------------------------------------------------------


@pytest.fixture
def there(monkeypatch):
    """Says which distributions are installed."""

    def say(*names):
        monkeypatch.setattr(fedsim_dp, "is_installed", lambda name: name in names)

    return say


def test_the_console_script_is_the_check():
    assert PROJECT["scripts"] == {"fedsim": "fedsim_dp:main"}
    assert PROJECT["name"] == DISTRIBUTION == fedsim_dp.NAME
    assert fedsim_dp.is_ours()
    imported = ast.walk(ast.parse((ROOT.parent / "fedsim_dp.py").read_text()))
    froms = {node.module for node in imported if isinstance(node, ast.ImportFrom)}
    assert {name for name in froms if name.startswith("fedsim")} == {"fedsim.cli.main"}


@pytest.mark.parametrize("content", ["'Federated simulations.'\n", None])
def test_an_import_that_is_not_ours_ends_with_the_remedy(content, tmp_path):
    shutil.copy(fedsim_dp.__file__, tmp_path)
    (tmp_path / "fedsim").mkdir()
    if content is not None:  # else what a removal of the other leaves behind
        (tmp_path / "fedsim/__init__.py").write_text(content)
    words = [sys.executable, "-S", "-c", "import fedsim_dp; fedsim_dp.main()"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "fedsim: error: `import fedsim` is not fedsim-dp: pip uninstall fedsim && pip install "
        "--force-reinstall --no-deps fedsim-dp\n"
    )


def test_the_other_distribution_beside_ours_is_said(there, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fedsim", "--version"])
    there()
    fedsim_dp.main()
    assert capsys.readouterr().err == ""
    there("fedsim")
    fedsim_dp.main()
    out, err = capsys.readouterr()
    assert out == f"fedsim {fedsim.__version__}\n"
    assert err.startswith("fedsim: warning: the distribution fedsim") and err.count("\n") == 1
