"""What a person sees while they wait."""

import io
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console as RichConsole

from fedsim.run import terminal
from fedsim.run.terminal import Phase, Terminal, duration, speaking


def test_a_phase_says_how_far_it_has_come_and_how_long_it_will_take(monkeypatch):
    clock = iter([0.0, 4.0, 4.0, 10.0, 11.0, 13.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    phase = Phase("looking")
    assert phase.line() == "looking: 4 s"
    phase.at(0, 8)  # the time of a count is its own
    phase.at(3, 8)
    assert phase.line() == "looking: 3 of 8 done, 6 s, 10 s left"
    phase.at(1, 8)  # another count
    assert phase.line() == "looking: 1 of 8 done, 2 s, 14 s left"


def test_a_log_gets_lines_about_a_phase_ever_more_rarely(capsys, monkeypatch):
    waits, done = [], iter([False, False, False, True])
    over: Any = SimpleNamespace(wait=lambda seconds: waits.append(seconds) or next(done))
    Terminal()._in_lines(Phase("looking"), over)
    assert waits == [3.0, 6.0, 12.0, 24.0]
    assert capsys.readouterr().err == 3 * "looking: 1 s\n"


def test_a_log_gets_no_line_about_a_short_phase(capsys):
    with Terminal().phase("looking"):
        pass
    assert not capsys.readouterr().err


def test_a_notebook_gets_one_line_that_is_overwritten_and_cleared(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "REFRESH_S", 0.01)
    monkeypatch.setattr(terminal, "in_notebook", lambda: True)
    with Terminal().phase("looking"):
        time.sleep(0.1)
    err = capsys.readouterr().err
    assert "\rlooking: 1 s" in err and "\n" not in err
    assert err.endswith("\r" + " " * 120 + "\r")


def test_levels_and_wording_hold_for_the_terminals_of_a_block(capsys):
    def speak():
        shown = Terminal()
        shown.warn("a --flag")
        shown.note("a note")
        shown.detail("1 ms")
        return capsys.readouterr().err.splitlines()

    assert speak() == ["warning: a --flag", "a note"]
    with speaking("quiet", lambda text: text.replace("--flag", "flag=")):
        assert speak() == ["warning: a flag="]
    with speaking("verbose"):
        assert speak() == ["warning: a --flag", "a note", "1 ms"]
    assert speak() == ["warning: a --flag", "a note"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12 ms"), (9.78, "9.8 s"), (59.0, "59 s"), (90, "1.5 min"), (5400, "1.5 h")],
)
def test_a_duration_has_the_unit_that_people_use(seconds, text):
    assert duration(seconds) == text


def test_on_a_terminal_the_line_is_written_over(monkeypatch):
    monkeypatch.setattr(terminal, "REFRESH_S", 0.01)
    file, shown = io.StringIO(), Terminal()
    shown._out = RichConsole(file=file, force_terminal=True, width=60)
    with shown.phase("looking") as phase:
        phase.at(2, 4)
        time.sleep(0.2)
    text = file.getvalue()
    assert "looking: 2 of 4 done" in text and text.count("\n") == 1
    assert text.endswith("\r\x1b[1A\x1b[2K")  # the line is cleared


def test_the_first_line_needs_no_library_that_takes_long():
    code = "import sys, fedsim.cli.main, fedsim.run.terminal; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "rich" in loaded.split() and not {"jax", "ray", "flax"} & set(loaded.split())
