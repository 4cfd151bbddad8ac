"""What other users of the machine can set: nothing that is theirs is believed, run or changed.

Other users are emulated by giving files away, which takes root; else those tests are skipped.
"""

import os
import shutil
import stat

import jax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_verify import command, write_texts

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


def opened_to_the_group(path):
    path.chmod(0o770)


ATTACKS = [pytest.param(given_away, marks=needs_root), opened_to_the_group]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("above", [0, 1, 3])
def test_a_directory_is_ours_as_long_as_all_above_it_are(attack, above, tmp_path):
    place = tmp_path / "a" / "b" / "c" / "compiled"
    assert own_directory(place) == place
    assert {stat.S_IMODE(p.stat().st_mode) for p in (place, place.parent)} == {0o700}
    attacked = (place, *place.parents)[above]
    attack(attacked)
    before = attacked.stat().st_mode
    with pytest.raises(NotOurs, match=f"cache={attacked}: .*FEDSIM_CACHE_DIR"):
        own_directory(place)
    assert attacked.stat().st_mode == before  # only who made a directory changes its mode


def test_in_a_directory_like_tmp_ours_is_ours_and_a_link_is_judged_by_where_it_leads(tmp_path):
    tmp_path.chmod(0o1777)
    assert own_directory(tmp_path / "compiled") == tmp_path / "compiled"
    with pytest.raises(NotOurs, match="can be written to by others .mode 1777."):
        own_directory(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(NotOurs):
        own_directory(tmp_path / "link" / "compiled")
    assert list((tmp_path / "theirs").iterdir()) == []  # nor is anything made there


@pytest.mark.parametrize("attack", ATTACKS)
def test_programs_and_data_of_others_are_not_used(attack, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))
    cache, before = own_directory(tmp_path / "cache"), jax.config.jax_compilation_cache_dir
    texts = tmp_path / "t.parquet"
    pq.write_table(pa.table({"user_id": ["a", "b"] * 9, "text": ["x"] * 18}), texts)
    attack(cache)
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        keep_compiled(cache / "compiled")
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert f"not kept: cache={cache}: " in capsys.readouterr().err
    with pytest.raises(NotOurs, match=f"cache={cache}"):
        corpora.load(texts, max_length=8)
    assert list(cache.iterdir()) == []


@pytest.fixture(scope="module")
def run_of_ours(tmp_path_factory):
    """(what begins and resumes a run, its directory): a finished one; not to be changed."""
    place = tmp_path_factory.mktemp("runs")
    texts = write_texts(place / "texts.parquet")
    main(command(texts, place / "run", **{"num-steps": 2}))
    return texts, place / "run"


def lead_elsewhere(path):
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


TAMPERED = [
    *(pytest.param(given_away, name, "belongs to another user", marks=needs_root)
      for name in (".", "secret.json", "checkpoints")),
    *((lead_elsewhere, name, "a link to")
      for name in ("secret.json", "ledger.jsonl", "checkpoints", "metrics.jsonl", "tb")),
]  # fmt: skip


@pytest.mark.parametrize("attack, name, says", TAMPERED)
def test_a_run_that_is_anothers_or_leads_elsewhere_is_refused(
    attack, name, says, run_of_ours, run_dir, capsys
):
    texts, done = run_of_ours
    shutil.copytree(done, run_dir)
    attack(run_dir / name)
    with pytest.raises(SystemExit) as stop:
        main([*command(texts, run_dir, **{"num-steps": 2}), "--resume"])
    *_, last = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and last.startswith(f"fedsim: error: run_dir={run_dir}: ")
    assert says in last
    broken = [check for check in verify(run_dir, console=Console()) if check.holds is False]
    assert [check.promise for check in broken] == ["key"] and says in broken[0].found


@pytest.mark.parametrize("mode", [0o755, pytest.param(0o700, marks=needs_root)])
def test_a_directory_that_others_own_or_can_look_into_gets_no_key(
    mode, run_of_ours, run_dir, capsys
):
    run_dir.mkdir()
    run_dir.chmod(mode)
    if mode == 0o700:
        given_away(run_dir)
    with pytest.raises(SystemExit) as stop:
        main(command(run_of_ours[0], run_dir, **{"num-steps": 2}))
    assert stop.value.code == 2 and f"run_dir={run_dir}: " in capsys.readouterr().err
    assert stat.S_IMODE(run_dir.stat().st_mode) == mode and list(run_dir.iterdir()) == []
