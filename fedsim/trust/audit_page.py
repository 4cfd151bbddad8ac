"""The page of an audit: what was found, and what that means."""

from typing import Any

from fedsim.trust.document import Document, Items, Quote, Section, Table
from fedsim.trust.svg import Chart, Series

AMONG_OTHERS = (
    "A canary shares most of its texts with made-up partners who are always there. What the coin "
    "decides is whether its texts say anything: who owns which is the same either way."
)


def sentence(result: dict[str, Any]) -> str:
    """What was found, in one line."""
    bound = f"epsilon is at least {result['epsilon_lower_bound']:.3f}"
    return f"{bound} (confidence {result['confidence']:g} for each bound); {result['verdict']}"


def compose(result: dict[str, Any]) -> Document:
    """The audit as a page."""
    kinds = {"gradient": "gradient canaries", "text": "text canaries"}
    rows, curves = [], []
    for name, title in {**kinds, "membership": "real users, held in and out"}.items():
        found = result[name]
        if not found:
            continue
        bound = found.get("bound")
        right = f"{bound['correct']} of {bound['guesses']}" if bound else "-"
        lower = f"{bound['epsilon']:.3f}" if bound else "none follows"
        curve, whole = found.get("curve"), "-"
        if curve:
            bounded = {
                True: "refuted",
                False: "not refuted" if curve["could_refute"] else "too few",
            }
            whole = f"{bounded[curve['refuted']]}; as a Gaussian {curve['epsilon']:.3f}"
        most = f"{bound['largest_possible']:.3f}" if bound else "-"
        size = bound["canaries"] if bound else found["users_in"] + found["users_out"]
        area = f"{found['auc']:.3f}" if "auc" in found else "-"
        rows.append((title, f"{size}", right, area, lower, most, whole))
        if "roc" in found:
            curves.append(
                Chart(
                    f"{title}: recognised against wrongly suspected",
                    "share of those left out who are suspected",
                    "share of those included who are",
                    [
                        Series("attack", found["roc"]["false"], found["roc"]["true"]),
                        Series("guessing", [0, 1], [0, 1], dashed=True),
                    ],
                )
            )
    head = ("attack", "users", "coins guessed", "area under the curve", "epsilon at least")
    head += ("with every coin guessed", "the whole curve that is claimed")
    means = [
        "Each canary, a made-up user, was included or left out by a toss of a coin. From what the "
        "training released, the attack guesses the coins. Too many right guesses refute the claim.",
        Items(
            [
                "A gradient canary pulls the model in a direction that nobody else pulls in.",
                "A text canary wrote a line of made-up words and numbers.",
                *([AMONG_OTHERS] if result.get("shared") else []),
                "The attack on real users asks how much more likely the trained model finds their "
                "texts than the model before. 0.5 under the curve is no better than guessing. Who "
                "was held out was not decided by our coins, so that no bound follows.",
                "The last but one column is what the bound would be with every coin guessed right: "
                "a claim above it cannot be refuted by so few canaries by this bound.",
                "The last column holds the guesses against all pairs of epsilon and delta that are "
                "claimed, which takes fewer canaries, and says what epsilon would be at least if "
                "the training were a Gaussian mechanism. Too few: all guesses right would not "
                "refute it.",
                "A bound below the claim is what is hoped for, and no proof: a better attack may "
                "exist. Nothing about the real users is in this page but the last row and curve, "
                "which were computed from their texts without protection.",
            ]
        ),
    ]
    sections = [
        Section("What was found", [Quote(sentence(result)), Table(head, rows)]),
        *more(result),
        Section("What that means", means),
        Section("How well each attack tells them apart", curves),
    ]
    changed = [
        "`{setting}`: {used} instead of {given} ({why})".format(**each)
        for each in result["replaced"]
    ]
    if changed:
        title = "What was done otherwise than the command says"
        sections.insert(-1, Section(title, [Items(changed)]))
    return Document("Audit of a training", [each for each in sections if each.blocks])


def more(result: dict[str, Any]) -> list[Section]:
    """What takes more for granted than guessing does, where it was looked at."""
    rows, said = [], []
    independent = (result["gradient"] or {}).get("independent")
    if independent:
        verdict = "refuted" if independent["refuted"] else "not refuted"
        verdict = verdict if independent["could_refute"] else "too few"
        guessed = f"{independent['correct']} coins guessed, {independent['most_expected']:.1f}"
        rows.append(
            (
                "each gradient canary tells of its own coin alone",
                f"{guessed} expected at most",
                f"{independent['epsilon']:.3f} (as a Gaussian)",
                verdict,
            )
        )
        said.append(
            "If what is released of one gradient canary says nothing of another one's coin, each "
            "is an audit of its own. They are made so: they have no coordinate in common, and are "
            "drawn and get noise independently of each other. What is taken for granted is that "
            "other users' gradients do not pass on their coins."
        )
    noise = result.get("noise")
    if noise:
        least = f"at most {noise['noise_multiplier']:.4g}, {noise['claimed']:.4g} claimed"
        verdict = "refuted" if noise["refuted"] else "not refuted"
        row = ("users drawn and gradients clipped as claimed", f"noise multiplier {least}")
        rows.append((*row, f"{noise['epsilon']:.3f}", verdict))
        said.append(
            "The audit, unlike an attacker, hears the sums that noise is added to. What is "
            "released, less these, cannot be shorter than noise. Its length bounds the noise from "
            "above, and so epsilon from below, if the noise is Gaussian and all else is as claimed."
        )
    if not rows:
        return []
    head = ("what is taken for granted", "seen", "epsilon at least", "the claim")
    return [Section("What follows if more is taken for granted", [Table(head, rows), Items(said)])]
