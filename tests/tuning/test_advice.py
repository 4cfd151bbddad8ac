"""Commands that are printed: every setting that differs from train's defaults, and no other."""

from fedsim.cli.main import parse
from fedsim.config import Algorithm, PrivacyConfig, run_config
from fedsim.tuning.advice import command, to_train


def printed(run, **given):
    given = PrivacyConfig(4.0, 10, batch_size=64, **given)
    settings = PrivacyConfig(4.0, 10, batch_size=60, delta=1e-5, group_size=3, clip_norm=0.5)
    config = run_config(data="my posts", run_dir="runs", **run)
    return command(Algorithm.ULS, to_train(Algorithm.ULS, settings, given, config))


def test_a_command_has_what_was_found_and_what_was_given():
    given = {"learning_rate": 0.3, "engine": "local"}
    words = printed({**given, "resume": True}, delta=1e-5, clipping="plain")
    train = parse(words[1:]).keywords
    privacy = train["privacy"]
    assert train["algorithm"] == "uls"
    assert train["run"] == run_config(data="my posts", run_dir="runs/uls", **given)
    assert (privacy.batch_size, privacy.group_size, privacy.clip_norm) == (60, 3, 0.5)
    assert privacy.tuned_on_data == "group_size,clip_norm"
    assert (privacy.delta, privacy.clipping) == (1e-5, "plain")
    usual = {"--delta", "--clipping", "--optimizer", "--seed", "--resume", "--model"}
    assert not usual & set(printed({}))
