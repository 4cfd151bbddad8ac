"""How frequent each label is among the training users, released once with noise.

Every user counts once: a user's vote is split over the labels in proportion to the user's texts, in
UNITS whole parts. Removing all texts of a user therefore changes the counts by UNITS parts in all,
and discrete Laplace noise makes them epsilon-DP without any slack. The labels themselves are
public. Compared with one label drawn for each user, the noise is the same and the draw adds none.

The noise is a function of the run's key and of epsilon, the data are those of the run, and the
budget ledger counts the release before it is written. So a release that a crash cut off is repeated
with the same noise, and another epsilon is refused.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.accounting import Event, PureEvent, StepEvent, epsilon as epsilon_of, epsilon_with
from fedsim.budget import Applicant, Limit, admitted, ledger_after
from fedsim.config import ZERO_OUT
from fedsim.data import Tokenizer, UserStore, label_prompts, labels_of
from fedsim.errors import ConfigError, FileDamaged, expect
from fedsim.files import make_directory, read_json, write_json
from fedsim.keys import SecretKey
from fedsim.noise import discrete_laplace
from fedsim.plan import ADJACENCY, REPRODUCTION, claimed_phases
from fedsim.run import Console, StoredRun, directory, find_model, ledger, load_data
from fedsim.sampling import graph_of

HISTOGRAM, RECEIPTS = "labels.json", "labels"
"""The released histogram in the run's directory, and the folder with its receipt, which is also the
kind of the release in the budget ledger."""
UNITS = 2**10
"""Parts of a user's vote."""
USERS_AT_ONCE = 2**14


