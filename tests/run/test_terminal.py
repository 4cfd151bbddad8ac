"""What a person sees while they wait."""

import io
import subprocess
import sys
import time

from rich.console import Console as RichConsole

from fedsim.run import console, terminal
from fedsim.run.terminal import Phase, Terminal


def test_a_phase_says_how_far_it_has_come_and_how_long_it_will_take(monkeypatch):
    clock = iter([0.0, 4.0, 4.0, 10.0, 11.0, 13.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    phase = Phase("looking")
    assert phase.line() == "looking: 4 s"
    phase.at(0, 8)  # the time of a count is its own
    phase.at(3, 8)
    assert phase.line() == "looking: 3 of 8, 6 s, 10 s left"
    phase.at(1, 8)  # another count
    assert phase.line() == "looking: 1 of 8, 2 s, 14 s left"


def test_a_log_gets_a_line_at_once_and_others_while_it_takes_long(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "LINES_S", (0.01, 0.02, 0.03))
    with Terminal().phase("looking") as phase:
        phase.at(1, 2)
        time.sleep(0.2)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "looking" and len(others) >= 2
    assert all(line.startswith("looking: 1 of 2, 0 s, 0 s left") for line in others)


def test_a_short_phase_is_one_line(capsys):
    with Terminal().phase("looking"):
        pass
    assert capsys.readouterr().err == "looking\n"


def test_a_phase_that_is_told_late_has_no_line_if_it_is_short(capsys, monkeypatch):
    with Terminal().phase("looking", late=True):
        pass
    assert not capsys.readouterr().err
    monkeypatch.setattr(terminal, "LINES_S", (0.01, 0.02, 0.03))
    with Terminal().phase("looking", late=True):
        time.sleep(0.2)
    assert capsys.readouterr().err.startswith("looking: 0 s\n")


def test_a_log_says_something_of_slow_steps_each_time(monkeypatch):
    clock, lines = iter([0.0, 11.0, 12.0, 22.5, 23.0]), []
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    show = console.in_lines(lines.append, 0, 100, every=50)
    for step in (1, 2, 4, 5):
        show(step, {})
    assert [line.split()[1] for line in lines] == ["4/100"]


def test_on_a_terminal_the_line_is_written_over(monkeypatch):
    monkeypatch.setattr(terminal, "REFRESH_S", 0.01)
    shown = Terminal()
    shown._out = RichConsole(file=io.StringIO(), force_terminal=True, width=60)
    with shown.phase("looking") as phase:
        phase.at(2, 4)
        time.sleep(0.2)
    text = shown._out.file.getvalue()
    assert "looking: 2 of 4" in text and text.rstrip().splitlines()[-1].strip()


def test_the_first_line_needs_no_library_that_takes_long():
    code = "import sys, fedsim.cli.main, fedsim.run.terminal; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "rich" in loaded.split() and not {"jax", "ray", "flax"} & set(loaded.split())
