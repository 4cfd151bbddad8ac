"""`fedsim forget --retrain`: from where a run is trained again, that it is exact, and its cost."""

import dataclasses
import itertools
import json
import os
import shutil

import jax
import numpy as np
import pytest
from refused import refuses
from test_forget import jsonl, rows_of, told, users_file
from test_verify import rewrite_ledger

from fedsim import accounting, keys
from fedsim.budget import Limit, hold
from fedsim.cli.main import main
from fedsim.config import POISSON, changed_run
from fedsim.data import Dataset, build
from fedsim.evaluate import last_model
from fedsim.keys import SecretKey
from fedsim.plan import Audit, CyclicSampling, Evaluations, SharedTexts
from fedsim.run import PARENT, Console, Ledger, checkpoint, directory, ledger
from fedsim.sampling import Poisson, draw_groups
from fedsim.training import OWN_TASK, train
from fedsim.trust import certificate, forget, verify
from fedsim.trust.retrain import _expect_can, _why_none, retraining_of

pytestmark = [pytest.mark.slow, pytest.mark.ci]

STEPS, EVERY = 8, 4
BATCH, GROUP = {"uls": 4, "els": 2}, {"uls": 2, "els": 1}


def main_of(*args):
    main([*map(str, args)])


def trained(data, run_dir, algorithm="uls", **flags):
    """Train on `data` with a key of the operating system's randomness."""
    given = {"data": data, "model": "micro", "engine": "local", "epsilon": 8, "num-steps": STEPS}
    given |= {
        "batch-size": BATCH[algorithm],
        "group-size": GROUP[algorithm],
        "checkpoint-every": EVERY,
    }
    given |= {"strategy": "scan:2", "run-dir": run_dir, **flags}
    words = ((f"--{n}", v) for n, v in given.items() if v is not None)
    main_of("train", algorithm, "--quiet", *itertools.chain(*words))


def first_steps(run_dir, algorithm, store):
    """The first step that draws a text of each user, found with the run's sampler alone."""
    plan, key = directory.load(run_dir).plan, SecretKey.load(run_dir)
    sizes = np.minimum(np.diff(store.offsets), GROUP[algorithm])
    places = 1 if algorithm == "uls" else GROUP["els"]
    assert plan.num_units == store.num_users * places and plan.sampling.kind == POISSON
    sampler, first = Poisson(plan.num_units, plan.expected_count), {}
    for step in reversed(range(plan.num_steps)):
        for unit in sampler.draw(key, step):
            user, place = divmod(int(unit), places)
            if place < sizes[user]:
                first[user] = step
    names = store.user_ids()
    return {names[user]: step for user, step in first.items()}, set(names)


class TwoKeys(SecretKey):
    """One key for what is drawn once and the steps before `step`, another one afterwards."""

    def __init__(self, before, after, step):
        super().__init__(before._secret)
        self.before, self.after, self.step = before, after, step

    def _derive(self, purpose, index):
        late = bool(index) and index[0] >= self.step
        return (self.after if late else self.before)._derive(purpose, index)


def params(run_dir, step):
    return checkpoint.load(checkpoint.path_of(run_dir, step))["params"]


def same(one, other):
    return checkpoint.params_sha256(one) == checkpoint.params_sha256(other)


class World:
    """Data, a run on them, and people whom it drew only after its first checkpoint."""

    def __init__(self, path, algorithm):
        self.path, self.algorithm = path, algorithm
        self.data, self.run, self.again = path / "data", path / "run", path / "again"
        self.new = path / "new"
        build(jsonl(path / "source.jsonl", rows_of()), self.data, num_workers=1)
        trained(self.data, self.run, algorithm)
        store = Dataset.open(self.data).train
        first, names = first_steps(self.run, algorithm, store)
        self.first = first
        self.late = sorted(name for name, step in first.items() if step >= EVERY)
        self.early = sorted(name for name, step in first.items() if step < EVERY)
        self.never = sorted(names - set(first))
        self.gone = self.late[:2]
        assert len(self.gone) == 2 and self.early and self.never, first
        self.users = users_file(path / "users", self.gone)

    def forget(self, **options):
        options = {"retrain": self.run, "run_dir": self.again, "out": self.new, **options}
        users = options.pop("users", self.users)
        return forget(self.data, users, self.path / "ledger", Console(), **options)


