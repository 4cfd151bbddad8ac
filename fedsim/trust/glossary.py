"""What the words of a report mean, for readers who are not from the field."""

from fedsim.trust.document import Table

WORDS = Table(
    ("word", "meaning"),
    [
        (
            "epsilon",
            "How much one user can change the odds of anything: by a factor of e^epsilon. "
            "Smaller is more private: 0 is perfect, and beyond 10 or so it says little.",
        ),
        (
            "delta",
            "The small probability that is set aside. It should be well below one in the number "
            "of users.",
        ),
        (
            "user",
            "Whatever has an id of its own in the data: an author, an account, a site, a file.",
        ),
        ("gradient", "The direction in which a text, or a user's texts, pull the model."),
        ("clipping", "Shortening every pull to a fixed length, so that nobody pulls harder."),
        ("noise", "A random change added to the sum of all pulls, large enough to hide any one."),
        ("sampling", "Only some take part in each step, by lot, which hides who did."),
        ("ledger", "The list of everything that was released, from which epsilon is computed."),
    ],
)
