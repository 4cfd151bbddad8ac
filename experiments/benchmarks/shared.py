"""Texts with several owners at size: ten million texts of conversations, built and bounded.

    python -m experiments.benchmarks.shared [--quick] [--json]     (10 minutes; quick: 20 s)

A made-up source with a known graph is written: conversations of one to six people, the more popular
in more of them, with five texts each on average. It is built with the tokenizer `bytes`, checked
against the known graph, and bounded as ELS and ULS do before their first step. Memory is what the
processes hold themselves (RssAnon). --quick takes a hundredth of everything.

Beside it, at both scales: how many texts the greedy pool keeps of as many as any pool could, on two
smaller graphs of the same law. The most that any could keep is bounded by linear programming.
"""

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import optimize, sparse

from experiments.benchmarks.common import at_most, circumstances, parser_of, peak_mib
from experiments.benchmarks.data import build_store
from fedsim.data import Owners, UserStore
from fedsim.keys import SecretKey
from fedsim.sampling.shared import bounded_pool, greedy_pool, owners_groups
from fedsim.trust.evidence import most_entered, most_owned

TEXTS, USERS, PER_CONVERSATION, MAX_PEOPLE = 10_000_000, 1_000_000, 5, 6
GROUP_SIZE, MAX_CHANGED = 8, 2
ROWS_AT_ONCE = 500_000
GRAPHS = ((600, 300, 3_000), (20_000, 10_000, 100_000))  # conversations, users, texts
GROUP_SIZES = (1, 4, 16, 64)


def write_source(file: Path, num_texts: int, num_users: int, seed: int = 0) -> np.ndarray:
    """Writes the texts; returns how many each user owns, int64 [users]."""
    rng, owned, left = np.random.default_rng(seed), np.zeros(num_users, np.int64), num_texts
    schema = pa.schema({"people": pa.list_(pa.string()), "text": pa.string()})
    with pq.ParquetWriter(file, schema) as writer:
        while left:
            rows = min(left, ROWS_AT_ONCE)
            conversations = -(-rows // PER_CONVERSATION)
            sizes = np.minimum(rng.geometric(0.45, conversations), MAX_PEOPLE)
            popular = rng.random(sizes.sum()) ** 2.0  # of people by their numbers
            conversation = np.repeat(np.arange(conversations), sizes)
            pairs = np.unique(conversation * num_users + (popular * num_users).astype(np.int64))
            conversation, people = np.divmod(pairs, num_users)
            starts = np.searchsorted(conversation, np.arange(conversations + 1))
            of_text = rng.integers(0, conversations, rows)
            counts = (starts[1:] - starts[:-1])[of_text]
            ends = np.cumsum(counts)
            places = np.arange(ends[-1]) + np.repeat(starts[of_text] - ends + counts, counts)
            owned += np.bincount(people[places], minlength=num_users)
            names = pa.array(people[places]).cast(pa.string())
            offsets = pa.array(np.append(0, ends), pa.int32())
            texts = pa.array(np.arange(num_texts - left, num_texts - left + rows)).cast(pa.string())
            lists = pa.ListArray.from_arrays(offsets, names)
            writer.write_table(pa.table({"people": lists, "text": texts}, schema))
            left -= rows
    return owned


def bounded(store: UserStore) -> list[dict]:
    """What ELS and ULS draw before their first step, counted by other code."""
    owners, key, rows = store.owners, SecretKey.create(seed=0), []
    assert owners is not None, "of several owners"
    start = time.perf_counter()
    pool = bounded_pool(store.offsets, owners, GROUP_SIZE, key)
    seconds = time.perf_counter() - start
    most = most_owned(pool, store.offsets, owners)
    rows.append({"name": "pool of ELS", "seconds": seconds, "kept": len(pool), "most": most})
    start = time.perf_counter()
    groups = owners_groups(store.offsets, owners, MAX_CHANGED, key)
    seconds = time.perf_counter() - start
    most = most_entered(groups, store.offsets, owners)
    kept = len(groups.rows)
    rows.append({"name": "groups of ULS", "seconds": seconds, "kept": kept, "most": most})
    return rows


def graph(
    conversations: int, users: int, texts: int, rng: np.random.Generator
) -> tuple[np.ndarray, Owners]:
    """Offsets and owners of a graph by the law of `write_source`."""
    sizes = np.minimum(rng.geometric(0.45, conversations), MAX_PEOPLE)
    people = (rng.random(sizes.sum()) ** 2.0 * users).astype(np.int64)
    pairs = np.unique(np.repeat(np.arange(conversations), sizes) * users + people)
    conversation, people = np.divmod(pairs, users)
    starts = np.searchsorted(conversation, np.arange(conversations + 1))
    counts = np.bincount(rng.integers(0, conversations, texts), minlength=conversations)
    return np.append(0, np.cumsum(counts)), Owners(users, starts, people.astype(np.int32))


def most_kept(offsets: np.ndarray, owners: Owners, group_size: int) -> float:
    """More texts than this no pool can have: as many as one of fractions of texts."""
    shape = (owners.num_users, owners.num_sets)
    owned = sparse.csr_array((np.ones(len(owners.users)), (owners.users, owners.sets)), shape=shape)
    per_set = np.diff(offsets)
    found = optimize.linprog(
        -np.ones(owners.num_sets),
        A_ub=owned,
        b_ub=np.full(owners.num_users, group_size),
        bounds=np.stack([np.zeros(owners.num_sets), per_set], axis=1),
    )
    return -float(found.fun)


def greedy_against_most() -> list[dict]:
    """What the greedy pool keeps, of all texts and of the most that could be kept."""
    rng, rows = np.random.default_rng(0), []
    for conversations, users, texts in GRAPHS:
        offsets, owners = graph(conversations, users, texts, rng)
        for group_size in GROUP_SIZES:
            kept = len(greedy_pool(rng.permutation(texts), offsets, owners, group_size))
            most = most_kept(offsets, owners, group_size)
            shares = {"of_texts": kept / texts, "of_the_most": kept / most}
            rows.append({"name": f"greedy, {texts} texts, G = {group_size}", **shares})
    return rows


def main() -> None:
    arguments = parser_of(__doc__, "a hundredth of everything").parse_args()
    share = 100 if arguments.quick else 1
    with tempfile.TemporaryDirectory() as place:
        source, out = Path(place) / "source", Path(place) / "out"
        source.mkdir()
        start = time.perf_counter()
        owned = write_source(source / "texts.parquet", TEXTS // share, USERS // share)
        rows: list[dict] = [{"name": "write source", "seconds": time.perf_counter() - start}]
        rows.append(build_store(source, out, "--user-column", "people"))
        store = UserStore.open(out / "train")
        same = sorted(store.examples_per_user.tolist()) == sorted(owned[owned > 0].tolist())
        assert same, "every user owns as many texts as in the known graph"
        rows[1]["num_owner_sets"] = len(store.offsets) - 1
        rows += bounded(store)
        # Of this process, which wrote the source, too.
        rows[-1]["peak_memory_bytes"] = int(peak_mib() * 2**20)
    rows += greedy_against_most()
    bars = [
        at_most("texts of one user in the pool", rows[2]["most"], GROUP_SIZE),
        at_most("groups of others with one user's texts", rows[3]["most"], MAX_CHANGED),
        at_most("seconds of the build", rows[1]["seconds"], 900),
    ]
    for row in rows:
        print(row)
    if arguments.json:
        print(json.dumps({**circumstances("pyarrow", "numpy"), "rows": rows, "bars": bars}))


if __name__ == "__main__":
    main()