@pytest.fixture(scope="module", params=["uls", "els"])
def world(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        rng = np.random.default_rng(3)  # so that the draws are the same each time
        patch.setattr(keys.secrets, "token_bytes", lambda count: rng.bytes(count))
        patch.setenv("FEDSIM_BUDGET_LEDGER", str(path / "ledger"))
        yield World(path, request.param)


@pytest.fixture(scope="module")
def retrained(world):
    """The answer of a call that follows one that was killed in the middle of the new run."""
    record = Ledger.record

    def killed(book, step, *args, **fields):
        record(book, step, *args, **fields)
        if step == STEPS - 2:
            raise KeyboardInterrupt  # after the step was noted, before its model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "record", killed)
        with pytest.raises(KeyboardInterrupt):
            world.forget()
    assert not world.new.exists() and not (world.path / "new-forgotten.json").exists()
    assert len(ledger.read(world.again)) == STEPS
    return world.forget()


def test_it_starts_at_the_newest_checkpoint_before_one_of_them_was_drawn(world, retrained):
    first = min(world.first[name] for name in world.gone)
    assert EVERY <= first < STEPS
    assert retrained["retrained"]["first_step"] == EVERY
    assert retrained["retrained"]["steps"] == STEPS - EVERY
    assert retrained["retrained"]["gradients"] == BATCH[world.algorithm] * (STEPS - EVERY)
    assert same(params(world.again / PARENT, EVERY), params(world.run, EVERY))


def test_bits_are_those_of_one_run_on_the_data_without_them(world, retrained, monkeypatch):
    """With the old key before the checkpoint, and the new run's key from there on."""
    before, after = SecretKey.load(world.run), SecretKey.load(world.again)
    key, create = TwoKeys(before, after, EVERY), SecretKey.create
    given = lambda seed=None, context="": key if context else create(seed, context)  # noqa: E731
    monkeypatch.setattr(SecretKey, "create", staticmethod(given))
    whole = world.path / "whole"
    trained(world.new, whole, world.algorithm, **{"budget-ledger": world.path / "other"})
    assert same(params(whole, EVERY), params(world.run, EVERY))  # the old key, without them
    assert same(params(whole, STEPS), params(world.again, STEPS))
    assert not same(params(whole, STEPS), params(world.run, STEPS))
    summary = directory.summary_of(world.again)
    assert summary["params_sha256"] == retrained["retrained"]["model"]
    assert directory.summary_of(whole)["params_sha256"] == summary["params_sha256"]


def test_the_new_key_has_the_pool_of_the_old_one_and_nothing_else(world, retrained):
    old, new = SecretKey.load(world.run), SecretKey.load(world.again)
    for purpose, index in (("noise", (0, 0, 0)), ("noise", (EVERY, 0, 0)), ("units", (EVERY,))):
        drawn = (key.generator(purpose, *index).bytes(16) for key in (old, new))
        assert next(drawn) != next(drawn)
    pools = (key.streams("contributions").at(3).bytes(16) for key in (old, new))
    assert next(pools) == next(pools)
    secret = (world.again / "secret.json").read_text()
    assert old._secret.hex() not in secret and new.seed is None


def test_everyone_else_pays_for_the_steps_that_were_computed(world, retrained):
    plan, cost = directory.load(world.again).plan, retrained["retrained"]
    old = directory.load(world.run).plan
    assert plan.noise_multiplier == old.noise_multiplier and plan.num_steps == STEPS
    (event, _), *_ = plan.events_from(0)
    with hold(world.path / "ledger") as account:
        entry = account.entries[ledger.head(world.again)["key_seal"]]
        assert entry.planned == entry.released == [(event, STEPS - EVERY)]
        assert entry.outcome == "released"
        names = Dataset.open(world.data).train.user_ids()
        theirs = account.users([name for name in names if name in world.gone])
        assert not np.isin(theirs, account.users_of(entry.users)).any()
        others = account.users([name for name in names if name not in world.gone])
        assert np.isin(others, account.users_of(entry.users)).all()
    for name, steps in (("", STEPS - EVERY), ("_before", STEPS), ("_after", 2 * STEPS - EVERY)):
        exact = accounting.epsilon([(event, steps)], plan.delta)
        assert cost[f"epsilon{name}"] == pytest.approx(exact, rel=1e-3)


def checks(run_dir, **options):
    found = verify(run_dir, console=Console(), **options)
    return {check.promise: (check.holds, check.found) for check in found}


def test_the_new_run_stands_by_itself(world, retrained, capsys):
    """It is verified and replayed without the old run, and claims the epsilon of all its steps."""
    hidden = world.run.rename(world.path / "hidden")
    try:
        found = checks(world.again, again="whole")
        assert {holds for holds, _ in found.values()} == {True}, found
        assert f"{STEPS - EVERY} of {STEPS} steps are the run's own" in found["parent"][1]
        assert found["replay"][1].startswith(f"the last {STEPS - EVERY} of {STEPS} steps (from")
        said, _ = told(capsys, "report", world.again)
        assert "steps of another run among them" in (world.again / "report.md").read_text()
    finally:
        hidden.rename(world.run)
    summaries = [directory.summary_of(each) for each in (world.run, world.again)]
    assert summaries[0]["epsilon"] == summaries[1]["epsilon"] and said["guarantee"]


def forged(run_dir, **changes):
    """Another parent in settings and ledger, with digests and chains that fit."""
    path = run_dir / directory.CONFIG
    record = json.loads(path.read_text())
    record["parent"] |= changes
    path.write_text(json.dumps(record, indent=2) + "\n")

    def rewritten(lines):
        lines[0]["head"] |= {"config_sha256": directory.config_sha256(run_dir)}
        lines[0]["head"]["parent"] |= changes
        return lines

    rewrite_ledger(run_dir, rewritten)


def test_what_is_said_of_the_parent_is_checked(world, retrained, tmp_path):
    def copied(name):
        return shutil.copytree(world.again, tmp_path / name)

    edited = copied("edited")
    path = edited / directory.CONFIG
    path.write_text(path.read_text().replace(f'"step": {EVERY}', f'"step": {EVERY - 1}'))
    assert checks(edited)["settings"][0] is False
    for name, changes in (
        ("earlier", {"step": EVERY - 1}),
        ("later", {"step": EVERY + 1}),
        ("chain", {"chain": "0" * 64}),
    ):
        forged(copied(name), **changes)
        assert checks(tmp_path / name)["ledger"][0] is False, name
    other = copied("checkpoint")
    place = other / PARENT / checkpoint.DIRECTORY
    state = checkpoint.load(checkpoint.path_of(other, STEPS))
    state["step"] = np.asarray(EVERY)
    shutil.rmtree(place)
    chain = ledger.read(other)[EVERY]["chain"]
    checkpoint.save(other / PARENT, EVERY, {**state, "chain": chain}, chain)
    assert checks(other)["parent"][0] is False


def test_without_the_checkpoint_it_started_from_it_is_not_resumed(world, retrained, tmp_path):
    lost = shutil.copytree(world.again, tmp_path / "lost")
    shutil.rmtree(lost / PARENT)
    shutil.rmtree(lost / checkpoint.DIRECTORY)
    stored = directory.load(lost)
    settings = stored.plan.algorithm, stored.privacy, changed_run(stored.run, resume=True)
    with pytest.raises(checkpoint.CheckpointError, match="expected a checkpoint"):
        train(*settings, Console(), count=False)


def test_the_certificate_lists_it(world, retrained):
    path = world.path / "new-forgotten.json"
    assert all(
        each.holds for each in certificate.check(path, str(world.new), world.path / "ledger")
    )
    record = json.loads(path.read_text())
    assert record["retrained"] == retrained["retrained"]
    assert record["retrained"]["old_run"] == "run" and record["retrained"]["run"] == "again"
    assert record["retrained"]["model"] in path.with_suffix(".md").read_text()
    whys = [each["why"] for each in record["computed"] if each["path"] == str(world.again)]
    assert whys == [f"its first step, {EVERY}, follows from when they were drawn"]
    first = min(world.first[name] for name in world.gone)
    assert f"step {first}" not in path.read_text() or first == EVERY


def test_a_dry_run_only_says_what_it_would_cost(world, tmp_path, capsys):
    args = ["forget", world.data, "--users", world.users, "--out", tmp_path / "new", "--dry-run"]
    args += ["--retrain", world.run, "--run-dir", tmp_path / "again"]
    args += ["--budget-ledger", world.path / "ledger"]
    found, said = told(capsys, *args)
    assert set(found) == {"runs", "together", "retrained"} and not os.listdir(tmp_path)
    assert f"{EVERY} of {STEPS} steps are saved, {STEPS - EVERY} computed" in " ".join(said.split())


def test_nothing_is_trained_for_people_who_were_never_drawn(world, tmp_path):
    users = users_file(tmp_path / "users", world.never[:2])
    found = world.forget(users=users, out=tmp_path / "new", run_dir=tmp_path / "again")
    assert found["retrained"]["steps"] == 0 and not (tmp_path / "again").exists()
    assert "no step drew any of them" in found["retrained"]["sentence"]
    assert "model" not in found["retrained"]
    assert [each["why"] for each in found["computed"]][-1].startswith("that no step drew them")


@pytest.mark.privacy
def test_no_epsilon_is_promised_beside_what_tells_the_draws(world, retrained, tmp_path):
    """An epsilon counts on nobody knowing who was drawn, and that is what a retraining tells."""
    for record in (
        retrained,
        world.forget(
            users=users_file(tmp_path / "users", world.never[:2]),
            out=tmp_path / "new",
            run_dir=tmp_path / "again",
        ),
    ):
        [run] = [each for each in record["runs"] if each["run"] == "run"]
        assert (run["epsilon"], run["how"]) == ("inf", "") and "whether and when" in run["why_not"]
        assert any("follows from" in each["why"] for each in record["computed"])


def test_the_first_step_is_that_of_the_sampler_for_everyone(world, tmp_path):
    data, never = Dataset.open(world.data), world.never[0]
    for name in data.train.user_ids():
        for people in ([name], [name, world.late[0]], [never, name]):
            first = min((world.first[each] for each in people if each in world.first), default=None)
            assert retraining_of(world.run, tmp_path / "new", data, people).first == first


@pytest.mark.parametrize("whose", ["early", "late"])
def test_the_first_step_is_that_of_whoever_was_drawn_first(world, tmp_path, whose):
    """And people who were drawn before the first checkpoint leave nothing to start from."""
    near = (max if whose == "early" else min)(getattr(world, whose), key=world.first.__getitem__)
    assert world.first[near] == (EVERY - 1 if whose == "early" else EVERY)
    people = [near, *world.never[:1]]
    users = users_file(tmp_path / "users", people)
    found = world.forget(users=users, out=tmp_path / "x", run_dir=tmp_path / "y", dry_run=True)
    saved = 0 if whose == "early" else EVERY
    assert found["retrained"]["steps_saved"] == saved
    assert ("no checkpoint of so early" in found["retrained"]["sentence"]) == (whose == "early")


def test_a_run_that_was_trained_again_is_trained_again_from_the_start(world, retrained, tmp_path):
    """Its key does not know who was drawn in the steps that it has of another run."""
    users = users_file(tmp_path / "users", world.never[:1])
    options = {"retrain": world.again, "run_dir": tmp_path / "y", "out": tmp_path / "x"}
    place = world.path / "ledger"
    found = forget(world.new, users, place, Console(), **options, dry_run=True)["retrained"]
    assert found["steps_saved"] == 0 and "are another run's" in found["sentence"]


def test_steps_whose_noise_or_draws_hang_together_are_all_trained_again(tmp_path, monkeypatch):
    """And a group size that was chosen privately stays, is not paid for again, and is named."""
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))
    data, run = tmp_path / "data", tmp_path / "run"
    build(jsonl(tmp_path / "source.jsonl", rows_of()), data, num_workers=1)
    flags = {"group-size": None, "group-size-epsilon": 1, "noise": "correlated", "bands": 2}
    flags["keep-checkpoints"] = 3
    trained(data, run, "els", **{"num-steps": 3, "checkpoint-every": 1, "batch-size": 11, **flags})
    users = users_file(tmp_path / "users", Dataset.open(data).train.user_ids()[:9])
    assert len(checkpoint.kept(run)) == 3
    options = {"in_place": True, "retrain": run, "run_dir": tmp_path / "again"}
    found = forget(data, users, tmp_path / "ledger", Console(), **options)
    assert Dataset.open(data).metadata["forgotten"] == 9 and not [*tmp_path.glob(".*")]
    assert found["retrained"]["first_step"] == 0 and "correlated" in found["retrained"]["sentence"]
    old, new = (directory.load(each).plan for each in (run, tmp_path / "again"))
    assert new.group_size == old.group_size and new.group_size_epsilon == 1
    whys = [each["why"] for each in found["computed"] if each["path"] == str(tmp_path / "again")]
    assert whys == [
        f"group_size={old.group_size}, chosen with noise from all texts",
        "its being there follows from when they were drawn",
    ]
    with hold(tmp_path / "ledger") as account:
        entry = account.entries[ledger.head(tmp_path / "again")["key_seal"]]
        assert entry.planned == new.events_from(0) and len(new.before) == 1
    assert {holds for holds, _ in checks(tmp_path / "again").values()} == {True}


