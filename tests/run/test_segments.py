"""An index of a ledger is used once, whatever is killed, copied, put back and resumed."""

import contextlib
import json
import os
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from test_other_draws import Mean

import fedsim
from fedsim.accounting import StepEvent, event_fields
from fedsim.budget import BudgetRequest, admission, admitted, ledger as budget_ledger, open_locked
from fedsim.budget.spending import charge_of
from fedsim.engine import environment
from fedsim.keys import SecretKey
from fedsim.noise import Correlated, add_gaussian, correlated, independent, strategy
from fedsim.plan import Evaluations
from fedsim.run import LedgerError, checkpoint, ledger, restored, save
from fedsim.run.checkpoint import State
from fedsim.run.formats import Segment
from fedsim.run.ledger import Ledger
from fedsim.sampling import Allocation, Cyclic, Poisson
from fedsim.training import trainer
from fedsim.training.private_evaluation import noisy_evaluate
from fedsim.training.trainer import Trainer

pytestmark = pytest.mark.privacy
STEPS, BANDS, STDDEV = 8, 3, 2.0**20
EVENT, LOSS = StepEvent(2.0, 0.1), StepEvent(4.0, 1.0)
PLANNED = [(EVENT, STEPS)]
HISTORIES, GROUPS = int(os.environ.get("FEDSIM_HISTORIES", "200")), 20
WRITES = (
    (ledger, "write_durably"),  # a line of the run's ledger, or of the data's
    (budget_ledger, "write_durably"),  # a mark
    (budget_ledger, "write_json"),  # the last line
    (checkpoint.weights, "write"),
    (checkpoint, "write_json"),
)


class Killed(BaseException):
    pass


class World:
    """Directories of one run, their copies, ledgers of the data, and all that is released."""

    def __init__(self, place, rng):
        self.place, self.rng = place, rng
        self.drawn: list[bytes] = []
        """All noise, and the first numbers by which units are drawn."""
        self.released = {"home": 0, "other": 0}
        self.evaluated = {"home": 0, "other": 0}
        self.runs, self.copies = [place / "run"], []
        self.dead = False

    def bombed(self, function):
        """A write before, in or after which the process may be killed."""

        def write(*args, **options):
            if self.dead:
                raise Killed
            self.left -= 1
            if self.left != 0:
                return function(*args, **options)
            self.dead, when = True, self.rng.integers(3)
            if when == 0 and isinstance(args[-1], bytes):
                function(*args[:-1], args[-1][: self.rng.integers(len(args[-1]))])
            elif when == 1:
                function(*args, **options)
            raise Killed

        return write

    def noted(self, gaussian):
        def draw(rng, out):
            self.drawn.append(gaussian(rng, out)[:4].tobytes())
            return out

        return draw


