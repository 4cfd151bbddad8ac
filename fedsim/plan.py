"""The public constants of a run: fixed before its first step, never recomputed from a draw.

What the user left out is filled in here. Where that looks at the data without protection, as the
paper does, it is named in `Plan.non_private`.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsim import accounting
from fedsim.accounting import Event, StepEvent, allocated_event, cyclic_event
from fedsim.accounting.pure_dp import PureEvent
from fedsim.clipping import Clip
from fedsim.clipping.adaptive import AdaptiveClip
from fedsim.clipping.clip import lattice_bits
from fedsim.config import ADD_OR_REMOVE, ZERO_OUT, Algorithm, PrivacyConfig, to_json
from fedsim.config.cells import (
    ALLOCATION,
    COMPARISON_ONLY,
    CORRELATED,
    INDEPENDENT,
    ONLY_USERS,
    POISSON,
    sampling_of,
)
from fedsim.data.dataset import Dataset
from fedsim.els import ELS
from fedsim.errors import expect
from fedsim.group_size import median_group_size, private_median
from fedsim.keys import SecretKey
from fedsim.noise import CELL_ERROR, AddNoise, Correlated, Slack, add_gaussian, slack
from fedsim.noise.bands import Prediction, best, predicted_error, predictions
from fedsim.noise.correlated import Strategy, strategy
from fedsim.sampling import Sampling, Users, examples_per_user, graph_of
from fedsim.shared_uls import SharedULS
from fedsim.uls import ULS

SOME = ("planted", "shared", "bands", "noise", "participations", "trial")
"""Fields of a plan that are written down where they are not at their defaults."""
SHARED = "shared"
METHODS = {Algorithm.ELS: ELS, Algorithm.ULS: ULS}
ADJACENCY = {
    ZERO_OUT: "zero out one user's texts, the number of users being public",
    ADD_OR_REMOVE: "add or remove one user",
    SHARED: "zero out all texts that one user owns, alone or with others, who owns which being "
    "public and fixed",
}
REPRODUCTION = "of a seed that others may know or guess: a reproduction, not a guarantee"
TRIAL = "of one trial of a private selection, which costs more: not a guarantee"
UNPROVEN = "with a strategy whose bound on contributions is not proven: not a guarantee"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run will do, and what it will be able to claim."""

    algorithm: Algorithm
    num_users: int
    num_examples: int
    num_units: int
    """Sampling units: the |D_sub| examples of the pool for ELS, the users for ULS."""
    num_steps: int
    budget: int
    group_size: int
    expected_count: int
    """B (examples) for ELS, M (users) for ULS."""
    sampling_prob: float
    sampling_run: str
    sampling_accounted: str
    clip_norm: float
    clipping: str
    target_epsilon: float
    delta: float
    noise_multiplier: float
    num_parameters: int
    data_seal: str
    """Keyed digest of the data's fingerprint: says to the key's owner whether data are the same."""
    non_private: tuple[str, ...]
    """What the guarantee does not cover: read off the data, or known to others."""
    group_size_epsilon: float | None = None
    """What choosing the group size privately cost; part of target_epsilon."""
    clip_quantile: float | None = None
    """What clip_norm, the first step's, is moved towards; None: it stays."""
    assumed_population: int | None = None
    """How many users are accounted for; None: those there are."""
    adjacency: str = ADD_OR_REMOVE
    """zero-out or add-or-remove."""
    seeded: bool = False
    """Whether the key came from a seed: such a run reproduces another one, and claims nothing."""
    unproven: str | None = None
    """The strategy, where it was asked for by name and its contributions are not proven to be at
    most C."""
    bands: int = 1
    """b: groups of users that steps draw from in turn, and steps that noise reaches."""
    participations: int | None = None
    """K of random allocation: steps that each user takes part in."""
    noise: str = INDEPENDENT
    """independent or correlated."""
    predicted_error: float = math.nan
    """Root mean square, over the steps, of the noise on the sum of all gradients so far, in units
    of the sensitivity; see `noise.bands`."""
    shared: dict[str, Any] | None = None
    """Where texts have several owners: owner sets, texts with several owners, texts that the bounds
    kept and left out, k (max_changed), and a seal of what they kept. None: each has one."""
    trial: bool = False
    """Whether the run is a trial of a private selection, which is what is counted and released."""
    planted: dict[str, int] | None = None
    """How many canaries of each kind an audit tossed coins for. The run of an audit is none to
    release. None: it is no audit."""

    @property
    def clip(self) -> Clip:
        """The clip function of the first step, with its sensitivity."""
        return self.clip_at(self.clip_norm)

    def clip_at(self, clip_norm: float) -> Clip:
        """The clip function with another norm."""
        return Clip(clip_norm, self.clipping == "normalised", in_float32=not self.noise_multiplier)

    @property
    def adaptive(self) -> AdaptiveClip | None:
        """How the clip norm moves, or None if it stays."""
        if self.clip_quantile is None:
            return None
        return AdaptiveClip(self.clip_quantile, self.expected_count, self.noise_multiplier)

    @property
    def gradient_noise_multiplier(self) -> float:
        """The multiplier of the noise on the gradient: noise_multiplier, or more where a step
        releases the count of units within the clip norm, too."""
        adaptive = self.adaptive
        return adaptive.gradient_noise_multiplier if adaptive else self.noise_multiplier

    @property
    def before(self) -> list[tuple[PureEvent, int]]:
        """What is released before the first step, to the accountant."""
        return _before(self.group_size_epsilon)

    @property
    def accounted_prob(self) -> float:
        """p or q as it is accounted: below sampling_prob with an assumed population."""
        return self.sampling_prob * _assumed_share(self.assumed_population, self.num_users)

    @property
    def bands_given(self) -> int | None:
        """The bands as a setting: None where there can be none."""
        return self.bands if self.bands > 1 else None

    def event(self) -> StepEvent | None:
        """What a step is to the accountant, by the plan alone; None without noise."""
        if not self.noise_multiplier:
            return None
        if self.participations is not None:
            return allocated_event(self.noise_multiplier, self.num_steps // self.participations)
        cap = self.group_size if self.algorithm == Algorithm.ELS else 1
        event = cyclic_event(self.noise_multiplier, self.accounted_prob, cap, self.bands)
        changed = self.shared["max_changed"] if self.shared else 0
        return dataclasses.replace(event, max_changed=changed)

    @property
    def epsilon_holds(self) -> str:
        """What epsilon holds under: the adjacency, or a label that says that it is no guarantee."""
        return holds(self.as_dict())

    @property
    def compared(self) -> str:
        """The adjacency in words."""
        return ADJACENCY[SHARED if self.shared else self.adjacency]

    @property
    def label(self) -> str:
        """What makes epsilon no guarantee; empty where nothing does."""
        return label_of(self.as_dict())

    @property
    def guarantee(self) -> bool:
        """Whether epsilon is one."""
        return bool(self.noise_multiplier) and not self.label

    @property
    def slack(self) -> Slack:
        """What is to be added to epsilon and delta for noise that is not ideal, after all steps."""
        return self.slack_after(self.num_steps)

    def slack_after(self, num_steps: int) -> Slack:
        """The slack of so many steps; see `noise.slack`."""
        if not self.noise_multiplier:
            return Slack(0.0, 0.0)
        each = self.num_parameters + (self.clip_quantile is not None)
        strategy = self.strategy
        error = strategy.cell_error if strategy else CELL_ERROR
        return slack(max(1, num_steps) * each, self.target_epsilon, self.delta, error)

    @property
    def strategy(self) -> Strategy | None:
        """How steps take back noise of the steps before; None: they do not."""
        if self.noise != CORRELATED or self.bands == 1 or not self.noise_multiplier:
            return None
        stddev = self.gradient_noise_multiplier * 2.0 ** lattice_bits(self.num_parameters)
        return strategy(self.num_steps, self.bands, stddev)

    def add_noise(self) -> AddNoise:
        """What adds the noise of one step after another; a new one, with no steps behind it."""
        return Correlated(self.num_steps, self.bands) if self.strategy else add_gaussian

    @property
    def epsilon_metric(self) -> str:
        """The name of epsilon among the metrics."""
        if self.sampling_run != self.sampling_accounted:
            return "comparison_only/epsilon_as_if_poisson"
        if self.assumed_population is not None:
            return "comparison_only/epsilon_of_assumed_population"
        return "privacy/epsilon"

    def as_dict(self) -> dict[str, Any]:
        """The plan in JSON's types, without what only some plans have."""
        fields = {name: to_json(value) for name, value in dataclasses.asdict(self).items()}
        for name in SOME:
            if fields[name] == type(self).__dataclass_fields__[name].default:
                del fields[name]
        return {**fields, "non_private": list(self.non_private)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Plan":
        """The plan that `as_dict` wrote."""
        typed = {
            "algorithm": Algorithm(fields["algorithm"]),
            "target_epsilon": float(fields["target_epsilon"]),
            "predicted_error": _number(fields.get("predicted_error")),
            "non_private": tuple(fields["non_private"]),
        }
        return cls(**{**fields, **typed})


def complete(
    algorithm: Algorithm, privacy: PrivacyConfig, data: Dataset, *, key: SecretKey | None = None
) -> tuple[PrivacyConfig, list[str]]:
    """Fill in delta and group size; also returns all that the guarantee does not cover.

    Args: key: the run's; what group_size_epsilon asks for is drawn from it.
    """
    users = data.train
    if shared := graph_of(users) is not None:
        _expect_shared(privacy)
    population = privacy.assumed_population or users.num_users
    least = f">= {users.num_users}, the users there are"
    expect("assumed_population", population, population >= users.num_users, least)
    pool = " and the pool's size" if algorithm == Algorithm.ELS else ""
    counts = f"num_users={users.num_users}, num_examples={users.num_examples}{pool}"
    found = [f"{counts} (taken as public)"]
    if privacy.adjacency == ZERO_OUT:
        found = [f"num_examples={users.num_examples} (a count without noise)"]
    if shared:
        graph = f"{users.num_users} users, {users.num_examples} texts and who owns which of them"
        found = [f"{graph} (taken as public and fixed)"]
    times = ""
    if privacy.assumed_population is not None:
        found.append(f"assumed_population={population} (instead of the {users.num_users} users)")
        times = f", times {population / users.num_users:g}"
    delta, group_size = privacy.delta, privacy.group_size
    if delta is None:
        expect("delta", None, population > 1, "a value: one user gives none")
        delta = population**-1.1
        if privacy.adjacency != ZERO_OUT:
            found.append(f"delta={delta:.3g} (N^-1.1 for the N users{times})")
    if (share := privacy.group_size_epsilon) is not None:
        expect("group_size_epsilon", share, algorithm == Algorithm.ELS, "nothing with uls")
        expect("group_size", group_size, group_size is None, "none, or no group_size_epsilon")
        assert key is not None, "a private choice needs a key"
        group_size = private_median(examples_per_user(users), share, key.generator("median"))
    if group_size is None and algorithm == Algorithm.ELS:
        group_size = median_group_size(examples_per_user(users))
        if not shared:  # else it follows from what is public
            found.append(f"group_size={group_size} (the median user's number of examples)")
    if data.metadata.get("tokenizer", {}).get("trained_on_data"):
        found.append("the tokenizer (trained on the training users' text)")
    for name in filter(None, privacy.chosen_on_data.split(",")):
        found.append(f"{name} (chosen by looking at this data)")
    if key is not None and key.seed is not None:
        found.append("the seed (whoever knows or guesses it can take the noise away)")
    privacy = dataclasses.replace(privacy, delta=delta, group_size=group_size or 1)
    if privacy.sampling == ALLOCATION:
        privacy = allocated(algorithm, privacy, users.num_users)
    if privacy.bands is None and privacy.noise == CORRELATED and math.isfinite(privacy.epsilon):
        bands = best(bands_predicted(algorithm, privacy, users)).bands
        privacy = dataclasses.replace(privacy, bands=bands)
    return privacy, found


def allocated(algorithm: Algorithm, privacy: PrivacyConfig, num_users: int) -> PrivacyConfig:
    """The settings of random allocation, with participations and the budget that follows.

    Raises: ConfigError: it is for users alone, and those that there are.
    """
    expect("sampling", ALLOCATION, algorithm == Algorithm.ULS, ONLY_USERS)
    assumed = privacy.assumed_population
    expect("assumed_population", assumed, assumed is None, f"none with {ALLOCATION} sampling")
    steps, each = privacy.num_steps, privacy.group_size or 1
    wanted = max(1, privacy.budget // each) / num_users * steps
    divisors = [count for count in range(1, steps + 1) if steps % count == 0]
    found = privacy.participations or min(divisors, key=lambda count: abs(math.log(count / wanted)))
    budget = each * max(1, round(num_users * found / steps))
    return dataclasses.replace(privacy, participations=found, budget=budget)


def bands_predicted(algorithm: Algorithm, privacy: PrivacyConfig, users: Users) -> list[Prediction]:
    """What correlated noise of several numbers of bands is predicted to give.

    Args: privacy: of `complete`, but for its bands.
    """
    assert privacy.delta is not None and privacy.group_size is not None, "complete() comes first"
    units, cap, each = users.num_users, 1, privacy.group_size
    if algorithm == Algorithm.ELS:
        cap, each = privacy.group_size, 1
        sizes = np.minimum(np.diff(users.offsets), cap)
        units = units * cap if privacy.adjacency == ZERO_OUT else int(sizes.sum())
    count = max(1, privacy.budget // each)
    share = _assumed_share(privacy.assumed_population, users.num_users)

    def noise_multiplier(bands: int) -> float:
        return accounting.noise_multiplier(
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            num_steps=privacy.num_steps,
            sampling_prob=min(1.0, count / units) * share,
            max_contributions=cap,
            bands=bands,
            before=_before(privacy.group_size_epsilon),
        )

    return predictions(noise_multiplier, privacy.num_steps, max(1, units // count))


def _expect_shared(privacy: PrivacyConfig) -> None:
    """Raises ConfigError: the settings are not for texts with several owners."""
    where = "where texts have several owners"
    asked = {
        "adjacency": (privacy.adjacency, ZERO_OUT),
        "noise": (privacy.noise, INDEPENDENT),
        # In groups that take turns, a text would be in those of all its owners.
        "sampling": (sampling_of(privacy.sampling, privacy.noise), POISSON),
    }
    for name, (value, only) in asked.items():
        expect(name, value, value == only, f"{only} {where}")
    share = privacy.group_size_epsilon
    expect(
        "group_size_epsilon", share, share is None, f"none {where}, for who owns which is public"
    )


def method_for(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    users: Users,
    key: SecretKey,
    drawing: SecretKey | None = None,
) -> ELS | ULS:
    """The algorithm, ready to draw its first step.

    Args: drawing: what steps are drawn with, where it is not the run's own key. Where texts have
      several owners, how many units there are depends on the draw of pool or groups, and the plan,
      made earlier, says how many: these are drawn with the run's own.
    """
    shared = graph_of(users) is not None
    kind, own = METHODS[algorithm], {}
    if shared and algorithm == Algorithm.ULS:
        kind, own = SharedULS, {"max_changed": privacy.max_changed}
    method = kind(
        users,
        budget=privacy.budget,
        group_size=privacy.group_size,
        sampling=Sampling(
            sampling_of(privacy.sampling, privacy.noise),
            privacy.bands or 1,
            privacy.adjacency == ZERO_OUT,
            privacy.num_steps // (privacy.participations or 1),
        ),
        key=key if shared or drawing is None else drawing,
        adjacency=privacy.adjacency,
        **own,
    )
    method.key = drawing or key
    share = _assumed_share(privacy.assumed_population, users.num_users)
    method.sampler = dataclasses.replace(method.sampler, assumed_share=share)
    return method


def calibrate(method: ELS | ULS, privacy: PrivacyConfig) -> float:
    """The smallest noise multiplier for the target epsilon; 0 if that is infinite."""
    assert privacy.delta is not None, "complete() comes first"
    if math.isinf(privacy.epsilon):
        return 0.0
    return accounting.calibrate_noise(
        method.event,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        num_steps=privacy.num_steps,
        before=before_of(privacy),
    )


def before_of(privacy: PrivacyConfig) -> list[tuple[Event, int]]:
    """What a run with these settings releases before its first step, to the accountant."""
    return [*_before(privacy.group_size_epsilon)]


def planned_phases(plan: Plan, method: ELS | ULS) -> list[tuple[Event, int]] | None:
    """All that a run of this plan will release, to the accountant; None without noise."""
    if not plan.noise_multiplier:
        return None
    return [*plan.before, (method.event(plan.noise_multiplier), plan.num_steps)]


def make_plan(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    users: Users,
    method: ELS | ULS,
    num_parameters: int,
    non_private: list[str],
    data_seal: str,
    *,
    unproven: str | None = None,
    trial: bool = False,
) -> Plan:
    """Calibrate the noise and write down every constant."""
    assert privacy.delta is not None, "complete() comes first"
    sigma, bands = calibrate(method, privacy), privacy.bands or 1
    correlated = bands if privacy.noise == CORRELATED else 1
    return Plan(
        algorithm=algorithm,
        num_users=users.num_users,
        num_examples=users.num_examples,
        num_units=method.sampler.num_units,
        num_steps=privacy.num_steps,
        budget=privacy.budget,
        group_size=method.group_size,
        expected_count=method.sampler.expected_count,
        sampling_prob=method.sampler.sampling_prob,
        sampling_run=method.sampler.name,
        sampling_accounted=method.sampler.accounted_as,
        clip_norm=privacy.clip_norm,
        clipping=privacy.clipping,
        target_epsilon=privacy.epsilon,
        delta=privacy.delta,
        noise_multiplier=sigma,
        num_parameters=num_parameters,
        data_seal=data_seal,
        non_private=tuple(non_private),
        group_size_epsilon=privacy.group_size_epsilon,
        clip_quantile=privacy.clip_quantile,
        assumed_population=privacy.assumed_population,
        adjacency=privacy.adjacency,
        bands=bands,
        participations=privacy.participations,
        noise=privacy.noise,
        predicted_error=predicted_error(sigma, privacy.num_steps, correlated),
        seeded=method.key.seed is not None,
        unproven=unproven,
        shared=sharing(users, method, method.key),
        trial=trial,
        planted=getattr(users, "canaries", None),
    )


def sharing(users: Users, method: ELS | ULS, key: SecretKey) -> dict[str, Any] | None:
    """What the plan says of texts with several owners; None where each has one.

    Args: key: the run's own.
    The seal tells whether a run that goes on has the pool or the groups that it began with.
    """
    if (owners := graph_of(users)) is None:
        return None
    if isinstance(method, ELS):
        used, changed, kept = method.pool, 0, [method.pool]
    else:
        assert isinstance(method, SharedULS), "of texts with several owners"
        groups = method.groups
        used, changed, kept = groups.rows, groups.max_changed, [groups.rows, groups.offsets]
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in kept))
    return {
        "owner_sets": owners.num_sets,
        "with_several_owners": int(np.diff(users.offsets)[owners.sizes > 1].sum()),
        "kept": len(used),
        "left_out": users.num_examples - len(used),
        "max_changed": changed,
        "seal": key.seal(digest.hexdigest()),
    }


def ledger_head(plan: Plan, *, config_sha256: str, key_seal: str) -> dict[str, Any]:
    """The first line of a run's ledger: what is fixed for its life."""
    before = [{"what": "group_size", **dataclasses.asdict(event)} for event, _ in plan.before]
    return {
        "plan": plan.as_dict(),
        "adjacency": plan.compared,
        "slack": plan.slack._asdict(),
        "key_seal": key_seal,
        "config_sha256": config_sha256,
        **({"before": before} if before else {}),
    }


def claimed_fields(plan: Plan, epsilon: float, chain: str) -> dict[str, Any]:
    """What `summary.json` says of the guarantee: it follows from the plan and the ledger.

    Args: chain: the ledger's last link.
    """
    realised = "gradients_computed and wall_seconds (sizes of the draws)"
    return {
        **plan.as_dict(),
        "non_private": [*plan.non_private, realised],
        "epsilon": to_json(epsilon),
        "epsilon_holds": plan.epsilon_holds,
        "adjacency": plan.compared,
        "privacy_unit": "user",
        "gradient_noise_multiplier": plan.gradient_noise_multiplier,
        "slack": plan.slack._asdict(),
        "ledger_chain": chain,
    }


def holds(plan: Mapping[str, Any]) -> str:
    """What epsilon holds under: the adjacency, or a label that says that it is no guarantee.

    Args: plan: the fields of a plan.
    """
    return label_of(plan) or ADJACENCY[SHARED if plan.get("shared") else plan["adjacency"]]


def label_of(plan: Mapping[str, Any]) -> str:
    """What makes epsilon no guarantee; empty where nothing does.

    Args: plan: the fields of a plan, or a summary, which has them, too.
    """
    labels = [COMPARISON_ONLY] if plan["sampling_run"] != plan["sampling_accounted"] else []
    if (assumed_population := plan.get("assumed_population")) is not None:
        assumed = f"as if there were {assumed_population:,} users"
        labels.append(f"{assumed}: an assumption, not a guarantee")
    labels += [UNPROVEN] if plan.get("unproven") else []
    labels += [TRIAL] if plan.get("trial") else []
    labels += [REPRODUCTION] if plan.get("seeded") else []
    return "; ".join(labels)


def _assumed_share(assumed_population: int | None, num_users: int) -> float:
    return num_users / (assumed_population or num_users)


def _before(group_size_epsilon: float | None) -> list[tuple[PureEvent, int]]:
    return [] if group_size_epsilon is None else [(PureEvent(group_size_epsilon), 1)]


def _number(value: Any) -> float:
    """A number that `as_dict` wrote; nan, which is itself alone, where there is none."""
    number = math.nan if value is None else float(value)
    return math.nan if math.isnan(number) else number
