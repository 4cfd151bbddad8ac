"""What a person sees while they wait."""

from fedsim.run import terminal
from fedsim.run.terminal import Terminal, verbosity


def test_levels_hold_for_the_terminals_of_a_block(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook, which is no terminal

    def speak():
        shown = Terminal()
        shown.warn("a --flag")
        shown.note("a note")
        with shown.phase("a phase") as progress:
            progress(1, 2)
            progress(2, 2)  # the end is said by what comes next
        return capsys.readouterr().err.splitlines()

    assert speak() == ["warning: a --flag", "a note"]
    with verbosity("quiet"):
        assert speak() == ["warning: a --flag"]
    assert speak() == ["warning: a --flag", "a note"]
    monkeypatch.setattr(terminal, "SILENT_S", -1.0)
    assert speak() == ["warning: a --flag", "a note", "a phase: 1 of 2 done, about 1 s left"]
