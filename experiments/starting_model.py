"""What fine-tuning starts from at the scale `small`: made once, kept in the user's cache.

Section 5's order of things on one machine. Public text (Debian's package descriptions and news
articles) is screened against the users' text as C4 was, a WordPiece is learnt from it, a small
model is pre-trained on it, and the users' text is brought into the model's tokens. All of it is in
shared/data; every figure that trains at `small` starts here. At `paper` all of this is made by
`python -m experiments.data` and `experiments.pretraining` (README.md has the commands).

    python -m experiments.starting_model    (15 minutes on two cores, half of it the screening)
"""

import dataclasses
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from experiments.data import Screen, prepare, stand_ins
from experiments.harness import experiment
from experiments.pretraining import Settings, pretrain
from fedsim import files
from fedsim.config import run_config
from fedsim.run import Console

PUBLIC = ("debian_desc", "allsides_news")
SCREENED = ("scotus", "reddit_links")  # files with users' text
USERS = ("scotus", "reddit_links, 8 or more")  # data sets of it
VOCABULARY, MAX_LENGTH = 2_000, 64
MODEL = "tiny"
STEPS = Settings(num_steps=2_000, batch_size=64, rows_per_pass=16, warmup_steps=100)
LEARNING_RATE = 0.03


def directory() -> Path:
    """Where it is kept."""
    return files.cache_dir() / "experiments" / "start"


def write_public_text(file: Path) -> None:
    """The public texts as one Parquet file."""
    texts = [pq.read_table(stand_ins.shared(name), columns=["text"])["text"] for name in PUBLIC]
    joined = pa.chunked_array([chunk for text in texts for chunk in text.chunks])
    owners = pa.array([f"{i // 16:08d}" for i in range(len(joined))])  # whose plays no part
    pq.write_table(pa.table({"user_id": owners, "text": joined}), file)


def public() -> Path:
    """The screened public text, in tokens that were learnt from it."""
    path = directory() / "public"
    if not path.is_dir():
        directory().mkdir(parents=True, exist_ok=True)
        write_public_text(directory() / "public.parquet")
        against = tuple(str(stand_ins.shared(name)) + "#text" for name in SCREENED)
        options = {"max_length": MAX_LENGTH, "long_texts": "split", "screen": Screen(against)}
        tokenizer = f"wordpiece:{VOCABULARY}"
        prepare(
            directory() / "public.parquet",
            path,
            tokenizer=tokenizer,
            progress=Console().note,
            **options,
        )
    return path


def users(name: str) -> Path:
    """A stand-in for users' text, prepared by its recipe, in the model's tokens."""
    path = directory() / name
    if not path.is_dir():
        own = {"tokenizer": public() / "tokenizer.json", "tokenizer_is_public": True}
        stand_ins.prepare(name, directory(), max_length=MAX_LENGTH, **own)
    return path


def model(size: str = MODEL) -> Path:
    """The pre-trained model of a size: its directory."""
    path = directory() / f"pretrained-{size}"
    run = run_config(
        data=str(public()),
        run_dir=path,
        model=size,
        optimizer="adafactor",
        learning_rate=LEARNING_RATE,
        seed=0,
        checkpoint_every=100,
    )
    if not pretrain(STEPS, run, Console()):
        raise KeyboardInterrupt
    return path


@experiment.mistakes()
def main() -> None:
    print(f"public text: {public()}")
    for name in USERS:
        print(f"users' text: {users(name)}")
    print(f"model: {model()}")
    print(json.dumps(dataclasses.asdict(STEPS)))


if __name__ == "__main__":
    main()
