"""Chats of which other tokens are trained on, and persons who write special tokens."""

import jax.numpy as jnp

from experiments.planting import Mistake, Patch

CHAT, LOSS = "fedsim.data.chat", "fedsim.models.language_model"


def one_later(right, tokens_BL, sizes_B, trained_BL=None):
    if trained_BL is not None:
        trained_BL = jnp.roll(trained_BL, 1, axis=1)
    return right(tokens_BL, sizes_B, trained_BL)


def by_the_cohort(_right, self, params, batch, *frozen):
    nats, predictions = self.nats(params, batch, *frozen)
    return nats / jnp.maximum(predictions.mean(), 1)


CHATS = (
    Mistake(
        "the token after a trained one is trained on",
        "clipping/test_masked.py::test_the_loss_of_a_row_is_that_of_the_plain_loops",
        Patch(LOSS, "predicted", one_later),
    ),
    Mistake(
        "a loss divided by the trained tokens of the cohort",
        "clipping/test_masked.py::test_the_loss_of_a_row_does_not_depend_on_what_others_train_on",
        Patch(LOSS, "LanguageModelTask.losses", by_the_cohort),
    ),
    Mistake(
        "prompts that are trained on",
        "data/test_chat.py::test_the_assistants_turns_are_trained_on_with_what_ends_them",
        Patch(
            CHAT,
            "ChatTokenizer.encode",
            lambda encode, self, messages, train_on, tools=None: encode(
                self, messages, "all", tools
            ),
        ),
    ),
    Mistake(
        "special tokens that a person spells",
        "data/test_chat.py::test_any_text_comes_back_and_none_becomes_a_special_token",
        Patch(CHAT, "_Spellings.broken", lambda _right, self, content: content),
    ),
)
