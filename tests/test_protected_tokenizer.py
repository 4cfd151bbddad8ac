"""A tokenizer of a protected model: trained on what the model writes, and on nobody's texts."""

import json
import shutil

import pytest
from test_verify import command, write_texts

from fedsim.cli.main import main
from fedsim.data import tokenizer_from_users
from fedsim.data.tokenizer import Tokenizer, file_of

SAMPLED = ["--vocab-size", "300", "--samples", "70", "--num-tokens", "24", "--json"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with texts, a finished run, and its tokenizer; not to be changed."""
    place = tmp_path_factory.mktemp("tokenizer")
    texts = write_texts(place / "texts.parquet")
    main(command(texts, place / "run", **{"num-steps": 1}))
    main(["tokenizer", "--from", str(place / "run"), "--out", str(place / "new.json"), *SAMPLED])
    return place


def refused(words, capsys):
    """The error of a command that is a user's mistake."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert stop.value.code == 2
    return capsys.readouterr().err


def built(place, out, capsys, tokenizer):
    """(metadata of a data set built with a tokenizer, what the build said)."""
    words = ["data", "build", place / "texts.parquet", "--out", out, "--num-workers", 1]
    capsys.readouterr()
    main([str(word) for word in (*words, "--tokenizer", tokenizer)])
    return json.loads((out / "metadata.json").read_text()), capsys.readouterr().err


def test_no_texts_of_users_are_needed(place, tmp_path):
    """Equal run, equal seed: equal bytes, wherever the texts are now."""
    run = shutil.copytree(place / "run", tmp_path / "run")
    (place / "texts.parquet").rename(place / "away")
    try:
        again, other = tmp_path / "again.json", tmp_path / "other.json"
        main(["tokenizer", "--from", str(run), "--out", str(again), *SAMPLED])
        main(["tokenizer", "--from", str(run), "--out", str(other), *SAMPLED, "--seed", "1"])
    finally:
        (place / "away").rename(place / "texts.parquet")
    assert again.read_bytes() == (place / "new.json").read_bytes() != other.read_bytes()


def test_a_data_set_says_where_its_tokenizer_comes_from(place, tmp_path, capsys):
    metadata, said = built(place, tmp_path / "own", capsys, place / "new.json")
    origin = metadata["tokenizer"]["origin"]
    assert origin.startswith("texts of the protected model of run run, parameters ")
    assert "epsilon 4" in origin and f"trained on {origin}" in " ".join(said.split())
    assert not tokenizer_from_users(metadata)
    flags = {"num-steps": 1, "max-length": None}
    main(command(tmp_path / "own", tmp_path / "run", **flags))
    main(["publish", str(tmp_path / "run")])
    given = f"taken as given: the tokenizer, trained on {origin}"
    public = tmp_path / "run" / "public"
    head = json.loads((public / "ledger.jsonl").read_text().splitlines()[0])["head"]
    assert given in head["plan"]["non_private"]
    assert given.partition(": ")[2] in " ".join((public / "report.md").read_text().split())
    beside = json.loads((place / "new.provenance.json").read_text())
    assert (beside["origin"], beside["seed"], beside["samples"]) == (origin, 0, 70)
    theirs, _ = built(place, tmp_path / "theirs", capsys, "bpe:300")
    assert tokenizer_from_users(theirs) and "origin" not in theirs["tokenizer"]


def test_what_is_about_another_tokenizer_is_refused(place, tmp_path, capsys):
    Tokenizer.bytes().save(tmp_path / "new.json")
    shutil.copy(place / "new.provenance.json", tmp_path)
    words = ["data", "build", place / "texts.parquet", "--out", tmp_path / "built"]
    said = refused([*words, "--tokenizer", tmp_path / "new.json"], capsys)
    assert "expected the tokenizer that new.provenance.json is about" in said


def test_only_a_protected_model_writes_for_it(place, tmp_path, capsys):
    texts = place / "texts.parquet"
    flags = {"num-steps": 1, "epsilon": "inf"}
    main(command(texts, tmp_path / "open", **flags))
    words = ["tokenizer", "--out", tmp_path / "x.json", "--from"]
    assert "has a guarantee" in refused([*words, tmp_path / "open"], capsys)
    run = shutil.copytree(place / "run", tmp_path / "killed")
    (run / "summary.json").unlink()
    assert "that has ended" in refused([*words, run], capsys)
    main(command(texts, tmp_path / "theirs", **{"num-steps": 1, "tokenizer": "bpe:300"}))
    said = refused([*words, tmp_path / "theirs"], capsys)
    assert "whose tokenizer was not trained on its users" in said
    said = refused([*words[:2], place / "new.json", "--from", place / "run"], capsys)
    assert "a new file ending in .json" in said
    with pytest.MonkeyPatch.context() as planted:  # before anything is sampled
        planted.setattr("fedsim.generate.Decoder", lambda *_, **__: 1 / 0)
        own = ["tokenizer", "--from", place / "run", "--out"]
        said = refused([*own, tmp_path / "none" / "x.json"], capsys)
        assert "x.json: expected a file in a directory that exists" in said
        for size in (299, 10**11):
            said = refused([*own, tmp_path / "x.json", "--vocab-size", size], capsys)
            assert f"vocab_size={size}: expected >= 300 and < 10,000,000" in said
        said = refused([*own, tmp_path / "x.json", "--seed", 10**20], capsys)
        assert f"seed={10**20}: expected a number of 64 bits" in said
    assert not (tmp_path / "x.json").exists()


@pytest.mark.privacy
def test_what_users_texts_trained_stays_marked_through_its_files(place, tmp_path, capsys):
    """Read from a data set, also one of an earlier version, from a run, or from an export."""
    own, flags = tmp_path / "own", {"num-steps": 1, "max-length": None}
    built(place, own, capsys, "bpe:300")
    old = shutil.copytree(own, tmp_path / "old")
    (old / "tokenizer.provenance.json").unlink()
    main(command(own, tmp_path / "run", **flags))
    run = shutil.copytree(tmp_path / "run", tmp_path / "old-run")
    (run / "tokenizer.provenance.json").unlink()
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "model")])
    for source in (own, own / "tokenizer.json", old, tmp_path / "run", run, tmp_path / "model"):
        assert Tokenizer.named(file_of(source)).trained_on_data, source
    again, _ = built(place, tmp_path / "again", capsys, old)
    assert tokenizer_from_users(again)
    assert again["tokenizer"]["origin"].startswith("texts of the users of old, tokenizer ")
    assert tokenizer_from_users(built(place, tmp_path / "third", capsys, tmp_path / "again")[0])
    words = [*command(tmp_path / "again", tmp_path / "strict", **flags), "--strict"]
    said = refused(words, capsys)
    assert "expected bytes, or a tokenizer of a protected model (`fedsim tokenizer --from`)" in said
    main(command(tmp_path / "again", tmp_path / "later", **flags))
    facts = json.loads((tmp_path / "later" / "config.json").read_text())["plan"]["non_private"]
    assert any("the tokenizer (trained on texts of the users of old, " in fact for fact in facts)
    words = ["tokenizer", "--out", tmp_path / "x.json", "--from", tmp_path / "later"]
    assert "whose tokenizer was not trained on its users" in refused(words, capsys)
