"""How much like users' texts a synthetic set is, and what a model learns from it.

Three looks, all with the texts of held-out users, each of whom counts once, however much they
wrote:

- a small model that is trained on the set, tested on held-out users' texts; beside it the run's
  model, and the small model trained on the users' texts without privacy;
- distances between the set and held-out users' texts, of the distributions of n-grams and lengths;
- the divergence curve of Pillutla et al. 2021 (MAUVE), with the hidden states of a model.

Whatever is computed from texts is `private`: without noise, not to be published. With an epsilon,
the loss of the small model that is trained on the set is released with noise, as
`evaluate --epsilon` does, and is `public`; so is the loss of the run's model if the run released
it. The other figures have no such release: n-grams and
clusters are thousands of counts, whose noise would hide them with the numbers of held-out users
there are; and the model that is trained without privacy tells of training users, whom noise for
held-out users does not protect.
"""

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.cluster.vq import kmeans2
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr

from fedsim import engine
from fedsim.config import RunConfig
from fedsim.data import Dataset, Tokenizer, UserStore
from fedsim.errors import ConfigError, expect, expect_count
from fedsim.evaluate import last_model
from fedsim.files import read_json, write_json
from fedsim.keys import SecretKey
from fedsim.models import LanguageModelTask, Pretrained, Transformer, preset
from fedsim.plan import rows_of_users
from fedsim.run import Console, StoredRun, directory, find_model, model_name
from fedsim.synthesis.leaks import runs_of
from fedsim.synthesis.rows import store_of
from fedsim.training import Batches, PrivateEvaluation, optimizers, release_loss

GRAMS = (1, 2, 3)
GRAM_BINS, LENGTH_BINS = 2**16, 32
CURVE_POINTS = 25
SCALE = 5.0
"""c of Pillutla et al. 2021: the larger, the smaller all similarities."""
TEXTS_OF_CLUSTER = 10
MOST_TEXTS = 2_000
"""Texts whose features are compared, of each kind."""
FEATURE_TOKENS, ROWS_AT_ONCE = 128, 16
MOST_USERS, TEXTS_OF_USER = 256, 4
"""Held-out users whose loss is computed without noise, and texts of each."""
VARIANCE = 0.9  # of the features, that is kept
SPLIT = "eval_users"
HELD_OUT = "computed from texts of held-out users without noise: do not publish"
TRAINED = "trained on training users' texts without privacy: do not publish"


@dataclasses.dataclass(frozen=True)
class Student:
    """The small model that is trained on synthetic texts, to be tested on users' texts."""

    student: str = "tiny"
    """Size of the small model: micro, tiny, small, ..."""
    student_steps: int = 200
    """Steps of its training. >= 1."""
    student_batch_size: int = 32
    """Texts of a step. >= 1."""
    student_learning_rate: float = 3e-3
    """Peak of the learning rate of Adam, which falls to zero as a cosine. > 0."""
    student_max_length: int = 128
    """Tokens of a text that it is trained and tested on, its first ones. >= 2."""

    def __post_init__(self) -> None:
        expect_count("student_steps", self.student_steps, 1)
        expect_count("student_batch_size", self.student_batch_size, 1)
        expect_count("student_max_length", self.student_max_length, 2)
        rate = self.student_learning_rate
        expect("student_learning_rate", rate, rate > 0, "> 0")


