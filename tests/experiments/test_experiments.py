"""A pulse of every experiment: its smallest scale runs, and it says what it would cost."""

import inspect
import runpy
import sys
from pathlib import Path

import pytest

from experiments import table_mutations
from experiments.__main__ import names
from experiments.data import stand_ins
from experiments.mistakes import MISTAKES

ROOT = Path(__file__).parents[2]


def run(name, monkeypatch, *flags):
    """`python -m experiments.NAME FLAGS`, in this process."""
    monkeypatch.setattr(sys, "argv", [name, *flags])
    runpy.run_path(str(ROOT / "experiments" / f"{name}.py"), run_name="__main__")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Where results go; experiments that are views of the same runs find them there."""
    return tmp_path_factory.mktemp("out")


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_smoke(name, out, monkeypatch):
    before = set(out.iterdir())
    run(name, monkeypatch, "--scale", "smoke", "--out", str(out))
    suffixes = {path.suffix for path in set(out.iterdir()) - before}
    assert ({".csv"} if name.startswith("table") else {".csv", ".png"}) <= suffixes


def test_real_text_that_is_not_there_is_a_line_that_says_where_it_comes_from(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(stand_ins, "SHARED", tmp_path / "none")
    with pytest.raises(SystemExit) as stop:
        run("fig06_privacy_loss", monkeypatch, "--scale", "small", "--out", str(tmp_path))
    said = capsys.readouterr().err
    assert f"{tmp_path}/none/debian_desc.parquet is not there: experiments/README.md" in said
    assert stop.value.code == 2


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_every_mistake_can_be_planted_and_has_its_test(mistake, monkeypatch):
    """In the code as it is: what a patch replaces is there, and takes the arguments it names."""
    for patch in mistake.patches:
        place, name, right = patch.target()
        patch.expect_callable()
        patch.plant(monkeypatch.setattr)
        assert inspect.getattr_static(place, name) is not right
    file, _, test = mistake.test.partition("::")
    test, *_ = test.partition("[")  # of its parameters
    assert f"def {test}(" in (ROOT / "tests" / file).read_text()


def test_a_mistake_is_in_what_a_test_starts_and_what_it_made_in_the_cache_of_no_other(tmp_path):
    (mistake,) = (each for each in MISTAKES if each.name == "the key in whatever prints it")
    sound, own = (table_mutations.place(tmp_path, each) for each in (None, mistake))
    show = "from fedsim import files, keys; print(keys.SecretKey(bytes(32)), files.cache_dir())"
    start = f"import conftest, subprocess, sys; subprocess.run([sys.executable, '-c', {show!r}])"
    found = table_mutations.python(own, "-c", start, where=tmp_path).stdout.split()
    assert found == [f"SecretKey({bytes(32).hex()})", str(own / "cache")]
    assert own != sound and not (sound / "sitecustomize.py").exists()
    assert len({(each / "cache" / "compiled").resolve() for each in (own, sound)}) == 1
