"""A run as an entry for the public registry of deployments of differential privacy.

The fields are those of the registry's schema (Nanayakkara, Ghazi and Vadhan 2025, arXiv 2509.13509;
OpenDP's deployments-registry-data), at its highest tier. What a run cannot know, who publishes the
model, for what and where, is marked to be filled in.
"""

import time
from typing import Any

from huggingface_hub.utils import yaml_dump

from fedsim.accounting import at_most
from fedsim.config import Algorithm
from fedsim.trust.claim import Released, claim, gaussian
from fedsim.trust.claim_fields import adjacency, all_runs, mechanism, slack, tuning, unit

FILE = "registry.yaml"
TO_FILL_IN = "(to be filled in by whoever publishes the model)"


def entry(released: Released) -> dict[str, Any] | None:
    """The entry; None: nothing is claimed, so there is nothing to register."""
    plan = released.plan
    if released.phases is None or released.label:
        return None
    name = released.run_dir.resolve().name
    return {
        "url_slug": "".join(c if c.isalnum() else "-" for c in name.lower()),
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": {
                "name": name,
                "data_curators": [TO_FILL_IN],
                "intended_use": TO_FILL_IN,
                "data_product_type": "Machine learning model",
                "data_product_region": TO_FILL_IN,
                "description": claim(released),
                "publication_date": time.strftime("%Y-%m-%d", time.gmtime()),
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": f"All texts of {plan.num_users:,} users, each an id in the data.",
                "unprotected_quantities": "; ".join(plan.non_private) or "None.",
            },
            "privacy_loss": _privacy_loss(released),
            "deployment_model": _model(),
            "accounting": {
                "post_processing": "The update of the optimizer, averages of parameters, and "
                "whatever is done with the model.",
                "composition": "The privacy losses of all steps are composed numerically, as an "
                f"upper bound, each step with its sampling. All runs on these users: "
                f"{all_runs(released)}.",
            },
            "implementation": _implementation(released),
            "administrative": {
                "notes": "Written by fedsim from the run's ledger.",
                "registry_authors": [TO_FILL_IN],
            },
        },
    }


def _privacy_loss(released: Released) -> dict[str, Any]:
    found, plan = gaussian(released), released.plan
    return {
        "privacy_unit": "User",
        "privacy_unit_details": f"{unit(plan)}. Neighbours are {adjacency(plan)}.",
        "privacy_parameters": {
            "epsilon": float(at_most(released.epsilon, ".4f")),
            "delta": float(at_most(plan.delta, ".3e")),
        },
        "privacy_parameters_details": f"Of it for noise that is not ideal: {slack(released)}. But "
        f"for that, all steps together are mu-GDP with mu = {at_most(found.mu, '.4g')}, except for "
        f"a probability of {at_most(found.set_aside, '.2e')}.",
    }


def _model() -> dict[str, Any]:
    return {
        "model_name": "Central",
        "actors": "- Whoever trains holds the texts and the secret key, and is trusted with them.\n"
        "- Everybody else, adversaries too, may see the parameters after every step and the "
        "ledger, and may know all other users' texts.",
        "release_type": "One release",
        "release_type_details": "The parameters after each step are one release together.",
        "data_source_type": "Static",
        "access_type": "Non-interactive",
    }


def _implementation(released: Released) -> dict[str, Any]:
    plan = released.plan
    share = plan.group_size_epsilon
    chosen = "" if share is None else f" The group size was chosen for {share:g} of epsilon."
    why = "each text" if plan.algorithm == Algorithm.ELS else "each user's texts of a step"
    return {
        "preprocessing_and_hyperparameter_tuning": "Not accounted: "
        + ("; ".join(tuning(plan)) or "none was reported")
        + f".{chosen}",
        "mechanisms": f"- {mechanism(plan)}, with fedsim.\n"
        f"- Sampling that was run: {plan.sampling.kind}; that was accounted: "
        f"{plan.sampling.accounted}.\n"
        "- Floating point: contributions are whole numbers, their sums exact, and the noise lies "
        "on a lattice that does not depend on the data.\n"
        "- Noise and draws come from AES-128 in counter mode, keyed by 256 secret bits.\n"
        "- Timing: when steps ended is not published; nothing else protects against it.",
        "justification": f"The gradient of {why} is clipped, so that what a user adds is bounded "
        f"whatever they wrote. The ledger was replayed when this was written: "
        + "; ".join(f"{check.promise} {check.verdict}" for check in released.checks)
        + ".",
    }


def as_yaml(entry: dict[str, Any]) -> str:
    """The entry as a YAML file."""
    return yaml_dump(entry, sort_keys=False, width=100)