class Run:
    """A process that trains in a directory, with the trainer's own order of writes."""

    replays, event, params, strategy, audit = False, EVENT, None, "scan", None
    _segments, _enter, _tell_lost = Trainer._segments, Trainer._enter, Trainer._tell_lost

    def __init__(self, world, directory, book):
        self.world, self.directory, self.book = world, directory, book
        self.key = SecretKey.load(directory)
        self.plan = SimpleNamespace(num_steps=STEPS)
        self.run = SimpleNamespace(engine=SimpleNamespace(num_lanes=8))
        self.method = SimpleNamespace(key=self.key)
        self.console = SimpleNamespace(note=lambda text: None)
        host = f"host {world.rng.integers(3)}, cpu, {world.rng.integers(1, 9)} threads"
        self.engine = SimpleNamespace(
            facts=lambda: {"kind": host}, group_losses=lambda params, split, groups: np.ones(5)
        )
        kinds = [add_gaussian, Correlated(STEPS, BANDS)]
        self.add_noise = kinds[(directory.parent / "correlated").exists()]
        self.data = SimpleNamespace(eval_users=SimpleNamespace(offsets=np.arange(6)))
        self.how = Evaluations(1.0, 1e-6, 4.0, 2, STEPS // 2, 5, 16, 9.0)

    def train(self, steps):
        key, place = self.key, self.world.place / self.book
        applicant = BudgetRequest(place, ["a", "b"], "train", None, self.directory)
        entry = applicant.entry(key.seal("ledger"), PLANNED, (0.0, 0.0), "")
        aside = self.directory / "evaluations"
        aside.mkdir(exist_ok=True)
        held_out = BudgetRequest(place, ["c"], "evaluation", None, aside)
        losses = held_out.entry(key.seal("evaluation"), [(LOSS, STEPS // 2)], (0.0, 0.0), "")
        state = restored(self.directory, State({"w": np.zeros(3, np.float32)}, {}, clip_norm=1.0))
        head = {"plan": {}, "adjacency": "", "key_seal": key.seal("ledger")}
        about = {"least": state.step, "least_chain": state.chain}
        with contextlib.closing(Ledger(self.directory, head, **about)) as lines:
            counted = (admitted(applicant, entry), admitted(held_out, losses, self.seen))
            with counted[0] as lines.reached, counted[1] as self.reached:
                ((state, _, end),) = self._segments(state, lines)
                while state.step < min(end, lines.num_steps + 1, steps + state.step):
                    steps -= 1
                    self.step(state, lines)

    def seen(self):
        from fedsim.training import Evaluated

        return [(LOSS, len(Evaluated(self.directory).losses))]

    def step(self, state, lines):
        world, key, step = self.world, self.method.key, state.step
        world.drawn.append(key.fresh.generator("units", step).bytes(16))
        sums = [np.zeros(4, np.int64)]
        noisy = self.add_noise(sums, stddev=STDDEV, key=key, step=step)[0]
        digest = ledger.gradient_sha256(noisy)
        lines.record(step, event=event_fields(EVENT), gradient_sha256=digest)
        world.released[self.book] += 1  # here it becomes visible
        state.params = {"w": state.params["w"] + noisy[:3]}
        state.step, state.chain = step + 1, lines.chain_after(step + 1)
        if state.step % 2 == 0:
            args = (state.params, self.data, self.how, key, state.step, self.directory)
            loss = noisy_evaluate(self.engine, *args, self.reached)
            world.evaluated[self.book] += loss is not None
        if state.step % 3 == 0:
            save(self.directory, state.step, vars(state))


def history(place, number):
    """A random history; all promises are checked after each event."""
    world = World(place, rng := np.random.default_rng(number))
    (world.runs[0]).mkdir(parents=True)
    SecretKey.create().save(world.runs[0])
    if number % 2:
        (place / "correlated").touch()
    settle, refused = admission._settle, 0
    with pytest.MonkeyPatch.context() as patch:
        for module, name in WRITES:
            patch.setattr(module, name, world.bombed(getattr(module, name)))
        for module in (independent, correlated):
            patch.setattr(module, "gaussian", world.noted(module.gaussian))
        patch.setattr(admission, "_settle", lambda *a: None if world.dead else settle(*a))
        patch.setattr(os, "fsync", lambda descriptor: None)  # a kill is no power failure
        patch.setattr(trainer, "versions", dict)
        for event in range(14):
            world.dead, world.left = False, -1
            what = rng.choice(["train", "copy", "put back"], p=[0.6, 0.2, 0.2])
            directory = world.runs[rng.integers(len(world.runs))]
            if what == "copy":
                world.copies.append(shutil.copytree(directory, place / f"copy {event}"))
                if rng.random() < 0.3:  # it is a run of its own, beside the first
                    world.runs.append(shutil.copytree(directory, place / f"twin {event}"))
            elif what == "put back" and world.copies:
                shutil.rmtree(directory)
                shutil.copytree(world.copies[rng.integers(len(world.copies))], directory)
            else:
                world.left = rng.integers(1, 50) if rng.random() < 0.7 else -1
                book = "home" if rng.random() < 0.8 else "other"
                try:
                    Run(world, directory, book).train(rng.integers(1, 6))
                except Killed:
                    pass
                except (LedgerError, checkpoint.CheckpointError) as error:
                    assert "copy" in str(error), error
                    refused += 1
            expect_promises(world)
    return sum(world.released.values()), refused


def expect_promises(world):
    """No noise twice; no index twice in a chain; no release that a ledger does not charge."""
    assert len(set(world.drawn)) == len(world.drawn)
    for directory in world.runs:
        lines = ledger.read(directory)
        steps, segments = ledger.steps_of(lines), ledger.segments_of(lines)
        assert [line["step"] for line in steps] == list(range(len(steps)))
        for path in checkpoint.kept(directory):
            state = checkpoint.load(path)
            step, lost = int(state["step"]), int(state["lost_steps"])
            assert lost == ledger.lost_steps(segments, step) and step <= len(steps)
    for book in world.released:
        if not (world.place / book).exists():
            assert world.released[book] == world.evaluated[book] == 0
            continue
        with open_locked(world.place / book) as counted:
            charges = [charge_of(entry) for entry in counted.entries.values()]
        of = {"train": world.released[book], "evaluation": world.evaluated[book]}
        for charge in charges:
            charged = sum(count for _, count in charge.reserved)
            assert of.pop(charge.entry.kind) <= charged, (book, charge)
        assert not any(of.values())


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("group", range(GROUPS))
def test_no_history_uses_an_index_or_a_noise_twice_or_costs_more_than_is_counted(group, tmp_path):
    found = [history(tmp_path / str(n), n) for n in range(group, HISTORIES, GROUPS)]
    assert sum(released for released, _ in found) > 5 * len(found)
    assert sum(refused for _, refused in found) > 0


def begun(directory, first=0, after=0, nonce="0" * 32):
    """A ledger with so many steps, and then another segment."""
    book = Ledger(directory, {"plan": {}, "adjacency": ""})
    book.begin(Segment("f" * 32, 0, 0))
    for step in range(4):
        book.record(step, event=event_fields(EVENT))
    book.begin(Segment(nonce, after, first))
    return book


@pytest.mark.parametrize(
    ("segment", "fault"),
    [
        ({"first": 3, "after": 3}, "expected 4"),  # an index again
        ({"first": 5, "after": 4}, "expected 4"),
        ({"first": 4, "after": 5}, "and no more"),
        ({"first": 4, "after": 2, "nonce": "f" * 32}, "nonce: occurs twice"),
    ],
)
def test_a_segment_that_would_use_an_index_or_a_nonce_again_is_refused(segment, fault, tmp_path):
    with pytest.raises(LedgerError, match=fault):
        begun(tmp_path, **segment)
    assert len(ledger.read(tmp_path)) == 6


@pytest.mark.parametrize(
    ("pairs", "steps", "lost"),
    [
        ([(0, 0)], 9, 0),
        ([(0, 0), (5, 9)], 8, 0),
        ([(0, 0), (5, 9)], 9, 4),
        ([(0, 0), (5, 9), (5, 12)], 13, 7),  # the second one had no checkpoint
        ([(0, 0), (5, 9), (10, 12)], 13, 6),
        ([(0, 0), (0, 2), (0, 3), (4, 4)], 5, 3),
    ],
)
def test_what_is_lost_adds_up_along_the_checkpoints(pairs, steps, lost):
    segments = [Segment(f"{n:032x}", *pair) for n, pair in enumerate(pairs)]
    assert ledger.lost_steps(segments, steps) == lost


def test_what_steps_draw_takes_the_nonce_and_what_is_drawn_once_does_not():
    key = SecretKey.create()
    one, two = (key.in_segment(f"{n:032x}", 6) for n in (1, 2))
    for sampler in (Poisson(4000, 400), Cyclic(4000, 400, bands=2)):
        drawn = [set(sampler.draw(each, 6)) for each in (one, two, one)]
        assert drawn[0] == drawn[2] != drawn[1]
    cyclic, windows = Cyclic(4000, 400, bands=2), Allocation(4000, 400, window=4)
    groups = [[*cyclic.drawn_once(each, 8)][0] for each in (key, one, two)]
    assert all((each == groups[0]).all() for each in groups)
    turns = [windows.draw(each, 6) for each in (key, one, two)]
    assert all((each == turns[0]).all() for each in turns)
    sums = [np.zeros(1000, np.int64)]
    noise = [add_gaussian(sums, stddev=STDDEV, key=k, step=6)[0] for k in (key, one, two)]
    assert all((noise[a] != noise[b]).mean() > 0.9 for a, b in ((0, 1), (0, 2), (1, 2)))
    evaluation = [k.fresh.generator("held-out loss", 6).random() for k in (key, one, two)]
    assert len(set(evaluation)) == 3


def test_correlated_noise_takes_back_rows_of_its_own_segment_alone():
    """Of another one it could take back what that one never added."""
    sums, key = [np.zeros(1000, np.int64)], SecretKey.create()
    add, how = Correlated(STEPS, BANDS), {"stddev": STDDEV}
    first = key.in_segment("1" * 32)
    for step in range(3):
        add(sums, key=first, step=step, **how)
    second = key.in_segment("2" * 32, 3)
    begun = [add(sums, key=second, step=step, **how)[0] for step in (3, 4)]
    anew = Correlated(STEPS, BANDS)  # as after a crash, and as a replay in the middle of it
    assert (anew(sums, key=second, step=4, **how)[0] == begun[1]).all()
    alone = strategy(STEPS, BANDS, STDDEV).stddev / STDDEV
    fresh = add_gaussian(sums, stddev=STDDEV * alone, key=second, step=3)[0]
    assert np.abs(begun[0] - fresh).max() <= 1  # two roundings
    assert (
        np.abs(begun[1] - add_gaussian(sums, stddev=STDDEV * alone, key=second, step=4)[0]).max()
        > 9
    )


def train(run_dir, killed=0, **settings):
    """A run, or what is left of it. Args: killed: after the line of so many steps; 0: never."""
    settings = {"epsilon": 4, "delta": 1e-3, "num_steps": STEPS, "batch_size": 10, **settings}
    settings |= {"optimizer": "sgd", "learning_rate": 0.1, "engine": "local", "strategy": "scan"}
    record, settle = Ledger.record, admission._settle

    def last(book, step, *args, **fields):
        record(book, step, *args, **fields)
        if step + 1 == killed:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "record", last)
        patch.setattr(admission, "_settle", lambda *a: None if killed else settle(*a))
        with contextlib.suppress(Killed):
            return fedsim.train(
                "uls", task=Mean(), data=np.arange(180) % 60, run_dir=run_dir, **settings
            )


def params_of(run_dir):
    return jax.tree.leaves(checkpoint.load_params(checkpoint.latest(run_dir)))


@pytest.mark.parametrize("settings", [{}, {"noise": "correlated", "bands": 3}], ids=str)
def test_a_killed_run_goes_on_at_the_next_index_with_what_its_checkpoint_has(
    settings, run_dir, capsys
):
    """On another machine, too: workers, threads and packages may be others."""
    settings = {**settings, "checkpoint_every": 3}
    train(run_dir, 5, **settings)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "versions", lambda: {**environment.versions(), "jax": "99"})
        train(run_dir, 7, resume=True, threads_per_worker=2, **settings)
    shown = capsys.readouterr().err
    assert "resuming after step 3: 2 steps are paid for, but lost; 3 of 8 are left" in shown
    run = train(run_dir, resume=True, **settings)
    assert run.finished and run.summary["steps_done"] == STEPS
    lines = ledger.read(run_dir)
    pairs = [(each.after, each.first) for each in ledger.segments_of(lines)]
    assert pairs == [(0, 0), (3, 5), (6, 7)]
    assert run.summary["lost_steps"] == 3 and len(ledger.steps_of(lines)) == STEPS
    assert run.summary["epsilon"] == pytest.approx(4, rel=1e-3)
    assert [check for check in run.verify() if check.holds is False] == []
    again = train(run_dir, resume=True, **settings)  # nothing is left to do
    assert again.summary == run.summary and ledger.read(run_dir) == lines


def test_two_copies_that_two_ledgers_count_share_no_noise(run_dir, tmp_path):
    train(run_dir, 3, checkpoint_every=100)
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    (copy / "budget.json").unlink()  # on another machine the ledger that it names is not there
    seen = {}
    for place in (run_dir, copy):
        train(
            place, resume=True, checkpoint_every=100, budget_ledger=place.parent / f"l {place.name}"
        )
        lines = ledger.read(place)
        seen[place] = [line["gradient_sha256"] for line in ledger.steps_of(lines)]
        with open_locked(place.parent / f"l {place.name}") as counted:
            (entry,) = counted.entries.values()
            assert entry.released == entry.planned
    assert seen[run_dir][:3] == seen[copy][:3]
    assert not set(seen[run_dir][3:]) & set(seen[copy][3:])
    nonces = [ledger.segments_of(ledger.read(place))[-1].nonce for place in seen]
    assert len(set(nonces)) == 2


def test_a_seeded_run_that_nothing_disturbs_is_reproduced(tmp_path):
    """And one that was killed shares no noise with one that was not."""
    settings = {"seed": 3, "checkpoint_every": 2}
    for name in "ab":
        train(tmp_path / name, budget_ledger=tmp_path / "l", **settings)
    train(tmp_path / "c", 4, budget_ledger=tmp_path / "l", **settings)
    train(tmp_path / "c", resume=True, budget_ledger=tmp_path / "l", **settings)
    a, b, c = (
        [line["gradient_sha256"] for line in ledger.steps_of(ledger.read(tmp_path / name))]
        for name in "abc"
    )
    assert a == b and a[:4] == c[:4] and not set(a[4:]) & set(c[4:])
    for now, was in zip(params_of(tmp_path / "a"), params_of(tmp_path / "b"), strict=True):
        assert (now == was).all()


def test_a_seeds_nonce_depends_on_all_that_bits_depend_on():
    """Else two runs of one seed could add the same noise to gradients that differ a little."""
    seeded, secret = SecretKey.create(seed=3), SecretKey.create()
    assert seeded.nonce("here") == seeded.nonce("here") != seeded.nonce("there")
    assert secret.nonce("here") != secret.nonce("here")
    assert len(bytes.fromhex(secret.nonce(""))) == len(bytes.fromhex(seeded.nonce(""))) == 16
    strategy_lines = json.dumps([trainer.computed_on("A", ""), trainer.computed_on("B", "")])
    assert len(set(json.loads(strategy_lines))) == 2
