"""SECURITY.md, as far as it can be tested: the key, code in data, paths, tokens, dependencies."""

import ast
import copy
import logging
import pickle
import re
import traceback

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from problems import mean_problem, users_of_sizes
from test_architecture import ROOT, SOURCES, imported

from fedsim import keys
from fedsim.cli.main import main
from fedsim.data.building.build import build
from fedsim.els import ELS
from fedsim.engine.engine import Engine, cut
from fedsim.errors import FileDamaged
from fedsim.keys import SecretKey
from fedsim.sampling import Sampling
from fedsim.uls import ULS

REPOSITORY = ROOT.parent
SECRET = bytes(range(7, 39))


def traces(text):
    """Whether the key can be seen in a text, in any usual form."""
    forms = (SECRET.hex(), repr(SECRET), str(list(SECRET)), "1234567890123")
    return [form for form in forms if form in text]


def test_a_key_shows_nothing_of_itself():
    key = SecretKey(SECRET, seed=1234567890123)
    how = {"batch_size": 2, "group_size": 1, "sampling": Sampling(), "key": key}
    methods = [method(users_of_sizes([2, 3]), **how) for method in (ELS, ULS)]
    for thing in (key, *methods, key.generator("noise", 1), key.jax_key("noise", 1)):
        assert traces(f"{thing} {thing!r}") == []
    try:
        key.jax_key("noise", "not a number")
    except TypeError as error:
        assert traces("".join(traceback.format_exception(error))) == []


def test_a_key_stays_in_its_process():
    key = SecretKey(SECRET)
    for hand_on in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="a key stays in its process"):
            hand_on(key)


@pytest.mark.parametrize("damage", ["", "{", "{}", '{"secret": "zz"}', "short"])
def test_a_damaged_key_is_named_and_not_shown(damage, tmp_path):
    SecretKey(SECRET).save(tmp_path)
    path = tmp_path / keys.FILE
    text = path.read_text()
    path.write_text(text.replace(SECRET.hex(), SECRET.hex()[:-2]) if damage == "short" else damage)
    with pytest.raises(FileDamaged, match=str(path)) as caught:
        SecretKey.load(tmp_path)
    assert SECRET.hex()[:20] not in "".join(traceback.format_exception(caught.value))


@pytest.mark.slow
def test_a_training_that_fails_shows_no_key(tmp_path, monkeypatch, capfd, caplog):
    """Whatever goes wrong in a step, and however loudly it is told."""
    users = [f"user{u}" for u in range(20) for _ in range(3)]
    pq.write_table(pa.table({"user_id": users, "text": ["red green"] * 60}), tmp_path / "t.parquet")
    monkeypatch.setattr(SecretKey, "create", classmethod(lambda cls, *_: cls(SECRET)))

    def fail(self, params, step, engine, **options):
        raise OSError(f"disk full in {vars(self)}")

    monkeypatch.setattr(ULS, "gradient", fail)
    flags = "--epsilon 4 --num-steps 2 --batch-size 8 --engine local --max-length 16".split()
    flags += ["--strategy", "scan", "--rows-per-pass", "1"]
    paths = ["--data", str(tmp_path / "t.parquet"), "--run-dir", str(tmp_path / "run")]
    with caplog.at_level(logging.DEBUG, logger="fedsim"), pytest.raises(SystemExit) as stop:
        main(["train", "uls", *flags, *paths])
    assert stop.value.code == 1
    out, err = capfd.readouterr()
    assert "disk full" in err and traces(out + err + caplog.text) == []
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path.name != keys.FILE:
            assert SECRET not in path.read_bytes() and traces(path.read_text("latin1")) == []


def test_a_lane_has_two_units_or_more():
    """What leaves a worker is a lane's sum: of one unit, it would be its clipped gradient."""
    _, task = mean_problem(np.random.default_rng(0), [1])
    for units in range(2, 40):
        lanes = cut(task, np.zeros((units, 1), int), 8, Engine.least_units)[1]
        assert min(map(len, lanes)) >= 2 and sum(map(len, lanes)) == units
    (lane,) = cut(task, np.zeros((1, 1), int), 8, Engine.least_units)[1]
    assert len(lane) == 1  # the whole draw


def test_no_module_runs_what_it_reads():
    for path in SOURCES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name, options = ast.unparse(node.func), {ast.unparse(x) for x in node.keywords}
                assert name not in ("eval", "exec", "compile", "__import__", "os.system"), path
                assert not options & {"allow_pickle=True", "shell=True", "trust_remote_code=True"}


RUNS_CODE = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "torch", "yaml"}


def test_nothing_unpickles_but_rays_own_messages():
    users = {m for m in SOURCES if {name.split(".")[-1] for name in imported(m)} & RUNS_CODE}
    assert users == {"fedsim.config.load"}
    code = "".join(SOURCES[module].read_text() for module in users)
    reads = re.findall(r"yaml\.\w*(?:load|compose|parse)\w*\(.*", code)
    assert len(reads) == 1
    assert all(re.search(r", Loader=yaml\.(Safe|Base)Loader\)", read) for read in reads)


def test_no_text_of_the_data_is_part_of_a_path(tmp_path):
    evil = ["../../evil", "/etc/evil", "evil\x00evil", "..", "a/b", "evil\n", "-evil", "C:\\evil"]
    users = [user for user in evil for _ in range(12)]
    pq.write_table(pa.table({"user_id": users, "text": users}), tmp_path / "t.parquet")
    build([tmp_path / "t.parquet"], tmp_path / "inside" / "out", max_length=16)
    names = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")}
    assert all(name.startswith("inside") or name == "t.parquet" for name in names)
    assert not any("evil" in name or ".." in name for name in names)
    files = r"metadata\.json|tokenizer\.json|SHA256SUMS"
    known = rf"inside(/out(/({files}|(train|eval_\w+)(/[\w.-]+)?))?)?|t.parquet"
    assert [name for name in names if not re.fullmatch(known, name)] == []


def test_whatever_starts_ray_for_others_turns_authentication_on():
    files = [p for p in (REPOSITORY / "cluster").rglob("*") if p.is_file()]
    starters = [p for p in files if re.search(r"ray start|RayCluster|RayJob", p.read_text("utf8"))]
    scripts = [p for p in starters if p.suffix in (".sh", ".yaml", ".sbatch")]
    assert len(scripts) >= 3
    for path in scripts:
        assert re.search(r"RAY_AUTH_MODE=token|authOptions", path.read_text()), path
