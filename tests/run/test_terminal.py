"""What a person sees while they wait."""

from fedsim.run.terminal import Terminal, verbosity


def test_levels_and_wording_hold_for_the_terminals_of_a_block(capsys):
    def speak():
        shown = Terminal()
        shown.warn("a --flag")
        shown.note("a note")
        shown.detail("1 ms")
        return capsys.readouterr().err.splitlines()

    assert speak() == ["warning: a --flag", "a note"]
    with verbosity("quiet", lambda text: text.replace("--flag", "flag=")):
        assert speak() == ["warning: a flag="]
    with verbosity("verbose"):
        assert speak() == ["warning: a --flag", "a note", "1 ms"]
    assert speak() == ["warning: a --flag", "a note"]
