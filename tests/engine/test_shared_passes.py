"""Units side by side on an accelerator, where a contribution depends on the unit's place: places
are the draw's. Devices that compute so are planted on a CPU."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from refused import refuses
from stores import store_of
from test_worker import CLIP

from experiments.mean_task import MeanTask
from fedsim.clipping import Clip, Strategy, UnsupportedModel, clip_chunk
from fedsim.clipping.strategy import TOKENS_OF_PASS
from fedsim.config import EngineConfig
from fedsim.data.dataset import Dataset
from fedsim.engine.engine import in_order
from fedsim.engine.factory import choose_strategy
from fedsim.engine.worker import LocalEngine, Worker
from fedsim.models import lora
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import TransformerConfig

UNITS, GROUP, VOCAB, LENGTH = 11, 2, 40, 48
CELLS = [  # strategy, rows of a unit, rank of adapters, max_length
    ("direct", 1, 0, LENGTH),
    ("direct", 2, 0, LENGTH // 2),
    ("direct", 2, 2, LENGTH),
    ("ghost", 1, 0, LENGTH // 2),
    ("ghost", 2, 0, LENGTH),
    ("ghost", 2, 2, LENGTH // 2),
]


@pytest.fixture
def accelerator(monkeypatch):
    for module in ("worker", "programs"):
        monkeypatch.setattr(f"fedsim.engine.{module}.on_accelerator", lambda: True)
    monkeypatch.setattr(LocalEngine, "facts", lambda self: {"platform": "gpu"})


CALLS, INT = itertools.count(), jax.ShapeDtypeStruct((), np.int32)
DEVICES = {  # what each adds: (place, units with rows, texts as numbers, distance) -> [units]
    "place": lambda place, real, texts, away: place + texts % 2,  # harmless, as is one's own text
    "presence": lambda place, real, texts, away: 1 * real[place ^ away],
    "text": lambda place, real, texts, away: texts[place ^ away] % 2,
    "first text": lambda place, real, texts, away: (  # in the upper half
        real[place ^ away] & (texts[place ^ away] == 1) & (place & away == 0)
    ),
    "company": lambda place, real, texts, away: 1 * (real.sum() > 1),  # however large
    "call": lambda place, real, texts, away: io_callback(lambda: np.int32(next(CALLS)), INT),
}


def planted(monkeypatch, name, away=1):
    """A device that adds such bits to sums and norms."""

    def wrong(losses, params, batch, mask, clip, strategy, **options):
        total, norms, *rest = clip_chunk(losses, params, batch, mask, clip, strategy, **options)
        real, places = mask.any(axis=1), jnp.arange(len(mask))
        texts = sum(leaf.reshape(len(mask), -1).sum(axis=1) for leaf in jax.tree.leaves(batch))
        places %= strategy.units_at_once(mask.shape[1])
        more = jnp.where(real, DEVICES[name](places, real, texts, away), 0)
        total = jax.tree.map(lambda leaf: leaf + more.sum().astype(leaf.dtype), total)
        return total, norms * (1 + more * 1e-3), *rest

    monkeypatch.setattr("fedsim.engine.programs.clip_chunk", wrong)
    monkeypatch.setattr("fedsim.engine.worker.check_contributions", lambda *_: None)


def task_of(sizes, rank=0, length=LENGTH):
    """A task whose only user's text number i has sizes[i] tokens, drawn with the seed i."""
    texts = [np.random.default_rng(i).integers(VOCAB, size=size) for i, size in enumerate(sizes)]
    store = store_of({"u": texts}, max_length=LENGTH, vocab_size=VOCAB)
    config = TransformerConfig(VOCAB, length, width=8, num_layers=1, num_heads=2)
    if not rank:
        return LanguageModelTask(Dataset(train=store), config)
    frozen = jax.jit(LanguageModelTask(None, config).init)(jax.random.key(0))
    return LanguageModelTask(Dataset(train=store), lora.adapted(config, rank, 16.0), frozen)


@pytest.fixture(scope="module")
def sizes():
    return np.random.default_rng(0).integers(2, LENGTH, UNITS * GROUP)


@pytest.fixture(scope="module")
def params(sizes):
    return jax.jit(task_of(sizes).init)(jax.random.key(0))


@pytest.mark.slow
@pytest.mark.privacy
def test_others_texts_decide_no_place(accelerator, monkeypatch, sizes, params):
    """With one user's texts longer, or gone, all else adds the same bits."""
    planted(monkeypatch, "place")
    rows = np.arange(UNITS * GROUP).reshape(UNITS, GROUP)
    rows[7] = -1  # drawn, but without texts

    def sums(rows, sizes=sizes):
        engine, strategy = LocalEngine(task_of(sizes), num_lanes=2), Strategy("direct", 4 * GROUP)
        total, stats = engine.clipped_sum(params, rows, CLIP, strategy)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(total)]), stats.norms

    total, norms = sums(rows)
    assert (norms > 0).sum() == UNITS - 1
    for unit in (0, 3, 10):
        is_unit = np.arange(UNITS)[:, None] == unit
        without, norms_without = sums(np.where(is_unit, -1, rows))
        np.testing.assert_array_equal(without + sums(np.where(is_unit, rows, -1))[0], total)
        longer = sizes.copy()
        longer[rows[unit]] = LENGTH
        for found in (norms_without, sums(rows, longer)[1]):
            np.testing.assert_array_equal(np.delete(found, unit), np.delete(norms, unit))