def measure(
    stored: StoredRun,
    run: RunConfig,
    rows: Iterable[Mapping[str, Any]],
    *,
    student: Student | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    seed: int = 0,
    console: Console | None = None,
    kept: Path | None = None,
) -> dict[str, Any]:
    """Measure a synthetic set that was sampled from a run's model.

    Args:
      stored: the run.
      run: its settings, with its limit.
      rows: the set; see `rows`.
      student: the small model.
      epsilon: release the loss of the small model with noise, at this cost for each held-out user,
        which the ledger of the data counts.
      delta: of this epsilon.
      seed: of the small model, and of draws of texts.
      console: receives messages.
      kept: file with the loss that was released; it is made, and used again, so that what is
        interrupted later does not pay twice.

    Returns:
      {"public": figures with noise, or {}, "private": figures without}.

    Raises:
      ConfigError: there are no held-out users, or a limit would be broken.
    """
    engine.remember_programs()
    console, student = console or Console(), student or Student()
    rows = list(rows)
    task, params, data, _ = last_model(stored, run, console)
    held_out = data.eval_users
    expect("data", run.data.source, held_out is not None, "data with held-out users")
    assert held_out is not None
    synthetic = store_of(rows, data)
    public: dict[str, Any] = {}
    summary = directory.summary_of(run.run_dir) or {}
    if stored.plan is not None and stored.plan.evaluations is not None:
        public["run"] = {"loss": summary.get("final_eval_loss")}
    learnt = train_student(synthetic, data, student, seed)
    if epsilon is not None:
        about = {"trained_on": "synthetic texts", "model": student.student}
        if kept is None or not kept.exists():
            how = PrivateEvaluation(epsilon, delta)
            public["student"] = release_loss(*learnt, data, run, how, about)
            if kept is not None:
                write_json(kept, public["student"])
        else:
            public["student"] = read_json(kept)
            paid = public["student"]["epsilon"]
            expect("eval_epsilon", epsilon, epsilon == paid, f"{paid:g}, which is paid already")
    losses = {
        "untrained": loss_of(learnt[0], learnt[0].init(_init_key(seed))),
        "synthetic": loss_of(*learnt),
        "real_without_privacy": loss_of(*train_student(data.train, data, student, seed)),
        "run": loss_of(task, params, student.student_max_length),
    }
    source = run.model.source
    base = find_model(source) or find_model(str(run.run_dir))
    assert base is not None, "a run has a model"
    real = texts_of(held_out, data, seed)
    curve = curve_of_texts(base, texts_of(synthetic, data, seed), real, seed)
    private = {
        "student": {**dataclasses.asdict(student), "loss_unit": data.loss_unit, "losses": losses},
        "distances": distances(synthetic, held_out, seed),
        "curve": curve and {"features": model_name(source), **curve},
        "non_private": [HELD_OUT, f"loss real_without_privacy: {TRAINED}"],
    }
    return {"public": public, "private": private}


def _init_key(seed: int) -> jax.Array:
    return SecretKey.create(seed, "student").jax_key("init")


def train_student(
    store: UserStore, data: Dataset, how: Student, seed: int = 0
) -> tuple[LanguageModelTask, Any]:
    """Train a small model on the texts of a store; returns its task and parameters.

    Args:
      store: texts in the data's tokens.
      data: with the held-out users that the task can be tested on.
      seed: of the parameters and of the order of texts.
    """
    shape = store.vocab_size, min(how.student_max_length, data.train.max_length)
    texts = dataclasses.replace(data, train=store)
    task = LanguageModelTask(texts, preset(how.student, *shape))
    params, size = task.init(_init_key(seed)), min(how.student_batch_size, store.num_examples)
    batches = Batches(store.lengths, size, size, SecretKey.create(seed, "student"))
    rule = optax.adam(optax.cosine_decay_schedule(how.student_learning_rate, how.student_steps))
    update, state = optimizers.updater(rule), rule.init(params)
    gradient = jax.jit(jax.grad(lambda params, batch: task.losses(params, batch).mean()))
    buckets = task.buckets
    for step in range(how.student_steps):
        batch = task.read("train", batches.draw(step).ravel())
        batch = buckets.trim(batch, int(buckets.holding(buckets.sizes(batch).max())))
        params, state = update(gradient(params, batch), state, params)
    return task, params


def loss_of(task: LanguageModelTask, params: Any, most_tokens: int | None = None) -> float:
    """Mean over some held-out users of the loss on some of their texts, without noise.

    Args:
      most_tokens: of a text, its first ones. Default: as many as the task reads.

    Returns:
      Nats per token. The users and texts are always the same.
    """
    config = task.config
    if most_tokens and most_tokens < config.max_length:
        config = dataclasses.replace(config, max_length=most_tokens, num_positions=config.table)
        task = LanguageModelTask(task.dataset, config, task.frozen)
    offsets = getattr(task.dataset, SPLIT).offsets
    texts = rows_of_users(offsets, min(MOST_USERS, len(offsets) - 1), TEXTS_OF_USER)
    rows = np.concatenate(texts)
    needed, frozen = task.buckets.holding(task.sizes(SPLIT, rows)), task.frozen
    compute = jax.jit(task.nats)
    nats, tokens = np.zeros((2, len(rows)))
    for length in np.unique(needed):
        places = np.flatnonzero(needed == length)
        for part in np.split(places, range(ROWS_AT_ONCE, len(places), ROWS_AT_ONCE)):
            padded = np.pad(rows[part], (0, ROWS_AT_ONCE - len(part)), constant_values=-1)
            batch = task.buckets.trim(task.read(SPLIT, padded), int(length))
            found = compute(params, batch, *(() if frozen is None else (frozen,)))
            nats[part], tokens[part] = (np.asarray(each)[: len(part)] for each in found)
    ends = np.cumsum([len(each) for each in texts])[:-1]
    sums = [[part.sum() for part in np.split(each, ends)] for each in (nats, tokens)]
    return float(np.mean(np.divide(sums[0], np.maximum(sums[1], 1))))


