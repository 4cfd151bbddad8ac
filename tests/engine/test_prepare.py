"""Programs that are compiled ahead are those of the step, and no check of them is lost."""

import threading

import jax
import numpy as np
import pytest

from fedsim.clipping import Clip, Strategy
from fedsim.config import EngineConfig
from fedsim.data.dataset import Dataset
from fedsim.data.users import UserStore
from fedsim.engine.engine import Engine, Trial, one_of_each
from fedsim.engine.programs import Programs, UnfitDevice
from fedsim.engine.strategy import choose_strategy
from fedsim.engine.worker import LocalEngine
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import TransformerConfig

VOCAB, LENGTH, CLIP, SCAN = 40, 48, Clip(0.1), Strategy("scan", 2)
ROWS = np.array([[0, 7], [2, 4], [3, -1], [-1, -1], [8, 1]])


@pytest.fixture(scope="module")
def task():
    """Ten texts of a user, every second of them too long for the first bucket."""
    sizes = [20 + 20 * (i % 2) for i in range(10)]
    examples = {"u": [np.full(size, size) % VOCAB for size in sizes]}
    store = UserStore.from_examples(examples, max_length=LENGTH, vocab_size=VOCAB)
    config = TransformerConfig(VOCAB, LENGTH, width=8, num_layers=1, num_heads=2)
    return LanguageModelTask(Dataset(train=store), config)


@pytest.fixture(scope="module")
def params(task):
    return jax.jit(task.init)(jax.random.key(0))


def test_there_is_a_unit_of_each_length_and_the_shortest_first(task):
    units = one_of_each(task, ROWS)
    assert [unit.tolist() for unit in units] == [[[-1, -1]], [[2, 4]], [[0, 7]]]


def test_a_step_compiles_nothing_after_its_programs_were_prepared(task, params):
    engine, plain = (LocalEngine(task, num_lanes=2) for _ in range(2))
    engine.prepare(params, ROWS, CLIP, SCAN)
    engine._worker._background.join()
    programs = engine._worker.programs.compiled
    known = dict(programs)
    total, stats = engine.clipped_sum(params, ROWS, CLIP, SCAN)
    assert programs == known and len(known) == 2
    expected, of_plain = plain.clipped_sum(params, ROWS, CLIP, SCAN)
    jax.tree.map(np.testing.assert_array_equal, total, expected)
    np.testing.assert_array_equal(stats.norms, of_plain.norms)


@pytest.mark.privacy
def test_a_check_that_fails_in_the_background_fails_in_the_step(task, params, monkeypatch):
    checked = []

    def unfit(program):
        checked.append(threading.current_thread())
        raise UnfitDevice("it has lost the loop")

    monkeypatch.setattr("fedsim.engine.programs.check_stored", unfit)
    engine = LocalEngine(task, num_lanes=1)
    engine.prepare(params, ROWS, CLIP, SCAN)
    engine._worker._background.join()
    with pytest.raises(UnfitDevice, match="lost the loop"):
        engine.clipped_sum(params, ROWS, CLIP, SCAN)
    assert len(set(checked)) == 2 and not engine._worker.programs.compiled


def test_a_worker_that_is_closed_compiles_no_further_program(task, params, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def compile(self, total, params, chunk, *_):
        begun.set()
        go_on.wait(10)
        compiled.append(chunk.length)

    compiled = []
    monkeypatch.setattr(Programs, "compile", compile)
    engine = LocalEngine(task, num_lanes=1)
    engine.prepare(params, ROWS, CLIP, SCAN)
    assert begun.wait(10)
    threading.Timer(0.1, go_on.set).start()
    engine._worker.be_alone()
    assert compiled == [32]  # the program that it was at, and not the next


@pytest.mark.privacy
def test_the_programs_of_a_step_are_prepared_once_the_choice_is_made(task, params, monkeypatch):
    """Not before: what they are depends on the data, and the choice must not."""
    done, asked = [], EngineConfig(strategy="direct", rows_per_pass=2)

    def tried(*_, **__):
        done.append("tried")
        return Trial()

    monkeypatch.setattr(Engine, "try_strategy", tried)
    monkeypatch.setattr(LocalEngine, "prepare", lambda self, *given: done.append(given[-1]))
    engine = LocalEngine(task, num_lanes=1)
    for config, trials in ((asked, ["tried"]), (EngineConfig(), [])):
        chosen, _ = choose_strategy(engine, params, 2, CLIP, config, first=ROWS)
        assert done == [*trials, chosen]
        done.clear()