def changed(stored, **plan):
    return dataclasses.replace(stored, plan=dataclasses.replace(stored.plan, **plan))


REFUSED = {
    "shared": "texts with one owner each",
    "adjacency": "zero-out adjacency",
    "evaluations": "a run without eval_epsilon",
    "purpose": "a run for release",
    "non_private": "a run of the command line",
}


def test_runs_that_cannot_be_trained_again_in_parts_are_refused(world, monkeypatch):
    stored, data = directory.load(world.run), Dataset.open(world.data)
    values = {"shared": SharedTexts(1, 1, 1, 0, 0, ""), "adjacency": "add-or-remove"}
    values |= {"evaluations": Evaluations(1.0, 1e-6, 1.0, 1, 1, 2, 1, 1.0), "purpose": Audit({})}
    values |= {"non_private": (OWN_TASK,)}
    _expect_can(stored, data)
    for name, says in REFUSED.items():
        with refuses("retrain", says=says):
            _expect_can(changed(stored, **{name: values[name]}), data)
    with refuses("retrain", says="a run of train"):
        _expect_can(dataclasses.replace(stored, plan=None), data)
    cyclic = CyclicSampling(prob=0.1, bands=2)
    assert "cyclic sampling" in _why_none(changed(stored, sampling=cyclic))
    assert _why_none(stored) == ""
    seeded = SecretKey(b"0" * 32, seed=1, sealing=SecretKey.load(world.run)._sealing)
    monkeypatch.setattr(SecretKey, "load", lambda _: seeded)
    monkeypatch.setattr(SecretKey, "seal", lambda *_: stored.identity.data_seal)
    with refuses("retrain", says="a run without a seed"):
        _expect_can(stored, data)


