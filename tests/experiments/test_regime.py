"""Trainings of the paper's regime that go on where another machine stopped."""

import dataclasses

import pytest

from experiments import regime
from experiments.regime_claims import ALL

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
