"""What a person reads, and that no epsilon is shown for more than it is."""

import dataclasses
import io
import math
import re
from types import SimpleNamespace

import pytest
from rich.console import Console as RichConsole

from fedsim.config import Algorithm, run_config
from fedsim.plan import ADJACENCY, Evaluations, Plan, PoissonSampling, claimed_fields
from fedsim.plan.options import REPRODUCTION
from fedsim.run import speaking
from fedsim.run.console import Console, guarantee_line, line, plan_rows

WORKERS = SimpleNamespace(num_lanes=8, describe=lambda: "2 processes, 1 CPU thread each")
RUN = run_config(
    data="pydocs", run_dir="r", optimizer="momentum", learning_rate=0.28, schedule="constant",
    ema=0.9,
)  # fmt: skip
PLAN = Plan(
    algorithm=Algorithm.ELS, num_users=1200, num_examples=56_000, num_units=9000, num_steps=20,
    budget=64, group_size=8, expected_count=64, sampling=PoissonSampling(prob=64 / 9000),
    clip_norm=0.5, clipping="normalised", target_epsilon=4.0, delta=1e-6, noise_multiplier=1.25,
    num_parameters=123_456, data_seal="abc",
    non_private=("public by assumption: 9 examples", "group_size=8 (the median user's)"),
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


def steps_in_a_log(capsys, last, *, log_every=1, first=0, level="normal"):
    """The steps that a log has lines about."""
    with speaking(level), Console(log_every=log_every).steps(first, last) as show:
        for step in range(first + 1, last + 1):
            show(step, VALUES)
    return [int(text.split("/")[0].split()[1]) for text in shown(capsys)]


def test_a_log_has_a_few_plain_lines_of_progress(capsys):
    with Console(log_every=10).steps(0, PLAN.num_steps) as show:
        for step in range(1, 21):
            show(step, VALUES)
    lines = shown(capsys)
    assert [text.partition("/20  ")[0] for text in lines] == ["step 3", "step 10", "step 20"]
    assert all("epsilon 0.5  held-out loss 5.5  train loss 5.25" in text for text in lines)
    assert lines[0].endswith(" left") and "left" not in lines[-1] and "gradients/s" not in lines[-1]


def test_the_time_left_leaves_out_the_first_step_which_compiles(capsys, monkeypatch):
    seconds = iter([60, *range(61, 160)])
    clock = SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr("fedsim.run.console.time", clock)
    with Console().steps(0, 100) as show:
        for step in range(1, 101):
            show(step, VALUES)
    lines = shown(capsys)
    assert lines[0].startswith("step 3/100") and lines[0].endswith("  1.6 min left")
    assert lines[-2].startswith("step 90/100") and lines[-2].endswith("  10 s left")


def test_a_long_run_has_no_more_lines_unless_all_details_are_shown(capsys):
    assert steps_in_a_log(capsys, 1000) == [3, *range(100, 1001, 100)]
    assert steps_in_a_log(capsys, 1000, log_every=300) == [3, 300, 600, 900, 1000]
    assert len(steps_in_a_log(capsys, 1000, log_every=5, level="verbose")) == 201
    assert steps_in_a_log(capsys, 1000, level="quiet") == []


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


def test_the_plan_names_what_the_guarantee_does_not_cover(capsys):
    Console().plan(PLAN, WORKERS, RUN)
    lines = shown(capsys)
    public, private = PLAN.non_private
    assert lines[-2:] == [public, f"not private: {private}"]
    assert len(lines) == len(plan_rows(PLAN, WORKERS, RUN)) + 2


@pytest.mark.privacy
def test_losses_that_are_shown_are_not_within_what_the_guarantee_covers(capsys):
    noisy = Evaluations(1.0, 1e-6, 4.4, 1, 2, num_users=11, rows=4, loss_bound=11.0)
    for evaluations, says in ((None, "losses that are shown have"), (noisy, "train loss has")):
        plan = dataclasses.replace(PLAN, non_private=(), evaluations=evaluations)
        Console().plan(plan, WORKERS, RUN)
        *_, last = shown(capsys)
        assert last.startswith("nothing outside the guarantee of model and ledger; the ")
        assert last.endswith(f"the {says} no noise: not to be published")


def rows_of(plan, **how):
    return dict(plan_rows(plan, WORKERS, RUN, **how))


def test_the_plan_of_els_counts_examples_and_its_pool():
    rows = rows_of(PLAN)
    assert rows["algorithm"] == "DP-SGD-ELS: examples are drawn by Poisson sampling"
    assert rows["data"] == "1,200 users, 56,000 examples"
    assert rows["step"] == "64 examples on average, each with probability 0.00711"
    most = "at most 8 examples in the whole training"
    assert rows["per user"] == f"{most} (a pool of 9,000 examples)"
    assert rows["workers"] == "2 processes, 1 CPU thread each; a step is cut in 8 parts"
    assert rows["protects"] == "all texts of a user, and whether they are one of the users"
    assert rows["optimizer"] == "SGD with momentum, learning rate 0.28, weights averaged (EMA 0.9)"
    empty = rows_of(replaced(adjacency="zero-out", num_units=9600))
    assert empty["per user"] == f"{most} (a pool of 9,600 places)"


def test_the_plan_of_uls_counts_users():
    rows = rows_of(replaced(algorithm="uls", expected_count=8))
    assert rows["data"] == "1,200 users, 56,000 examples"
    assert rows["step"].startswith("8 users on average")
    assert rows["per user"] == "at most 8 examples in a step"


def test_the_plan_says_how_much_noise_a_coordinate_gets_and_more_with_all_details():
    assert PLAN.noise_multiplier / PLAN.expected_count == 0.01953125
    assert "gets noise of 0.020 (noise multiplier 1.2500)" in rows_of(PLAN)["noise"]
    plain = rows_of(replaced(clipping="plain"))
    assert "norm 0.5 at most" in plain["clipping"] and "noise of 0.0098 " in plain["noise"]
    predicted = replaced(predicted_error=3.5)
    assert "3.5 on sums" in rows_of(predicted, verbose=True)["noise on sums"]
    assert "noise on sums" not in rows_of(predicted)


def test_the_plan_labels_an_epsilon_that_is_no_guarantee():
    assert rows_of(PLAN)["epsilon"] == "4 at delta 1.00e-6"
    seeded = rows_of(replaced(seeded=True))
    assert seeded["epsilon"] == f"4 at delta 1.00e-6 ({REPRODUCTION})"
    free = rows_of(replaced(target_epsilon="inf", noise_multiplier=0.0))
    assert free["epsilon"] == "infinite: no noise, so no privacy" and free["noise"] == "none"


def test_the_claim_of_a_private_run_has_unit_numbers_and_adjacency():
    expected = "user-level DP: epsilon 3.9877 at delta 1.00e-6; protects all texts of a user, and "
    assert guarantee_line(SUMMARY) == f"{expected}whether they are one of the users"
    zero = {**SUMMARY, **dict.fromkeys(("adjacency", "epsilon_holds"), ADJACENCY["zero-out"])}
    assert guarantee_line(zero).endswith("that they are one of the users is not hidden")


@pytest.mark.privacy
def test_the_claim_has_the_slack_of_noise_that_is_not_ideal():
    text = guarantee_line({**SUMMARY, "slack": {"epsilon": 0.25, "delta": 0.0}})
    assert "epsilon 4.2377 at" in text


@pytest.mark.parametrize("sampling", ["poisson", "cyclic"])
def test_a_run_without_noise_claims_nothing(sampling):
    text = guarantee_line({**SUMMARY, "epsilon": "inf", "sampling_run": sampling})
    assert text == "non-private: trained without noise"


def test_the_outcome_is_loss_claim_and_place(capsys, tmp_path):
    (tmp_path / "tb").mkdir()
    Console().summary(SUMMARY, tmp_path)
    losses, guarantee, place = shown(capsys)
    loss = "held-out loss 5.5 -> 4.25 nats per token (perplexity 245 -> 70.1)"
    assert losses == f"{loss}; 20 steps, 1,290 gradients, 12 s"
    assert guarantee == guarantee_line(SUMMARY)
    assert place.endswith(f"tensorboard --logdir {tmp_path}/tb")


@pytest.mark.parametrize(
    ("unit", "said"),
    [("nats per byte", "4.25 nats per byte (perplexity 245 -> 70.1); 20"), ("", "4.25; 20")],
)
def test_a_loss_has_the_unit_of_its_texts(unit, said, capsys, tmp_path):
    Console().summary({**SUMMARY, "loss_unit": unit}, tmp_path)
    assert f"held-out loss 5.5 -> {said} steps" in shown(capsys)[0]


def test_a_quiet_console_shows_warnings_alone(capsys, tmp_path):
    with speaking("quiet"):
        console = Console()
    console.plan(PLAN, WORKERS, RUN)
    console.summary({**SUMMARY, "final_eval_loss": 5.6}, tmp_path)
    with console.phase("looking"):
        console.detail("1 ms")
    (line,) = shown(capsys)
    assert line.startswith("warning: the held-out loss rose")


@pytest.mark.parametrize(("final", "warned"), [(5.6, True), (5.5, False), (math.nan, False)])
def test_a_model_that_got_worse_is_said_to_be(final, warned, capsys, tmp_path):
    Console().summary({**SUMMARY, "final_eval_loss": final}, tmp_path)
    assert any("warning: the held-out loss rose" in line for line in shown(capsys)) == warned


@pytest.mark.parametrize(("final", "warned"), [(5.6, False), (14.9, True)])
def test_a_loss_with_noise_says_so_and_is_worse_only_beyond_it(final, warned, capsys, tmp_path):
    how = Evaluations(1.0, 1e-6, 4.4, 1, 2, num_users=11, rows=4, loss_bound=11.0)
    assert how.stddev == pytest.approx(2.2)
    noisy = {**SUMMARY, "final_eval_loss": final, "evaluations": dataclasses.asdict(how)}
    Console().summary(noisy, tmp_path)
    lines = shown(capsys)
    assert f"5.5 -> {final} nats per token, each with noise of 2.2; 20 steps" in lines[0]
    assert any("the held-out loss rose" in line for line in lines) == warned


def test_a_held_out_loss_says_after_which_step_it_is():
    assert "  held-out loss 5.5 (at step 36)  " in line({**VALUES, "eval/step": 36})
    assert "at step" not in line({**VALUES, "eval/step": 0, "eval/loss": math.nan})


def test_the_board_of_a_directory_with_spaces_can_be_copied(capsys, tmp_path):
    (tmp_path / "a run" / "tb").mkdir(parents=True)
    Console().summary(SUMMARY, tmp_path / "a run")
    assert shown(capsys)[-1].endswith(f"tensorboard --logdir '{tmp_path}/a run/tb'")


def test_a_run_without_tensorboard_is_not_looked_at_there(capsys, tmp_path):
    Console().summary(SUMMARY, tmp_path)
    assert shown(capsys)[-1] == f"written to {tmp_path}"


def test_a_step_without_a_loss_has_none_in_its_line():
    empty = {name: value for name, value in VALUES.items() if name != "non_private/loss"}
    assert line(empty) == line(VALUES).replace("  train loss 5.25", "")
    assert line({**VALUES, "non_private/loss": 0.0}).endswith("  train loss 0")
    without = line(VALUES).replace("held-out loss 5.5  ", "")
    assert line({**VALUES, "eval/loss": math.nan}) == without


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
    assert "…" not in last and ("train loss 5.25" in last) == (columns == 200)
    assert columns == 50 or "held-out loss 5.5" in last


def test_a_narrow_terminal_gets_lines_between_words_and_values_under_each_other():
    shown = on_terminal(50, lambda console: console.plan(PLAN, WORKERS, RUN))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 50
    at = lines.index("step              64 examples on average, each")
    assert lines[at + 1] == " " * 18 + "with probability 0.00711"
    path = "/" + "long" * 20  # can still be copied
    assert f"\n{path}\n" in on_terminal(50, lambda console: console.note(f"written to {path}"))
