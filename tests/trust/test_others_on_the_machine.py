"""What other users of the machine can set: nothing that is theirs is believed, run or changed.

Other users are emulated by giving files away, which takes root; else those tests are skipped.
"""

import os
import shutil
import stat
from pathlib import Path

import jax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_verify import command, write_texts as write_verify_texts

from fedsim import files
from fedsim.cli.main import main
from fedsim.data import corpora
from fedsim.engine.environment import keep_compiled
from fedsim.files import NotOurs, own_directory
from fedsim.run.console import Console
from fedsim.trust.verify import verify

SOMEBODY = 12345
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


def given_away(path):
    os.chown(path, SOMEBODY, SOMEBODY)


def opened_to_all(path):
    path.chmod(0o777)


def opened_to_the_group(path):
    path.chmod(0o770)


ATTACKS = [
    pytest.param(given_away, marks=needs_root),
    opened_to_all,
    opened_to_the_group,
]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("above", [0, 1, 2, 3])
def test_a_directory_is_ours_as_long_as_all_above_it_are(attack, above, tmp_path):
    place = tmp_path / "a" / "b" / "c" / "compiled"
    assert own_directory(place) == place
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    attacked = (place, *place.parents)[above]
    attack(attacked)
    before = attacked.stat().st_mode
    with pytest.raises(NotOurs, match=f"cache={attacked}: .*FEDSIM_CACHE_DIR"):
        own_directory(place)
    assert attacked.stat().st_mode == before  # only who made a directory changes its mode