def test_places_that_are_refused(world, retrained, tmp_path, capsys):
    other = tmp_path / "other"
    build(jsonl(tmp_path / "source.jsonl", rows_of(9)), other, num_workers=1)
    users = users_file(tmp_path / "users", ["person-0001"])
    new, place = {"out": tmp_path / "new", "run_dir": tmp_path / "again"}, world.path / "ledger"
    with refuses("retrain", says=f"a run on data={other}"):
        forget(other, users, place, Console(), retrain=world.run, **new)
    for field, options in (
        ("run_dir", {"run_dir": None}),
        ("run_dir", {"retrain": None}),
        ("run_dir", {"run_dir": world.run}),
        (
            "run_dir",
            {"users": users_file(tmp_path / "one", world.early[:1]), "run_dir": world.again},
        ),
        ("retrain", {"retrain": tmp_path / "none"}),
    ):
        with refuses(field):
            world.forget(**{"out": tmp_path / "new", "run_dir": tmp_path / "again", **options})
    with refuses("budget_ledger", says="that counts run"):
        forget(world.data, world.users, tmp_path / "empty", Console(), retrain=world.run, **new)
    limited = shutil.copytree(place, tmp_path / "ledger")
    with hold(limited) as account:
        account.limit(Limit(9.0, 1e-6))
    with refuses("limit_epsilon", says="a run that fits"):
        forget(world.data, world.users, limited, Console(), retrain=world.run, **new)
    assert not {"new", "again"} & set(os.listdir(tmp_path))
    line = ["forget", str(world.data), "--users", str(world.users), "--out", str(tmp_path / "new")]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([*line, "--retrain", str(world.run)])
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 2


