"""Blocks of texts, drawn on workers or in this process, and kept until the data set is whole.

A block is decoded by one worker from its own prompts alone, so that its texts do not depend on the
number of workers, nor on whether the command was interrupted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim.config import EngineConfig, Sampling
from fedsim.errors import FedsimError
from fedsim.files import cache_dir, write_atomically
from fedsim.models import Decoder, Prompt, TransformerConfig, key_of, lengths_up_to

BATCHES = 4
"""Most texts of a block, in batches: slots are idle only at its end."""
BLOCKS = 8
"""Blocks of a small data set, if each has a batch: work for several workers, and progress."""


def block_sizes(count: int, batch_size: int) -> list[int]:
    """Sizes of the blocks of `count` texts, as equal as can be."""
    blocks = max(-(-count // (BATCHES * batch_size)), min(BLOCKS, -(-count // batch_size)))
    return [count // blocks + (i < count % blocks) for i in range(blocks)]


class Job(NamedTuple):
    """A block of texts to draw. Equal jobs give equal texts on machines of one kind."""

    config: TransformerConfig
    how: Sampling
    ends: frozenset[int]
    seed: int
    stage: int
    """Which message of a chat, as draws of one stage must not be those of another."""
    prompts: Sequence[Prompt]
    slots: int
    """Texts at a time."""


def draw_block(job: Job, params: Any) -> list[list[int]]:
    """Draw the tokens of all texts of a block, in the order of its prompts."""
    decoder = Decoder(job.config, params, job.how, job.ends)
    key = jax.random.fold_in(key_of(job.seed), job.stage)
    most = max((len(prompt.ids) + prompt.most for prompt in job.prompts), default=1)
    length = next(n for n in lengths_up_to(job.config.table) if n >= most)
    texts = dict(decoder.texts(job.prompts, key, slots=job.slots, length=length))
    return [texts[i] for i in range(len(job.prompts))]


class Workers:
    """Where blocks are drawn: worker processes of Ray, or this one."""

    def __init__(self, config: EngineConfig, params: Any):
        """Start. Raises: ConfigError: the cluster cannot be reached, or has no room."""
        self._params, self._side = params, None
        if config.kind == "ray":
            from fedsim.engine import ParallelRuns

            self._side = ParallelRuns(
                at_once=config.num_workers,
                threads=config.threads_per_worker,
                devices=config.devices_per_worker,
                accelerator=config.accelerator,
                wait_s=config.wait_for_workers,
                cache_dir=cache_dir() / "compiled",
            )
            self._params = jax.tree.map(np.asarray, params)

    def describe(self) -> str:
        """The number of workers, for people."""
        if self._side is None:
            return "in this process"
        count = self._side.placement.num_workers
        return "on 1 worker" if count == 1 else f"on {count} workers"

    def draw(self, jobs: Mapping[Any, Job]) -> Iterator[tuple[Any, list[list[int]]]]:
        """Yield (name of a job, tokens of its texts) as jobs end. Raises: EngineError."""
        names = list(jobs)
        if self._side is None:
            for name in names:
                yield name, draw_block(jobs[name], self._params)
            return
        for index, result in self._side.run(draw_block, [*jobs.values()], self._params):
            if isinstance(result, FedsimError):
                raise result
            yield names[index], result

    def close(self) -> None:
        """End the worker processes."""
        if self._side is not None:
            self._side.close()


class Parts:
    """Files of the blocks that are drawn, in a directory beside the data set."""

    def __init__(self, directory: Path):
        self.directory = directory

    def load(self, block: int, stage: int) -> list[list[int]] | None:
        """Tokens of a block's texts; None if they are not there yet."""
        path = self._path(block, stage)
        return json.loads(path.read_bytes()) if path.is_file() else None

    def save(self, block: int, stage: int, tokens: list[list[int]]) -> None:
        """Keep a block, whole or not at all."""
        write_atomically(self._path(block, stage), json.dumps(tokens).encode(), mode=0o600)

    def _path(self, block: int, stage: int) -> Path:
        return self.directory / f"{block:06}-{stage}.json"