def test_in_a_directory_like_tmp_ours_is_ours_and_it_is_not(tmp_path):
    """FEDSIM_CACHE_DIR=/tmp as root: fedsim took the right to write to it from all others."""
    tmp_path.chmod(0o1777)
    assert own_directory(tmp_path / "compiled") == tmp_path / "compiled"
    with pytest.raises(NotOurs, match="can be written to by others .mode 1777."):
        own_directory(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777


def test_what_is_made_is_ours_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        own_directory(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")] == [0o700, 0o700]


def test_a_link_is_judged_by_where_it_leads(tmp_path):
    (tmp_path / "theirs").mkdir()
    opened_to_all(tmp_path / "theirs")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(NotOurs):
        own_directory(tmp_path / "link" / "compiled")
    assert list((tmp_path / "theirs").iterdir()) == []  # nor is anything made there
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    assert own_directory(tmp_path / "link" / "compiled") == tmp_path / "ours" / "compiled"


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(NotOurs, match="cache="):
        own_directory(tmp_path / "cache" / "data")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A place of a cache that is safe, to be attacked."""
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))
    return own_directory(tmp_path / "cache")


@pytest.mark.parametrize("attack", ATTACKS)
def test_compiled_programs_of_others_are_not_used(attack, cache, capsys):
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        keep_compiled(cache / "compiled")
        place = Path(jax.config.jax_compilation_cache_dir)
        assert place.parent == cache / "compiled" and place.stat().st_mode & 0o777 == 0o700
        jax.config.update("jax_compilation_cache_dir", None)
        attack(cache)
        capsys.readouterr()
        keep_compiled(cache / "compiled")
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"not kept: cache={cache}: " in err


def write_texts(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"user_id": ["a", "b"] * 9, "text": ["x"] * 18}), path)
    return path


def test_built_data_in_the_cache_are_their_owners_alone(tmp_path, cache):
    corpora.load(write_texts(tmp_path), max_length=8)
    assert (cache / "data").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("where", ["cache", "data"])
def test_data_that_somebody_else_could_have_put_there_are_refused(
    attack, where, tmp_path, cache, capsys
):
    """One who makes data/ beforehand would read what is built there, and could change it."""
    place = cache / "data" if where == "data" else cache
    place.mkdir(exist_ok=True)
    attack(place)
    with pytest.raises(NotOurs, match=f"cache={place}"):
        corpora.load(write_texts(tmp_path), max_length=8)
    assert [path.name for path in place.iterdir()] == []
    with pytest.raises(SystemExit) as stop:
        words = f"train uls --epsilon 4 --num-steps 2 --data {tmp_path / 't.parquet'}"
        main([*words.split(), "--run-dir", str(tmp_path / "run")])
    assert stop.value.code == 2 and not (tmp_path / "run").exists()
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith(f"fedsim: error: cache={place}: ") and len(err) == 2


@pytest.mark.parametrize("attack", ATTACKS)
def test_tables_are_not_written_where_others_can_change_them(attack, cache):
    from fedsim.library import tables

    attack(cache)
    with pytest.raises(NotOurs):
        rows = pa.record_batch({"u": ["a"], "t": ["b"]})
        tables._written(iter([rows]), {"user": "u", "text": "t"})
    assert files.cache_dir() == cache and list(cache.iterdir()) == []


@pytest.fixture(scope="module")
def run_of_ours(tmp_path_factory):
    """(what begins and resumes a run, its directory): a finished one; not to be changed."""
    place = tmp_path_factory.mktemp("runs")
    texts = write_verify_texts(place / "texts.parquet")
    main(command(texts, place / "run", **{"num-steps": 2}))
    return texts, place / "run"


def give_away_all(run_dir):
    for path in (run_dir, *run_dir.rglob("*")):
        given_away(path)


def give_away(name):
    return lambda run_dir: given_away(run_dir / name)


def lead_elsewhere(name):
    def attack(run_dir):
        (run_dir / name).rename(run_dir.parent / "elsewhere")
        (run_dir / name).symlink_to(run_dir.parent / "elsewhere")

    return attack


TAMPERED = {
    "all": pytest.param(give_away_all, "belongs to another user", marks=needs_root),
    "directory": pytest.param(given_away, "belongs to another user", marks=needs_root),
    "key": pytest.param(give_away("secret.json"), "belongs to another user", marks=needs_root),
    "checkpoints": pytest.param(give_away("checkpoints"), "another user", marks=needs_root),
    **{name: pytest.param(lead_elsewhere(name), "a link to") for name in
       ("secret.json", "ledger.jsonl", "checkpoints", "metrics.jsonl", "tb")},
}  # fmt: skip


@pytest.mark.parametrize("attack, says", TAMPERED.values(), ids=TAMPERED)
def test_a_run_that_is_anothers_or_leads_elsewhere_is_refused(
    attack, says, run_of_ours, run_dir, capsys
):
    texts, done = run_of_ours
    shutil.copytree(done, run_dir)
    attack(run_dir)
    with pytest.raises(SystemExit) as stop:
        main([*command(texts, run_dir, **{"num-steps": 2}), "--resume"])
    *_, last = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and last.startswith(f"fedsim: error: run_dir={run_dir}: ")
    assert says in last
    broken = [check for check in verify(run_dir, console=Console()) if check.holds is False]
    assert [check.promise for check in broken] == ["key"] and says in broken[0].found


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_directory_that_somebody_made_beforehand_gets_no_run(mode, run_of_ours, run_dir, capsys):
    run_dir.mkdir()
    run_dir.chmod(mode)
    given_away(run_dir)
    with pytest.raises(SystemExit) as stop:
        main(command(run_of_ours[0], run_dir, **{"num-steps": 2}))
    assert stop.value.code == 2 and f"run_dir={run_dir}: " in capsys.readouterr().err
    assert list(run_dir.iterdir()) == []


def test_a_directory_that_others_can_look_into_gets_no_key(run_of_ours, run_dir, capsys):
    run_dir.mkdir()
    run_dir.chmod(0o755)
    with pytest.raises(SystemExit) as stop:
        main(command(run_of_ours[0], run_dir, **{"num-steps": 2}))
    assert stop.value.code == 2 and "mode 700 (this one: mode 755)" in capsys.readouterr().err
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o755 and list(run_dir.iterdir()) == []
    run_dir.chmod(0o700)
    main(command(run_of_ours[0], run_dir, **{"num-steps": 2}))
