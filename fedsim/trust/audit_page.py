"""The page of an audit: what was found, and what that means."""

from typing import Any

from fedsim.trust.plots import Chart, Series

KINDS = {
    "gradient": "gradient canaries",
    "text": "text canaries",
    "membership": "real users, trained on and held out",
}


def sentence(result: dict[str, Any]) -> str:
    """The result in one line."""
    bound = f"epsilon is at least {result['epsilon_lower_bound']:.3f}"
    return f"{bound} (confidence {result['confidence']:g} for each bound); {result['verdict']}"


def compose(result: dict[str, Any]) -> dict[str, Any]:
    """The facts that the template audit.md.jinja needs."""
    attacks = {title: result[kind] for kind, title in KINDS.items() if result[kind]}
    return {
        "title": "Audit of a training",
        "sentence": sentence(result),
        "attacks": attacks,
        "independent": (result["gradient"] or {}).get("independent"),
        "noise": result.get("noise"),
        "shared": result.get("shared"),
        "replaced": result["replaced"],
        "charts": [_roc(name, found["roc"]) for name, found in attacks.items() if "roc" in found],
    }


def _roc(attack: str, roc: dict[str, list[float]]) -> Chart:
    return Chart(
        f"{attack}: recognised against wrongly suspected",
        "share suspected, of those left out",
        "share suspected, of those included",
        [
            Series("attack", roc["false"], roc["true"]),
            Series("guessing", [0, 1], [0, 1], dashed=True),
        ],
    )
