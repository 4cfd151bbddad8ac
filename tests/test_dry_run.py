"""What is said of a run before it costs anything."""

import dataclasses
import json

import pytest
from stores import store_of
from test_verify import command, write_texts

from fedsim.accounting import PureEvent
from fedsim.budget.ledger import open_locked
from fedsim.budget.spending import charge_of
from fedsim.cli.main import main
from fedsim.clipping.strategy import TOKENS_OF_PASS
from fedsim.config import ADD_OR_REMOVE, ZERO_OUT, Algorithm, PrivacyConfig
from fedsim.data.dataset import Dataset
from fedsim.engine import preflight
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.plan import defaults, fill_defaults, method_for, private_group_size
from fedsim.run import directory
from fedsim.run.console import Console
from fedsim.training import prepare


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.parquet")


def refusal(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_dry_run_shows_the_plan_of_the_run_and_leaves_nothing(
    texts, run_dir, capsys, monkeypatch
):
    computing, set_threads = [], preflight.set_threads
    monkeypatch.setattr(
        "fedsim.engine.set_threads", lambda config: computing.append(config) or set_threads(config)
    )
    args = command(texts, run_dir, **{"max-length": 16, "engine": "ray"})  # it needs no worker
    main([*args, "--dry-run", "--json"])
    assert [config.kind for config in computing] == ["local"]
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert not run_dir.exists() and "are few, hundreds are needed" in err
    assert "workers " not in err  # it starts none of the run's
    assert "% of texts are longer than 16 tokens" in err
    for name in ("noise ", "step ", "epsilon", "rows "):
        assert sum(line.startswith(name) for line in err.splitlines()) == 1, err
    main(command(texts, run_dir, **{"max-length": 16}))
    plan = json.loads((run_dir / "config.json").read_text())["plan"]
    same = [name for name in plan if name not in ("data_seal", "seeded")]
    assert {name: found[name] for name in same} == {name: plan[name] for name in same}


MEDIAN = {"group-size": None, "group-size-epsilon": 0.5, "delta": 1e-3}


DRAWN = [(PureEvent(0.5), 1)]


@pytest.mark.privacy
def test_a_private_draw_is_counted_before_anything_is_refused_that_follows_from_it(
    texts, run_dir, capsys, tmp_path
):
    """That some draws are refused and others are not tells of the draw, and whoever is refused may
    draw again: for the price of another one."""
    place = tmp_path / "ledger"
    args = {**MEDIAN, "epsilon": 0.6, "budget-ledger": place, "batch_size": 100_000}
    args["adjacency"] = "add-or-remove"
    for drawn in (1, 2):
        said = refusal(command(texts, run_dir, "els", **args), capsys)
        assert said.startswith("fedsim: error: batch_size=100000: expected at most ")
        assert not run_dir.exists()
        with open_locked(place) as ledger:
            found = [charge_of(entry) for entry in ledger.entries.values()]
        assert [(each.entry.outcome, each.released) for each in found] == [
            ("released", DRAWN)
        ] * drawn
        assert found[0].reserved == DRAWN


@pytest.mark.privacy
def test_a_run_with_a_private_draw_pays_for_it_once(texts, run_dir, tmp_path, monkeypatch, capsys):
    place, order = tmp_path / "ledger", []
    args = {**MEDIAN, "epsilon": 0.6, "budget-ledger": place, "limit-epsilon": 0.7}
    at = {"private_median": defaults, "count_at_once": prepare, "plan": Console}
    for name, where in at.items():
        real = getattr(where, name)

        def called(*args, name=name, real=real):
            order.append(name)
            return real(*args)

        monkeypatch.setattr(where, name, called)
    main(command(texts, run_dir, "els", **args))
    assert order == ["count_at_once", "private_median", "plan"]
    assert capsys.readouterr().err.count("DP-SGD-ELS") == 1
    plan = directory.load(run_dir).plan
    with open_locked(place) as ledger:
        (entry,) = ledger.entries.values()
        assert entry.kind == "train" and entry.planned == entry.released
        assert entry.planned == [*DRAWN, (plan.event(), plan.num_steps)]
        assert [line["what"] for line in ledger._log.lines] == ["opened", "closed"] * 2
    (run_dir / "summary.json").unlink()
    main([*command(texts, run_dir, "els", **args), "--resume"])
    assert order.count("count_at_once") == 1  # the same draw


@pytest.mark.privacy
def test_no_budget_is_refused_by_a_private_draw():
    """Refusals are counted nowhere: whoever tries again and again would learn the median."""
    sizes = [1, 1, 2, 40]
    store = store_of({f"u{n}": [[1]] * size for n, size in enumerate(sizes)}, 4, 9)
    found = set()
    turns = {"noise": "correlated", "bands": 3}
    for budget, cell in ((1, {}), (10, {}), (1000, {}), (10, turns)):
        for seed in range(30):
            privacy = PrivacyConfig(1.0, 10, budget, group_size_epsilon=0.1, delta=1e-3, **cell)
            key = SecretKey.create(seed)
            drawn = private_group_size(privacy, store, key)
            privacy = dataclasses.replace(privacy, group_size=drawn)
            done, _ = fill_defaults(Algorithm.ELS, privacy, Dataset(store))
            method_for(Algorithm.ELS, done, store, key)
            assert done.group_size * len(sizes) >= budget
            found.add(done.group_size)
    assert len(found) > 3  # it is drawn


def test_a_dry_run_compiles_no_step(texts, run_dir, capsys, monkeypatch):
    monkeypatch.setattr("fedsim.engine.worker.Worker.add_lane", None)
    monkeypatch.setattr("fedsim.training.trainer.MANY_PARAMETERS", 1)
    main([*command(texts, run_dir, batch_size=2), "--dry-run", "--json"])
    out, err = capsys.readouterr()
    assert not run_dir.exists() and json.loads(out)["batch_size"] == 2
    assert "\ntime              about 1 s of one CPU core if all rows are full" in err


@pytest.mark.privacy
@pytest.mark.parametrize("owners, adjacency", [(1, ZERO_OUT), (1, ADD_OR_REMOVE), (2, ZERO_OUT)])
def test_units_share_a_pass_of_an_accelerator_only_where_no_text_decides_their_places(
    owners, adjacency, run_dir, capsys, monkeypatch
):
    facts, data = LocalEngine.facts, run_dir.parent / "texts.jsonl"
    monkeypatch.setattr(LocalEngine, "facts", lambda self: {**facts(self), "platform": "gpu"})
    rows = ({"user_id": [f"u{n}", f"u{n + 1}"][:owners], "text": "red"} for n in range(40))
    data.write_text("\n".join(map(json.dumps, rows)))
    by_rule = {"strategy": None, "rows_per_pass": None}
    main([*command(data, run_dir, "els", **by_rule, adjacency=adjacency), "--dry-run"])
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "gradient method" in line)
    units = TOKENS_OF_PASS // 24 if (owners, adjacency) == (1, ZERO_OUT) else 1  # of 24 tokens
    assert f" {units} rows in a pass" in line, line