def test_with_the_old_noise_the_difference_of_the_models_would_be_a_persons_gradient(
    tmp_path, monkeypatch
):
    """Why keys are fresh: whoever has both models would subtract them."""
    rng = np.random.default_rng(5)
    monkeypatch.setattr(keys.secrets, "token_bytes", lambda count: rng.bytes(count))
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))
    data, run, last = tmp_path / "data", tmp_path / "run", 2
    build(jsonl(tmp_path / "source.jsonl", rows_of()), data, num_workers=1)
    trained(
        data,
        run,
        **{"checkpoint-every": 1, "num-steps": last + 1, "batch-size": 8},
    )
    store = Dataset.open(data).train
    first, _ = first_steps(run, "uls", store)
    person = min(name for name, step in first.items() if step == last)
    users = users_file(tmp_path / "users", [person])
    gradient = gradient_of(run, store, person, last)

    def subtracted(name):
        options = {"out": tmp_path / f"{name} data", "retrain": run, "run_dir": tmp_path / name}
        forget(data, users, tmp_path / "ledger", Console(), **options)
        assert same(params(tmp_path / name / PARENT, last), params(run, last))
        moved = flat(params(run, last + 1)) - flat(params(tmp_path / name, last + 1))
        return -moved @ gradient / np.linalg.norm(moved) / np.linalg.norm(gradient)

    assert abs(subtracted("fresh")) < 6 / len(gradient) ** 0.5
    old = SecretKey.load(run)
    monkeypatch.setattr(SecretKey, "renewed", lambda *_: SecretKey(old._secret))
    assert subtracted("reused") > 0.99  # contributions are rounded


def gradient_of(run_dir, store, person, step):
    """Gradient of a person's texts that a step drew, at its parameters."""
    stored, key = directory.load(run_dir), SecretKey.load(run_dir)
    task, *_ = last_model(stored, stored.run, Console())
    user = store.user_ids().index(person)
    rows = draw_groups(store.offsets, [user], GROUP["uls"], key, step)[0]
    batch = task.read("train", rows[rows >= 0])
    loss = lambda theta: task.losses(theta, batch).mean()  # noqa: E731
    return flat(jax.grad(loss)(params(run_dir, step)))


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)