def refusal_unless(harmless, rows, group):
    """The refusal of passes of these rows, with the remedy."""
    line = f"^rows_per_pass={rows}: expected at most {group}: side by side, units .* other bits"
    return nullcontext() if harmless else pytest.raises(UnsupportedModel, match=line)


@pytest.mark.privacy
@pytest.mark.parametrize("at_once, away", [(2, 1), (4, 1), (4, 2), (12, 8)])
@pytest.mark.parametrize("bits", sorted(DEVICES.keys() - {"call"}))
def test_a_device_that_lets_neighbours_in_is_refused(bits, at_once, away, accelerator, monkeypatch):
    planted(monkeypatch, bits, away)
    worker, rows = Worker(MeanTask(np.arange(1, 25)[:, None])), np.arange(24)[:, None]
    with refusal_unless(bits == "place", at_once, 1):
        worker.lane_sum(0, np.zeros(1), rows, CLIP, Strategy("direct", at_once))


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("name, group, rank, length", CELLS)
@pytest.mark.parametrize("bits", ["place", "text"])
def test_a_device_that_lets_neighbours_in_is_refused_with_each_strategy(
    name, group, rank, length, bits, accelerator, monkeypatch, sizes
):
    planted(monkeypatch, bits, away=2)
    task = task_of(sizes, rank, length)
    params = lora.init(task.config, jax.random.key(1)) if rank else task.init(jax.random.key(0))
    engine, rows = LocalEngine(task, num_lanes=1), np.arange(8 * group).reshape(8, group)
    with refusal_unless(bits == "place", 4 * group, group):
        engine.clipped_sum(params, rows, CLIP, Strategy(name, 4 * group))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Strategy("scan", 2), Strategy("direct", 2)])
def test_a_device_whose_bits_vary_is_refused_where_units_are_alone(
    strategy, accelerator, monkeypatch, sizes, params
):
    planted(monkeypatch, "call")
    engine, rows = LocalEngine(task_of(sizes), num_lanes=1), np.arange(8).reshape(4, 2)
    with pytest.raises(UnsupportedModel, match="^accelerator=cpu: expected cpu: computed again, "):
        engine.clipped_sum(params, rows, CLIP, strategy)


def test_texts_share_no_row_where_units_keep_their_places(accelerator, sizes, params):
    worker, rows = Worker(task_of(sizes)), np.arange(UNITS * GROUP).reshape(UNITS, GROUP)
    for chunk in worker.lane_chunks(params, rows, CLIP, Strategy("direct", 4 * GROUP)):
        assert "positions" not in chunk.batch and chunk.length == LENGTH


@pytest.mark.parametrize("units", [0, 1, 3, 4, 9, 40])
def test_a_place_does_not_depend_on_lanes(units):
    rows, places = np.arange(units)[:, None], []
    for lane in in_order(rows, 5, 4, 4):
        assert len(lane) >= min(4, units)
        places += [*range(len(lane))]
    assert [place % 4 for place in places] == [unit % 4 for unit in range(units)]


@pytest.mark.slow
def test_a_pass_has_as_many_rows_as_the_device_has_memory_for(
    accelerator, monkeypatch, sizes, params
):
    task, lines = task_of(sizes, length=LENGTH), []

    def chosen(gib, group=1, **asked):
        device = SimpleNamespace(memory_stats=lambda: gib and {"bytes_limit": gib * 2**30})
        monkeypatch.setattr("fedsim.engine.worker.default_device", lambda: device)
        where = LocalEngine(task, num_lanes=1), params, group, CLIP, EngineConfig(**asked)
        return choose_strategy(*where, public_places=True, note=lines.append)

    most = TOKENS_OF_PASS // LENGTH
    assert chosen(None) == chosen(1) == Strategy("direct", most) and not lines
    fewer = chosen(0.01)
    assert fewer.rows in (most // 2, most // 4, most // 8)
    (line,) = lines
    assert line.endswith(f"GiB there: {fewer} is taken") and "rows of 48 tokens and 1," in line
    assert chosen(0.01, rows_per_pass=fewer.rows) == fewer  # as a resumed run, whose rows are there
    with refuses(f"rows_per_pass={most}", says="GiB of 0.009 GiB there"):
        chosen(0.01, rows_per_pass=most)
    with refuses("rows_per_pass=1", says="or adapters (lora_rank): direct:1 with rows of 48"):
        chosen(1e-4, group=2)


@pytest.mark.privacy
def test_units_share_a_pass_only_where_no_text_decides_their_places(accelerator, sizes, params):
    engine = LocalEngine(task_of(sizes), num_lanes=1)

    def chosen(group, public, rows=None, clip=CLIP):
        asked = EngineConfig(rows_per_pass=rows)
        return choose_strategy(engine, params, group, clip, asked, public_places=public)

    assert chosen(1, public=True) == Strategy("direct", TOKENS_OF_PASS // LENGTH)
    assert chosen(4, public=True).units_at_once(4) == TOKENS_OF_PASS // LENGTH // 4
    assert chosen(1, public=False) == Strategy("direct", 1)
    assert chosen(4, public=False) == Strategy("direct", 4)
    not_private = Clip(0.1, in_float32=True)
    assert chosen(1, public=False, rows=8, clip=not_private) == Strategy("direct", 8)
    with refuses("rows_per_pass=8", says="at most 4: units one at a time on an accelerator"):
        chosen(4, public=False, rows=8)
