"""Commands that are printed: every setting that differs from train's defaults, and no other."""

from pathlib import Path

import pytest

from fedsim import cli
from fedsim.advice import command
from fedsim.arguments import parse
from fedsim.config import Algorithm, PrivacyConfig, RunConfig

GIVEN = PrivacyConfig(4.0, 10, budget=64)


def printed(given=GIVEN, **run):
    settings = PrivacyConfig(4.0, 10, budget=60, delta=1e-5, group_size=3, clip_norm=0.5)
    return command(Algorithm.ULS, settings, given, RunConfig("my posts", Path("runs"), **run))


def test_a_command_has_what_was_found_and_what_was_given():
    train = parse(cli.Command, printed(learning_rate=0.3, engine="local", resume=True)[1:])
    assert train.algorithm == "uls" and train.run.data == "my posts"
    assert (train.privacy.budget, train.privacy.group_size, train.privacy.clip_norm) == (60, 3, 0.5)
    assert train.privacy.chosen_on_data == "group_size,clip_norm"
    assert train.run == RunConfig(
        "my posts", Path("runs/uls"), learning_rate=0.3, engine="local", resume=False
    )


def test_a_delta_is_passed_on_only_where_it_was_given():
    assert "--delta" not in printed()
    given = PrivacyConfig(4.0, 10, budget=64, delta=1e-5)
    assert parse(cli.Command, printed(given)[1:]).privacy.delta == 1e-5


@pytest.mark.parametrize(
    "given, expected",
    [({"clipping": "plain"}, ["--clipping", "plain"]), ({"sampling": "shuffle"}, ["--sampling"])],
)
def test_what_changes_the_noise_is_passed_on(given, expected):
    words = printed(PrivacyConfig(4.0, 10, **given))
    assert set(expected) <= set(words)
    assert not {"--optimizer", "--seed", "--resume", "--model"} & set(words)