@dataclasses.dataclass(frozen=True)
class LabelHistogram:
    """Noisy numbers of training users by label. Public, once it is released."""

    labels: tuple[str, ...]
    counts: tuple[float, ...]
    """Users of each label, multiples of 1 / UNITS; noise may make them negative."""
    epsilon: float
    """Cost for every training user."""

    @property
    def weights(self) -> tuple[float, ...]:
        """Share of each label, in [0, 1]; equal shares if noise left no count above 0."""
        positive = np.maximum(self.counts, 0.0)
        if not positive.any():
            positive = np.ones(len(positive))
        return tuple((positive / positive.sum()).tolist())

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of labels.json."""
        about = {"adjacency": ADJACENCY[ZERO_OUT], "receipt": f"{RECEIPTS}/{directory.RECEIPT}"}
        return {**dataclasses.asdict(self), "weights": list(self.weights), **about}


def stored_histogram(run_dir: Path) -> LabelHistogram | None:
    """The histogram that a run has released; None if there is none yet.

    Raises: FileDamaged: the file is malformed.
    """
    path = run_dir / HISTOGRAM
    if not path.exists():
        return None
    record = read_json(path)
    try:
        counts = tuple(float(count) for count in record["counts"])
        found = LabelHistogram(tuple(record["labels"]), counts, float(record["epsilon"]))
        as_written = {**record, "labels": found.labels, "counts": found.counts}
        if len(found.labels) == len(counts) and found.as_dict() == as_written:
            return found
    except (KeyError, TypeError, ValueError):
        pass
    raise FileDamaged(f"{path}: expected labels, their counts and weights, and an epsilon")


def release_histogram(
    run_dir: Path,
    epsilon: float,
    *,
    limit_epsilon: float | None = None,
    budget_ledger: Path | None = None,
    console: Console | None = None,
) -> LabelHistogram:
    """Release the histogram of a run's labels, and keep it in the run's directory.

    Guarantees: epsilon-DP for each training user (zero-out), counted in the budget ledger before
      the result is written. A second call returns the stored histogram and draws nothing.
    Args:
      epsilon: cost for every training user.
      limit_epsilon: refuse the release if all releases of these users' texts could cost one of them
        more than this. Default: the limits in the ledger.
      budget_ledger: directory of the ledger. Default: the one that counts the run.
      console: shows the progress.
    Raises:
      ConfigError: the data of the run have no labels, or texts with several owners, or are others
        now; the histogram was released with another epsilon; or a limit would be broken.
      LedgerError: the ledger has this release with another epsilon.
    """
    stored = directory.load(run_dir)
    if not stored.labels or stored.plan is None:
        with_labels = "a run of train on data with labels; `fedsim data build --condition-on`"
        raise ConfigError.of("run", run_dir, with_labels)
    console = Console() if console is None else console
    with directory.lock(run_dir):
        if (released := stored_histogram(run_dir)) is not None:
            same = released.epsilon == epsilon
            once = f"{released.epsilon:g}: the histogram of labels was released, once and for all"
            expect("epsilon", f"{epsilon:g}", same, once)
            return released
        store, key = _data_of(stored, console), SecretKey.load(run_dir)
        tokenizer = Tokenizer.load(run_dir / directory.TOKENIZER)
        histogram = draw_histogram(store, stored.labels, tokenizer, key, epsilon)
        delta = stored.plan.delta
        limit = None if limit_epsilon is None else Limit(limit_epsilon, delta)
        place = ledger_after(stored.run, budget_ledger)
        receipts = run_dir / RECEIPTS
        applicant = Applicant(place, store.user_ids(), RECEIPTS, limit, receipts, delta)
        events: list[tuple[Event, int]] = [(PureEvent(epsilon), 1)]
        label = REPRODUCTION if stored.plan.seeded else ""
        entry = applicant.entry(key.seal(RECEIPTS), events, (0.0, 0.0), label)
        applicant.expect_room(entry)
        make_directory(receipts, 0o700)
        with admitted(applicant, entry, lambda: events if (run_dir / HISTOGRAM).exists() else []):
            write_json(run_dir / HISTOGRAM, histogram.as_dict())
    return histogram


def _data_of(stored: StoredRun, console: Console) -> UserStore:
    """The training users of a run. Raises: ConfigError: they are others, or share texts."""
    run = stored.run
    store = load_data(run.data, find_model(run.model.source, console), console.note).train
    seal = SecretKey.load(run.run_dir).seal(store.fingerprint)
    same = seal == stored.identity.data_seal
    expect("data", run.data.source, same, "the data of the run")
    # Whose vote a shared text is would depend on who else owns it.
    expect("data", run.data.source, graph_of(store) is None, "texts with one owner each")
    return store


def draw_histogram(
    store: UserStore,
    labels: Mapping[str, Any],
    tokenizer: Tokenizer,
    key: SecretKey,
    epsilon: float,
) -> LabelHistogram:
    """Draw the histogram of some users: the same one for the same key and epsilon.

    Guarantees: epsilon-DP for each user, once; the result is not to be shown before it is counted.
    Args:
      labels: `StoredRun.labels`.
      tokenizer: of the data.
      key: the run's own.
    """
    prompts = label_prompts(labels, tokenizer)
    exact = label_shares(store, [*prompts.values()])
    # A generator for each noise: two of one stream, of other scales, would subtract to the counts.
    rng = key.generator(f"histogram of labels, {float(epsilon)!r}")
    noisy = exact + discrete_laplace(len(exact), UNITS, epsilon, rng)
    return LabelHistogram(tuple(prompts), tuple((noisy / UNITS).tolist()), epsilon)


def label_shares(store: UserStore, prompts: list[list[int]]) -> np.ndarray:
    """Sum of the users' votes for each label, in UNITS parts of a user, int64 [labels].

    Guarantees: a user's parts depend on that user's texts alone, and add up to UNITS, or to 0 for a
      user without texts. A label gets the whole part of its share, and those with the largest
      remainders the rest.
    Args:
      prompts: of `label_prompts`, in the order of the labels.
    """
    number, total = labels_of(store, prompts), np.zeros(len(prompts), np.int64)
    for low in range(0, store.num_users, USERS_AT_ONCE):
        offsets = store.offsets[low : low + USERS_AT_ONCE + 1]
        user = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        cells = user * len(prompts) + number[offsets[0] : offsets[-1]]
        counts = np.bincount(cells, minlength=(len(offsets) - 1) * len(prompts))
        counts = counts.reshape(-1, len(prompts))
        texts = np.maximum(counts.sum(1, keepdims=True), 1)
        parts, remainders = np.divmod(counts * UNITS, texts)
        left = np.where(counts.any(1), UNITS - parts.sum(1), 0)
        rank = np.argsort(np.argsort(-remainders, axis=1, kind="stable"), axis=1)
        total += (parts + (rank < left[:, None])).sum(0)
    return total


def total_epsilon(run_dir: Path, histogram: LabelHistogram | None = None) -> float:
    """Epsilon of a run and of its histogram of labels together, at the run's delta.

    Args:
      histogram: None: the model alone, as its report claims.
    Returns: inf without noise. If the plan has a label, it is no guarantee.
    """
    plan = directory.load(run_dir).plan
    expect("run", run_dir, plan is not None, "a run of train")
    assert plan is not None, "expected above"
    phases = claimed_phases(plan, ledger.phases(ledger.read(run_dir)))
    if phases is None:
        return np.inf
    steps = sum(count for event, count in phases if isinstance(event, StepEvent))
    slack = plan.slack_after(steps)
    if histogram is None:
        return epsilon_of(phases, plan.delta - slack.delta) + slack.epsilon
    # The slack was found for the epsilon of the training, and counts more at a larger one.
    return epsilon_with([slack], [*phases, (PureEvent(histogram.epsilon), 1)], plan.delta)
