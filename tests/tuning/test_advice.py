"""Commands that are printed: every setting that differs from train's defaults, and no other."""

import pytest

from fedsim.cli.main import parse
from fedsim.config import Algorithm, PrivacyConfig, run_config
from fedsim.tuning.advice import command, to_train

GIVEN = PrivacyConfig(4.0, 10, batch_size=64)


def printed(given=GIVEN, **run):
    settings = PrivacyConfig(4.0, 10, batch_size=60, delta=1e-5, group_size=3, clip_norm=0.5)
    config = run_config(data="my posts", run_dir="runs", **run)
    return command(Algorithm.ULS, to_train(Algorithm.ULS, settings, given, config))


def test_a_command_has_what_was_found_and_what_was_given():
    train = parse(printed(learning_rate=0.3, engine="local", resume=True)[1:]).keywords
    privacy, run = train["privacy"], train["run"]
    assert train["algorithm"] == "uls" and run.data.source == "my posts"
    assert (privacy.batch_size, privacy.group_size, privacy.clip_norm) == (60, 3, 0.5)
    assert privacy.tuned_on_data == "group_size,clip_norm"
    given = {"learning_rate": 0.3, "engine": "local", "resume": False}
    assert run == run_config(data="my posts", run_dir="runs/uls", **given)


def test_a_delta_is_passed_on_only_where_it_was_given():
    assert "--delta" not in printed()
    given = PrivacyConfig(4.0, 10, batch_size=64, delta=1e-5)
    assert parse(printed(given)[1:]).keywords["privacy"].delta == 1e-5


@pytest.mark.parametrize(
    "given, expected",
    [({"clipping": "plain"}, ["--clipping", "plain"]), ({"sampling": "cyclic"}, ["--sampling"])],
)
def test_what_changes_the_noise_is_passed_on(given, expected):
    words = printed(PrivacyConfig(4.0, 10, **given))
    assert set(expected) <= set(words)
    assert not {"--optimizer", "--seed", "--resume", "--model"} & set(words)
