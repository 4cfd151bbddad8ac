"""What a person reads, and that no epsilon is shown for more than it is."""

import io
import math
import re
from types import SimpleNamespace

import pytest
from rich.console import Console as RichConsole

from fedsim.config import Algorithm
from fedsim.config.privacy import COMPARISON_ONLY
from fedsim.plan import Plan, PoissonSampling, claimed_fields
from fedsim.run.console import Console, guarantee_line, line, plan_rows

WORKERS = SimpleNamespace(num_workers=2, num_lanes=8, describe=lambda: "1 CPU thread")
PLAN = Plan(
    algorithm=Algorithm.ELS, num_users=1200, num_examples=56_000, num_units=9000, num_steps=20,
    budget=64, group_size=8, expected_count=64, sampling=PoissonSampling(prob=64 / 9000),
    clip_norm=0.5, clipping="normalised", target_epsilon=4.0, delta=1e-6, noise_multiplier=1.25,
    num_parameters=123_456, data_seal="abc",
    non_private=("delta=1e-06 (n^-1.1)", "group_size=8 (the median user's)"),
)  # fmt: skip
SUMMARY = {
    **PLAN.as_dict(), "epsilon": 3.98766, "adjacency": "add or remove one user", "steps_done": 20,
    "epsilon_holds": "add or remove one user",
    "initial_eval_loss": 5.5, "final_eval_loss": 4.25, "gradients_computed": 1290,
    "wall_seconds": 12.3,
}  # fmt: skip
VALUES = {
    "non_private/loss": 5.25, "eval/loss": 5.5, "privacy/epsilon": 0.5,
    "non_private/gradients_per_second": 100.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def replaced(**fields):
    return Plan.from_dict({**PLAN.as_dict(), **fields})


def claimed(plan):
    """The summary of a run of this plan."""
    return {**SUMMARY, **claimed_fields(plan, 3.98766, "")}


def shown(capsys):
    """The lines on stderr; there is nothing on stdout and no control code anywhere."""
    out, err = capsys.readouterr()
    assert out == "" and not re.search(r"[\x1b\r]", err)
    return err.splitlines()


def test_without_a_terminal_progress_is_one_plain_line_per_interval(capsys):
    with Console(log_every=10).steps(0, PLAN.num_steps) as show:
        for step in range(1, 21):
            show(step, VALUES)
    lines = shown(capsys)
    assert [text.partition("/20  ")[0] for text in lines] == ["step 3", "step 10", "step 20"]
    assert all(
        "epsilon 0.5  eval loss 5.5  loss (non-private) 5.25  gradients/s 100" in text
        for text in lines
    )
    assert lines[-1].endswith("left 0 s")


def test_a_resumed_run_shows_progress_from_where_it_is(capsys):
    with Console(log_every=10).steps(14, PLAN.num_steps) as show:
        for step in range(15, 21):
            show(step, VALUES)
    assert [int(text.split("/")[0].split()[1]) for text in shown(capsys)] == [17, 20]


def test_a_note_is_one_line_and_shown_as_it_is(capsys):
    text = "[red]x[/red] " + "long " * 100
    Console().note(text)
    assert shown(capsys) == [text]


def test_a_note_keeps_what_looks_like_an_emoji_code(capsys):
    Console().note("written to /runs/:smile:")
    assert shown(capsys) == ["written to /runs/:smile:"]


def test_the_plan_names_what_was_read_off_the_data(capsys):
    Console().plan(PLAN, WORKERS)
    lines = shown(capsys)
    facts = [text for text in lines if text.startswith("not covered by the guarantee: ")]
    assert [fact.partition(": ")[2] for fact in facts] == list(PLAN.non_private)
    assert len(lines) == len(plan_rows(PLAN, WORKERS)) + 2


def test_the_plan_of_els_counts_examples_and_its_pool():
    rows = dict(plan_rows(PLAN, WORKERS))
    assert rows["algorithm"] == "DP-SGD-ELS, poisson sampling"
    assert rows["data"] == "1,200 users, 56,000 examples, 9,000 examples in the pool"
    assert rows["step"] == "64 examples expected, with probability 0.00711"
    assert rows["group size"] == "8 of a user's examples in all at most"
    assert rows["workers"] == "2 x 1 CPU thread; 8 lanes"
    assert rows["adjacency"] == "add or remove one user"
    rows = dict(plan_rows(replaced(adjacency="zero-out", num_units=9600), WORKERS))
    assert rows["data"].endswith("9,600 places in the pool")


def test_the_plan_of_uls_counts_users():
    rows = dict(plan_rows(replaced(algorithm="uls", expected_count=8), WORKERS))
    assert rows["data"] == "1,200 users, 56,000 examples"
    assert rows["step"].startswith("8 users expected")
    assert rows["group size"] == "8 of a user's examples each at most"


def test_the_plan_labels_an_epsilon_that_is_no_guarantee():
    assert dict(plan_rows(PLAN, WORKERS))["epsilon"] == "4 at delta 1.00e-6"
    shuffled = dict(plan_rows(replaced(sampling_run="shuffle"), WORKERS))
    assert shuffled["epsilon"] == f"4 at delta 1.00e-6 ({COMPARISON_ONLY})"
    free = dict(plan_rows(replaced(target_epsilon="inf", noise_multiplier=0.0), WORKERS))
    assert free["epsilon"] == "inf: no noise, non-private"


def test_the_claim_of_a_private_run_has_unit_numbers_and_adjacency():
    expected = "user-level DP: epsilon 3.9877 at delta 1.00e-6 (add or remove one user)"
    assert guarantee_line(SUMMARY) == expected


@pytest.mark.privacy
def test_the_claim_has_the_slack_of_noise_that_is_not_ideal():
    text = guarantee_line({**SUMMARY, "slack": {"epsilon": 0.25, "delta": 0.0}})
    assert "epsilon 4.2377 at" in text


def test_a_shuffled_run_claims_no_guarantee():
    text = guarantee_line(claimed(replaced(sampling_run="shuffle")))
    assert text == f"epsilon 3.9877 at delta 1.00e-6: {COMPARISON_ONLY}"
    assert "user-level DP" not in text


def test_an_epsilon_of_an_assumed_population_is_never_shown_as_a_guarantee():
    label = "as if there were 12,000 users: an assumption, not a guarantee"
    plan = replaced(assumed_population=12_000)
    assumed = dict(plan_rows(plan, WORKERS))
    assert assumed["epsilon"] == f"4 at delta 1.00e-6 ({label})"
    assert guarantee_line(claimed(plan)).endswith(f"1.00e-6: {label}")
    values = {**VALUES, "comparison_only/epsilon_of_assumed_population": 0.5}
    del values["privacy/epsilon"]
    assert "epsilon of an assumed population 0.5" in line(values)


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_a_run_without_noise_claims_nothing(sampling):
    text = guarantee_line({**SUMMARY, "epsilon": "inf", "sampling_run": sampling})
    assert text == "non-private: trained without noise"


def test_the_outcome_is_loss_claim_and_place(capsys, tmp_path):
    Console().summary(SUMMARY, tmp_path)
    losses, guarantee, place = shown(capsys)
    assert losses.startswith("eval loss 5.5 -> 4.25 nats/token")
    assert losses.endswith("20 steps, 1290 gradients, 12 s")
    assert guarantee == guarantee_line(SUMMARY)
    assert place.endswith(f"tensorboard --logdir {tmp_path}/tb")


@pytest.mark.parametrize(("final", "warned"), [(5.6, True), (5.5, False), (math.nan, False)])
def test_a_model_that_got_worse_is_said_to_be(final, warned, capsys, tmp_path):
    Console().summary({**SUMMARY, "final_eval_loss": final}, tmp_path)
    assert any("warning: the held-out loss rose" in line for line in shown(capsys)) == warned


def test_a_held_out_loss_says_after_which_step_it_is():
    assert "  eval loss 5.5 after step 36  " in line({**VALUES, "eval/step": 36})
    assert "after step" not in line({**VALUES, "eval/step": 0, "eval/loss": math.nan})


def test_the_board_of_a_directory_with_spaces_can_be_copied(capsys, tmp_path):
    Console().summary(SUMMARY, tmp_path / "a run")
    assert shown(capsys)[-1].endswith(f"tensorboard --logdir '{tmp_path}/a run/tb'")


def test_a_step_without_a_loss_has_none_in_its_line():
    empty = {name: value for name, value in VALUES.items() if name != "non_private/loss"}
    assert line(empty) == line(VALUES).replace("loss (non-private) 5.25  ", "")
    assert "  loss (non-private) 0  " in line({**VALUES, "non_private/loss": 0.0})
    assert line({**VALUES, "eval/loss": math.nan}) == line(VALUES).replace("eval loss 5.5  ", "")


def on_terminal(columns, act):
    """What a terminal of so many columns has been shown."""
    shown, console = io.StringIO(), Console()
    console._out = RichConsole(file=shown, force_terminal=True, width=columns)
    act(console)
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.getvalue())


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_a_terminal_keeps_step_and_epsilon_however_narrow(columns):
    def steps(console):
        with console.steps(0, 2000) as show:
            show(1234, {**VALUES, "privacy/epsilon": 7.9876})

    shown = on_terminal(columns, steps)
    last = [text for text in re.split(r"[\r\n]", shown) if "epsilon" in text][-1]
    assert re.match(r"step 1234/2000 ", last) and "epsilon 7.988" in last and len(last) <= columns
    assert "…" not in last and ("gradients/s 100" in last) == (columns == 200)
    assert columns == 50 or "eval loss 5.5" in last


def test_a_narrow_terminal_gets_lines_between_words_and_values_under_each_other():
    shown = on_terminal(50, lambda console: console.plan(PLAN, WORKERS))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 50
    at = lines.index("step              64 examples expected, with")
    assert lines[at + 1] == " " * 18 + "probability 0.00711"
    path = "/" + "long" * 20  # can still be copied
    assert f"\n{path}\n" in on_terminal(50, lambda console: console.note(f"written to {path}"))
