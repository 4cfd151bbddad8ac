"""What `fedsim budget` says of limits in words."""

import pytest

from fedsim.plan import Fact
from fedsim.trust.budget import budget, sentences, table

RUN = {
    "run": "a", "kind": "train", "state": "released", "began": "now", "releases": 20,
    "epsilon": 1.0, "guarantee": True, "why_not": "", "users": 150,
}  # fmt: skip


def said(spent, *limits, runs=1):
    left = [max(0.0, epsilon - spent) for epsilon in limits]
    return sentences(
        {
            "delta": 1e-3,
            "num_users": 150,
            "epsilon": spent,
            "epsilon_adaptive": spent,
            "sum_of_epsilons": spent,
            "limits": [
                {"epsilon": epsilon, "delta": 1e-3, "left": rest, "spent": spent}
                for epsilon, rest in zip(limits, left, strict=True)
            ],
            "runs": runs if isinstance(runs, list) else [RUN] * runs,
            "alike": "",
        }
    )


def test_a_limit_that_is_broken_is_no_limit_that_is_used_up():
    broken = "The limit of 5 at delta = 1.00e-3 is exceeded: 5.318 is spent. No further run"
    assert broken in said(5.318, 5)[1]
    assert ": epsilon = 3.681 is left for one" in said(5.3185, 9)[1]
    assert ": epsilon = 0.0 is left for one" in said(5.0, 5)[1]


def test_to_look_at_a_budget_makes_no_ledger_and_to_limit_it_does(tmp_path):
    place = tmp_path / "ledger"
    found = budget(place, ["a", "b"])
    assert found["ledger"] == str(place) and found["num_users"] == 2 and not found["runs"]
    assert not place.exists()
    (limit,) = budget(place, ["a", "b"], limit_epsilon=3.0)["limits"]
    assert limit["left"] == pytest.approx(3.0, rel=1e-3)
    assert place.exists() and budget(place, ["b"])["limits"][0]["epsilon"] == 3.0


def test_a_budget_without_bound_names_the_runs_that_made_it_so_and_what_to_do():
    seeded = {**RUN, "run": "trial", "guarantee": False, "why_not": "known-seed"}
    free = {**seeded, "run": "free", "epsilon": "inf", "releases": None, "why_not": "without noise"}
    unstarted = {**seeded, "run": "early", "releases": 0}
    lines = said("inf", runs=[RUN, seeded, free, unstarted])
    total = "Over 4 runs on texts of these 150 users, the cost is unlimited, because 2 of"
    assert lines[0].startswith(total)
    reasons = f"trial ({Fact.KNOWN_SEED.text}), free (without noise)"
    assert f"no guarantee: {reasons}. This is permanent" in lines[0]
    assert "budget_ledger" in lines[0] and lines[-1] == "* no guarantee"
    rows = table({"runs": [RUN, seeded, free]}).splitlines()[1:]
    assert [row.split()[-1] for row in rows] == ["1.0", "1.0*", "inf*"]