def user_weights(store: UserStore) -> np.ndarray:
    """Weight of each text, float64 [texts]: users weigh the same, and so do the texts of a user."""
    counts = np.diff(store.offsets)
    weights = np.repeat(1 / np.maximum(counts, 1), counts)
    return weights / max(1, np.count_nonzero(counts))


def grams(store: UserStore, rows: np.ndarray, weights: np.ndarray, length: int) -> np.ndarray:
    """Distribution of hashed n-grams, float64 [GRAM_BINS]; a text adds its weight.

    Args:
      rows: of the store.
      weights: [rows].
      length: tokens of an n-gram.
    """
    total, block = np.zeros(GRAM_BINS), max(1, 2**20 // store.max_length)
    for start in range(0, len(rows), block):
        part = slice(start, start + block)
        hashes, row = runs_of(*store.gather(rows[part], store.max_length), length)
        share = weights[part] / np.maximum(1, np.bincount(row, minlength=len(rows[part])))
        # The upper bits, because each bit of a hash depends on those below it.
        bins = (hashes * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(48)
        total += np.bincount(bins.astype(np.int64), share[row], GRAM_BINS)
    return total / max(total.sum(), 1e-300)


def lengths(store: UserStore, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Distribution of the numbers of tokens of texts, float64 [LENGTH_BINS]."""
    bins = store.sizes(rows) * LENGTH_BINS // (store.max_length + 1)
    total = np.bincount(bins, weights, LENGTH_BINS)
    return total / max(total.sum(), 1e-300)


def total_variation(p: np.ndarray, q: np.ndarray) -> float:
    """Half of the sum of absolute differences of two distributions, in [0, 1]."""
    return float(np.abs(p - q).sum() / 2)


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> float:
    """The Jensen-Shannon divergence of two distributions in bits, in [0, 1]."""
    return float(np.nan_to_num(jensenshannon(p, q, 2)) ** 2)


def distances(synthetic: UserStore, held_out: UserStore, seed: int = 0) -> dict[str, Any]:
    """Distances of a synthetic set from one half of the held-out users.

    Beside each is the distance of the other half, from as many texts: two samples of one
    distribution differ, too, the more so the fewer texts there are.

    Returns:
      By name of the distribution: total_variation, jensen_shannon, and those of the other half.

    Raises:
      ConfigError: there are fewer than two held-out users with texts.
    """
    rng = np.random.default_rng(seed)
    counts = np.diff(held_out.offsets)
    users = rng.permutation(np.flatnonzero(counts))
    expect("held-out users", len(users), len(users) >= 2, ">= 2, with texts")
    owner = np.repeat(np.arange(len(counts)), counts)
    is_first = np.isin(owner, users[: len(users) // 2])
    weights = user_weights(held_out)
    halves = [np.flatnonzero(each) for each in (is_first, ~is_first)]
    number = min(len(halves[1]), synthetic.num_examples)
    halves[1] = np.sort(rng.choice(halves[1], number, replace=False))
    drawn = np.sort(rng.choice(synthetic.num_examples, number, replace=False))
    sides = [(held_out, half, weights[half]) for half in halves]
    sides.append((synthetic, drawn, np.full(number, 1 / number)))
    ways = {f"{n}-grams": functools.partial(grams, length=n) for n in GRAMS}
    found = {}
    for name, way in {**ways, "lengths": lengths}.items():
        half, other, drawn_texts = (way(*side) for side in sides)
        found[name] = {
            "total_variation": total_variation(drawn_texts, half),
            "total_variation_of_users": total_variation(other, half),
            "jensen_shannon": jensen_shannon(drawn_texts, half),
            "jensen_shannon_of_users": jensen_shannon(other, half),
        }
    return found


def texts_of(store: UserStore, data: Dataset, seed: int = 0) -> list[str]:
    """One text of each user, of MOST_TEXTS users at most, without special tokens."""
    assert data.tokenizer_path is not None, "store_of() comes first"
    rng, tokenizer = np.random.default_rng(seed), Tokenizer.load(data.tokenizer_path)
    there = np.flatnonzero(np.diff(store.offsets))
    users = there if len(there) <= MOST_TEXTS else rng.choice(there, MOST_TEXTS, replace=False)
    rows = rng.integers(store.offsets[users], store.offsets[users + 1])
    tokens, sizes = store.gather(rows, store.max_length)
    return [tokenizer.decode(row[:size]) for row, size in zip(tokens, sizes, strict=True)]


def curve_of_texts(
    model: Pretrained, texts: list[str], real: list[str], seed: int = 0
) -> dict[str, Any] | None:
    """The divergence curve of synthetic texts and as many real ones, by features of a model.

    Returns:
      As `divergence_curve`, with the number of `texts` of each kind, and `area_of_users`: the area
      of one half of the real texts against the other. None with too few texts for two clusters.
    """
    number = min(len(texts), len(real), MOST_TEXTS)
    if number < 2 * TEXTS_OF_CLUSTER:
        return None
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(len(each), number, replace=False).tolist() for each in (texts, real)]
    vectors = (
        features(model, [texts[i] for i in drawn[0]]),
        features(model, [real[i] for i in drawn[1]]),
    )
    half = number // 2
    of_users = divergence_curve(vectors[1][:half], vectors[1][half : 2 * half], seed)
    return {
        **divergence_curve(vectors[0], vectors[1], seed),
        "area_of_users": of_users["area"],
        "texts": number,
    }


def features(model: Pretrained, texts: Sequence[str]) -> np.ndarray:
    """Mean hidden state of each text before the model's head, float32 [texts, width].

    Raises:
      ConfigError: the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ConfigError.of("model", "the model of features", "a model with a tokenizer")
    tokenizer = Tokenizer.load(model.tokenizer)
    longest = min(FEATURE_TOKENS, model.config.table)
    config = dataclasses.replace(model.config, max_length=longest, num_positions=model.config.table)
    params = jax.device_put(model.params)
    compute = jax.jit(functools.partial(_mean_states, Transformer(config)))
    rows = [[tokenizer.begin_id, *ids][:longest] for ids in tokenizer.encode_batch(texts)]
    found = np.zeros((len(rows), config.width), np.float32)
    order = np.argsort([len(row) for row in rows], kind="stable")
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = order[start : start + ROWS_AT_ONCE]
        length = min(longest, max(16, 1 << (len(rows[part[-1]]) - 1).bit_length()))
        tokens, sizes = np.zeros((ROWS_AT_ONCE, length), np.int32), np.ones(ROWS_AT_ONCE, np.int32)
        for i, row in enumerate(part):
            tokens[i, : len(rows[row])], sizes[i] = rows[row], len(rows[row])
        found[part] = np.asarray(compute(params, tokens, sizes))[: len(part)]
    return found


def _mean_states(transformer: Transformer, params: Any, tokens: Any, sizes: Any) -> jax.Array:
    states = transformer.apply({"params": params}, tokens, head=False)
    assert isinstance(states, jax.Array)
    real = (jnp.arange(tokens.shape[1])[None, :] < sizes[:, None])[:, :, None]
    total = jnp.where(real, states.astype(jnp.float32), 0).sum(axis=1)
    return total / sizes[:, None].astype(jnp.float32)


def divergence_curve(one: np.ndarray, other: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """The divergence curve of two sets of vectors, and the area below it (Pillutla et al. 2021).

    The vectors are normalised, projected on the directions that hold VARIANCE of their variance,
    and put into clusters by k-means. P and Q are the distributions over clusters, and R their
    mixtures; the curve has the points (exp(-c KL(Q, R)), exp(-c KL(P, R))).

    Args:
      one: float [texts, width], the set.
      other: float [texts, width], the texts that it should be like.

    Returns:
      `area` in (0, 1], 1 for equal distributions, and the points `x` and `y` of the curve.
    """
    both = np.concatenate([one, other]).astype(np.float64)
    both /= np.maximum(np.linalg.norm(both, axis=1, keepdims=True), 1e-12)
    both -= both.mean(axis=0)
    left, sizes, _ = np.linalg.svd(both, full_matrices=False)
    held = np.cumsum(sizes**2) / max(float((sizes**2).sum()), 1e-300)
    kept = int(np.searchsorted(held, VARIANCE)) + 1
    count = max(2, min(len(one), len(other)) // TEXTS_OF_CLUSTER)
    points = left[:, :kept] * sizes[:kept]
    first = points[np.random.default_rng(seed).choice(len(points), count, replace=False)]
    with warnings.catch_warnings():  # a cluster may become empty, and then counts nothing
        warnings.simplefilter("ignore", UserWarning)
        _, cluster = kmeans2(points, first, minit="matrix")
    p, q = (
        np.bincount(part, minlength=count) / len(part)
        for part in (cluster[: len(one)], cluster[len(one) :])
    )
    curve = [(0.0, 1.0)]
    for share in np.linspace(0, 1, CURVE_POINTS + 2)[1:-1]:
        mixed = share * p + (1 - share) * q
        curve.append(tuple(np.exp(-SCALE * rel_entr(each, mixed).sum()) for each in (q, p)))
    x, y = np.array(sorted([*curve, (1.0, 0.0)]), np.float64).T
    return {"area": float(np.trapezoid(y, x)), "x": x.tolist(), "y": y.tolist()}
