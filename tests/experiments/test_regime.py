"""Trainings of the paper's regime that go on where another machine stopped."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest

from experiments import own_algorithm, regime
from experiments.harness import common
from experiments.harness.records import read_rows
from experiments.real_model_claims import interval
from experiments.regime_claims import ALL
from fedsim.errors import ConfigError
from fedsim.uls import ULS

A, B, C = (regime.Cell(ALL, 0, "uls", 4.0, group, 512) for group in (1, 2, 4))
OTHER = regime.Cell(ALL, 1, "uls", 4.0, 1, 512)
TODO = [A, B, C, OTHER]


def row(cell, model):
    """What came of a cell that was trained from a model."""
    return {**dataclasses.asdict(cell), "model": model, "loss": 3.0}


def left(rows, model):
    return regime.to_train(TODO, rows, model)


def test_what_is_compared_is_trained_from_one_model_whatever_machine_goes_on():
    assert left([], "here") == TODO
    begun = [row(A, "here"), row(B, "here")]
    assert left(begun, "here") == [C, OTHER]
    assert left(begun, "there") == TODO
    whole = [*begun, row(C, "here")]
    assert left(whole, "there") == left(whole, "here") == [OTHER]
    again = [*begun, row(A, "there")]
    assert left(again, "there") == [B, C, OTHER]
    assert left(again, "here") == [C, OTHER]
    ended = [*again, row(B, "there"), row(C, "there"), row(OTHER, "here")]
    assert left(ended, "here") == left(ended, "there") == []


def test_of_a_block_the_rows_count_that_start_from_the_model_of_most():
    unplanned = row(dataclasses.replace(A, seed=9), "here")
    first, second, more = row(A, "here"), row(B, "there"), row(A, "there")
    rows = [first, second, unplanned]
    assert regime.that_count(rows, TODO) == [True, False, False]
    assert regime.that_count([*rows, more], TODO) == [False, True, False, True]


@pytest.mark.slow
@pytest.mark.ci
def test_all_planned_cells_of_the_paper_are_there_once_each():
    norms = {str(2**n): [15.0 / 1.3**n] for n in range(5)}
    look = {"num_users": 7_014, "median_examples": 154, "norms": norms}
    settings = regime.SETTINGS["small"]
    looks = {data: {"data": data, **look} for data in settings.data}
    cells = list(dict.fromkeys(regime.cells(settings, looks)))
    seeds = {cell.seed for cell in cells if cell.times > 1}
    assert seeds == set(settings.seeds_times) and len(seeds) == 6
    assert {cell.seed for cell in cells if cell.data == ALL and cell.epsilon == 1.0} == {0, 1, 2, 3}
    blocks = regime.by_block(cells)
    assert sorted(map(len, blocks.values()))[-1] <= 8
    assert sum(map(len, blocks.values())) == len(cells)


class Halved(ULS):
    """An algorithm of somebody else's: half of each gradient."""

    def gradient(self, *args, **kwargs):
        noisy, stats = super().gradient(*args, **kwargs)
        return Half(noisy), stats


class Half:
    """Released values, halved."""

    def __init__(self, noisy):
        self.noisy = noisy

    def values(self, *args, **kwargs):
        return jax.tree.map(lambda x: x / 2, self.noisy.values(*args, **kwargs))


@pytest.mark.slow
@pytest.mark.ci
def test_an_algorithm_of_somebody_elses_is_trained_beside_the_papers(tmp_path, monkeypatch):
    def losses(name):
        out = tmp_path / name
        options = ["--algorithm", name, "--scale", "smoke", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["own_algorithm", *options])
        here = lambda train, cells, settings, file, *_: file.write_text(  # noqa: E731
            "".join(json.dumps(train(cell, settings)) + "\n" for cell in cells)
        )
        monkeypatch.setattr(own_algorithm, "compute", here)
        monkeypatch.setattr(regime, "compute", here)
        own_algorithm.main()
        rows = read_rows(out / "own_algorithm.csv")
        return {(row["data"], row["algorithm"]): row["loss"] for row in rows}

    same, halved = losses("fedsim.uls:ULS"), losses("test_regime:Halved")
    for data in own_algorithm.SETTINGS["smoke"].regime.data:
        assert same[data, "fedsim.uls:ULS"] == same[data, "uls"] == halved[data, "uls"]
        assert halved[data, "test_regime:Halved"] != halved[data, "uls"]


def test_seeds_are_paired_in_whatever_order_their_trainings_end():
    place = {"data": "d", "epsilon": 4.0}
    losses = {"els": (4.1, 4.3), "uls": (4.0, 4.2), "mine:A": (3.9, 4.1)}
    rows = [
        {**place, "algorithm": name, "seed": seed, "loss": loss}
        for name, each in losses.items()
        for seed, loss in enumerate(each)
    ]
    swapped = [*rows[:-2], rows[-1], rows[-2]]
    assert own_algorithm.check(swapped) == own_algorithm.check(rows)
    assert {held for _, held, _ in own_algorithm.check(rows)} == {True}


def test_an_attack_that_separates_all_has_an_interval():
    """Of few canaries it says little: all n pairs are in order with probability area^n."""
    rng = np.random.default_rng(0)
    for count, low in ((2, 0.025**0.5), (40, 0.025 ** (1 / 40))):
        inside, outside = rng.uniform(1, 2, count), rng.uniform(-1, 0, count)
        assert interval(inside, outside) == pytest.approx((1.0, low, 1.0))
        assert interval(outside, inside) == pytest.approx((0.0, 0.0, 1 - low))


def test_what_is_no_algorithm_is_named_in_one_line():
    for name in ("mine", "no_such_module:Mine", "fedsim.uls:Nobody", "fedsim.engine:Engine"):
        with pytest.raises(ConfigError, match=f"algorithm={name}: expected els, uls, or MODULE"):
            common.algorithm_of(name)
