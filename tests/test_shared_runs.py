"""Training on texts with several owners: what a user's content changes, and what is said of it."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from test_shared import owners_of, random_graph

from experiments.mean_task import MeanTask
from fedsim import shared_uls
from fedsim.accounting import StepEvent
from fedsim.cli.main import main
from fedsim.clipping import Clip, Strategy
from fedsim.data.dataset import sums
from fedsim.els import ELS
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.run import ledger
from fedsim.sampling import Sampling, contributions, draw_groups


class Graph:
    """A random graph as the samplers see it."""

    def __init__(self, rng, **sizes):
        self.sets, self.offsets, self.owners = random_graph(rng, **sizes)
        self.num_users, self.num_examples = self.owners.num_users, int(self.offsets[-1])

    def owned(self, user):
        return [t for t in range(self.num_examples) if user in self.owners_of(t)]

    def owners_of(self, text):
        return owners_of(text, self.sets, self.offsets)


def distance(engine, theta, rows, gone, clip):
    """How far the content of the texts `gone` moves the sum, in units of C: its whole numbers."""
    without, strategy = np.where(np.isin(rows, gone), -1, rows), Strategy("scan", 2)
    one, other = (engine.clipped_sum(theta, each, clip, strategy)[0] for each in (rows, without))
    moved = np.asarray(one, np.int64) - np.asarray(other, np.int64)
    return np.sqrt((moved**2).sum()) / 2**20


@pytest.mark.privacy
def test_content_moves_a_sum_by_its_own_units_once_and_by_changed_ones_twice(rng, key):
    clip = Clip(1.0, normalised=True)
    for _ in range(5):
        graph = Graph(rng, most_users=8, most_texts=5)
        points = rng.normal(size=(graph.num_examples + 1, 4)) * 10.0 ** rng.integers(-1, 3)
        engine, theta = LocalEngine(MeanTask(points), num_lanes=2), jnp.zeros(4)
        els = ELS(graph, batch_size=1, group_size=2, sampling=Sampling(), key=key)
        uls = shared_uls.SharedULS(
            graph, batch_size=2, group_size=2, sampling=Sampling(), key=key, max_changed=1
        )
        groups = uls.groups
        drawn = draw_groups(groups.offsets, range(groups.num_users), 2, key, 0)  # of everyone
        for user in range(graph.num_users):
            gone = graph.owned(user)
            present = int(np.isin(els.pool, gone).sum())
            assert present <= els.event(1.0).max_contributions
            assert distance(engine, theta, els.pool[:, None], gone, clip) <= present
            rows = groups.examples(drawn)
            touched, own = np.isin(rows, gone).any(axis=1), groups.users == user
            once, twice = int((touched & own).sum()), int((touched & ~own).sum())
            assert once <= 1 and twice <= uls.event(1.0).max_changed
            assert distance(engine, theta, rows, gone, clip) <= once + 2 * twice


@pytest.mark.privacy
def test_a_changed_group_can_move_the_sum_by_twice_the_clip_norm(key):
    """Two owners, one group: the text that only its user owns pulls one way, the shared one far the
    other way."""
    engine = LocalEngine(MeanTask(np.array([[1.0], [-9.0]])), num_lanes=1)
    rows, clip = np.array([[0, 1]]), Clip(1.0)
    assert 1.99 < distance(engine, jnp.zeros(1), rows, [1], clip) <= 2
    clips = [reference.clip(np.array([mean]), 1.0, False) for mean in (4.0, -1.0)]
    assert clips[0] - clips[1] == 2


@pytest.mark.privacy
def test_a_unit_without_rows_or_content_is_in_no_count_of_norms():
    """Else a user without content would count as within the clip norm, so that their content moved
    the count by up to 1 and not by 1/2."""
    engine = LocalEngine(MeanTask(np.array([[3.0], [np.nan], [0.0]])), num_lanes=1)
    rows = np.array([[0], [-1], [1], [2]])
    _, stats = engine.clipped_sum(jnp.zeros(1), rows, Clip(1.0), Strategy("scan", 1))
    assert stats.counted_norms.tolist() == [3.0, np.inf]


def write(path, rows):
    lines = (json.dumps({"who": who, "text": text}) for who, text in rows)
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Data of 30 users in pairs and threes, built."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("chat")
    drawn = (rng.choice(30, rng.integers(1, 4), replace=False) for _ in range(240))
    rows = [([f"u{i:02d}" for i in who], f"text {n}") for n, who in enumerate(drawn)]
    source = write(path / "chat.jsonl", rows)
    built = ["data", "build", str(source), "--user-column", "who", "--out", str(path / "chat")]
    main([*built, "--eval-users", "0", "--max-length", "24"])
    return path / "chat"


def command(algorithm, data, run_dir, **flags):
    flags = {"data": data, "run_dir": run_dir, "epsilon": 8, "num_steps": 3} | flags
    flags = {"batch_size": 8, "model": "micro", "engine": "local", "strategy": "scan"} | flags
    flags = {"rows_per_pass": 1, "max_length": 24} | flags
    flags["user_column"] = "who"
    if str(data).endswith("chat"):
        del flags["user_column"], flags["max_length"]
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    return ["train", algorithm, *(str(x) for n, v in named.items() for x in (f"--{n}", v))]


@pytest.fixture(scope="module")
def runs(chat, tmp_path_factory):
    """Finished runs of both algorithms, and what reports say of them."""
    where = tmp_path_factory.mktemp("runs")
    main(command("els", chat, where / "els", group_size=2))
    main(command("uls", chat, where / "uls", group_size=2, max_shared_groups=2))
    return where


def verified(capsys, run_dir, *flags):
    capsys.readouterr()
    main(["verify", str(run_dir), "--json", *flags])
    found = json.loads(capsys.readouterr().out)
    return {each["promise"]: (each["holds"], each["found"]) for each in found["checks"]}


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("algorithm", ["els", "uls"])
def test_a_run_says_what_it_protects_and_keeps_its_bounds(algorithm, runs, capsys):
    run_dir = runs / algorithm
    found = verified(capsys, run_dir, "--whole")
    assert all(holds for holds, _ in found.values()), found
    summary = json.loads((run_dir / "summary.json").read_text())
    shared = summary["shared"]
    assert summary["num_users"] == 30
    assert 0 < shared["kept"] <= summary["num_examples"]
    assert "alone or with others" in summary["adjacency"] and "alone" in summary["epsilon_holds"]
    (line, *_) = ledger.steps_of(ledger.read(run_dir))
    event = StepEvent(**line["event"])
    if algorithm == "els":
        assert (event.max_contributions, event.max_changed) == (2, 0)
    else:
        assert (event.max_contributions, event.max_changed) == (1, 2)
    assert {"fact": "owners", "of": ""} in summary["non_private"]
    main(["report", str(run_dir)])
    report = (run_dir / "report.md").read_text()
    assert "who the users are and who owns which text" in report
    left_out = summary["num_examples"] - shared["kept"]
    assert f"{left_out:,} of {summary['num_examples']:,}" in report
    assert "not hidden" in report
    assert "users not trained on" not in report  # other owners of held-out texts are


@pytest.mark.privacy
def test_data_whose_texts_decide_how_many_rows_there_are_are_refused(chat, tmp_path, capsys):
    built = shutil.copytree(chat, tmp_path / "chat")
    file = built / "metadata.json"
    metadata = json.loads(file.read_text())
    metadata["rules"]["long_texts"] = "split"  # as a build refuses to
    file.write_text(json.dumps(metadata))
    (built / "SHA256SUMS").write_text(sums(built, metadata["splits"]))
    with pytest.raises(SystemExit) as end:
        main(command("els", built, tmp_path / "run", group_size=2))
    assert end.value.code == 2
    said = "data: built with long_texts=split: expected cut where"
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("algorithm", ["els", "uls"])
def test_a_run_resumes_only_with_its_pool_or_groups(algorithm, chat, run_dir, capsys, monkeypatch):
    flags = {"group_size": 2, "max_shared_groups": 2}
    arguments = command(algorithm, chat, run_dir, **flags)
    main(arguments)
    main([*arguments, "--resume"])  # those that it began with
    of = {"els": (contributions, "bounded_pool"), "uls": (shared_uls, "owners_groups")}[algorithm]
    own = getattr(*of)
    monkeypatch.setattr(*of, lambda *a: own(*a[:-1], SecretKey.create(seed=9)))
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--resume"])
    assert stop.value.code == 2
    assert "versions that draw the pool and users' turns" in capsys.readouterr().err
    monkeypatch.undo()
    if algorithm == "uls":
        with pytest.raises(SystemExit) as stop:
            main([*command("uls", chat, run_dir, **{**flags, "max_shared_groups": 3}), "--resume"])
        assert stop.value.code == 2 and "max_shared_groups" in capsys.readouterr().err
