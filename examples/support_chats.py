"""Made-up support chats, to try training on chats without any data.

python examples/support_chats.py FOLDER writes chats.jsonl and, for models without one, a
chat_template.jinja.

Nobody wrote these chats, and no shop and no customer is meant. A customer with a few belongings and
a way to write asks the support of an invented shop, and its assistant answers. Everything is chosen
by a generator of random numbers from the phrases below, which are all that there is to learn: which
answer goes with which trouble, and the order number and the thing that the customer has named. The
chats are the same on every machine.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

CUSTOMERS, MAX_CHATS = 600, 8  # MAX_CHATS is of one customer
SEED = 48
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
Option = TypeVar("Option")

THINGS = (
    *("kettle", "desk lamp", "rain jacket", "backpack", "toaster", "alarm clock", "blanket"),
    *("bicycle bell", "teapot", "umbrella", "pair of boots", "head torch", "coffee mill"),
    *("garden hose", "tool box", "pillow", "wall clock", "frying pan", "scarf", "radio"),
)
TOWNS = (
    *("Ashford", "Brookhaven", "Cedar Falls", "Dunmore", "Eastwick", "Fairholm", "Greyport"),
    *("Hollowell", "Kingsmoor", "Larkspur", "Millbrook", "Northgate"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
GREETINGS = ("Hi, ", "Hello, ", "Good morning. ", "Hey, ", "Good evening, ", "")
THANKS = ("Thanks!", "Thank you, that helps.", "Great, thanks a lot.", "Perfect.", "ok thank you")
FAREWELLS = (
    "You are welcome. Have a nice day!",
    "Glad I could help. Write to us any time.",
    "My pleasure. Goodbye!",
)
ASKED = (
    "I am sorry to hear that. What is your order number?",
    "Let me look into it. Could you give me the order number?",
    "Thank you for writing to us. May I have your order number, please?",
)
NUMBERED = ("It is {order}.", "{order}", "The number is {order}.", "Sure, it's {order}.")


class Topic(NamedTuple):
    """A trouble of a customer, and how support answers."""

    troubles: Sequence[str]
    answers: Sequence[str]


TOPICS = (
    Topic(
        (
            "my {thing} has not arrived yet.",
            "where is the {thing} that I ordered?",
            "I am still waiting for my {thing}.",
            "the {thing} should have been here on {day}.",
        ),
        (
            "Order {order} left our store and will reach {town} on {next}.",
            "Your {thing} is on its way. It should be in {town} by {next}.",
        ),
    ),
    Topic(
        (
            "the {thing} you sent me is broken.",
            "my new {thing} stopped working on {day}.",
            "I unpacked the {thing} and it is damaged.",
        ),
        (
            "We will send a new {thing} for order {order}. You may keep the broken one.",
            "A replacement for your {thing} leaves on {next}, free of charge.",
        ),
    ),
    Topic(
        (
            "I would like to return my {thing}.",
            "how can I send the {thing} back?",
            "the {thing} is not what I expected. Can I return it?",
        ),
        (
            "I sent you a label for order {order}. Please post the {thing} within {count} days.",
            "Yes, you have {count} days to return the {thing}. The label is in your mail.",
        ),
    ),
    Topic(
        (
            "I was charged twice for the {thing}.",
            "why did you take {price} from my card two times?",
            "my bill for the {thing} is wrong.",
        ),
        (
            "You are right. We give {price} back to your card by {next}.",
            "I see two payments for order {order}. The second one, {price}, is being refunded.",
        ),
    ),
    Topic(
        (
            "I moved to {town}. Can you change my address?",
            "please send the {thing} to {town} instead.",
            "I gave the wrong address, it should be {town}.",
        ),
        (
            "Done. Order {order} now goes to {town}.",
            "I have changed the address to {town}. The {thing} arrives on {next}.",
        ),
    ),
    Topic(
        (
            "I want to cancel the order of my {thing}.",
            "please cancel the {thing}, I bought one in {town}.",
            "can I still cancel the {thing} from {day}?",
        ),
        (
            "Order {order} is cancelled. We return {price} within {count} days.",
            "I have cancelled the {thing}. You will get {price} back by {next}.",
        ),
    ),
    Topic(
        (
            "I need an invoice for the {thing}.",
            "could you send me the bill for the {thing} again?",
            "there was no invoice with my {thing}.",
        ),
        (
            "The invoice for order {order} over {price} is in your mail now.",
            "I have sent the invoice for the {thing} again. Its total is {price}.",
        ),
    ),
    Topic(
        (
            "I cannot log in to see the order of my {thing}.",
            "your app closes when I look for my {thing}.",
            "I forgot my password and want to follow my {thing}.",
        ),
        (
            "I have sent you a link for a new password. Order {order} arrives on {next}.",
            "Please install the app again. Your {thing} is due in {town} on {next}.",
        ),
    ),
)


def support_chats() -> list[dict[str, Any]]:
    """Made-up rows of several hundred customers: {"user_id", "messages"}, in a fixed order."""
    chance = random.Random(SEED)
    rows = []
    for number in range(CUSTOMERS):
        own = [_of(chance, THINGS) for _ in range(3)]
        habits = _of(chance, GREETINGS), _of(chance, NUMBERED), _of(chance, TOWNS)
        customer, count = f"customer {number:03}", 1 + int(MAX_CHATS * chance.random() ** 2)
        chats = [_chat(chance, _of(chance, own), *habits) for _ in range(count)]
        rows += [{"user_id": customer, "messages": chat} for chat in chats]
    return rows


def _chat(
    chance: random.Random, thing: str, greeting: str, numbered: str, town: str
) -> list[dict[str, Any]]:
    """A chat about a thing of a customer, who writes as ever."""
    topic = _of(chance, TOPICS)
    facts = {
        "thing": thing,
        "town": town,
        "order": f"{_of(chance, 'ABCDEFGH')}{int(9000 * chance.random()) + 1000}",
        "day": _of(chance, DAYS),
        "next": _of(chance, DAYS),
        "count": 7 * (1 + int(4 * chance.random())),
        "price": f"{5 + int(80 * chance.random())}.{_of(chance, ('00', '50', '90'))}",
    }
    trouble = _of(chance, topic.troubles)
    trouble = trouble if greeting.endswith(", ") else trouble[0].upper() + trouble[1:]
    said = [greeting + trouble, _of(chance, ASKED), numbered, _of(chance, topic.answers)]
    if chance.random() < 0.5:
        said += [_of(chance, THANKS), _of(chance, FAREWELLS)]
    return [
        {"role": ("user", "assistant")[i % 2], "content": text.format(**facts)}
        for i, text in enumerate(said)
    ]


def _of(chance: random.Random, options: Sequence[Option]) -> Option:
    """One of some options. Python keeps the numbers of a seed, but does not say so of `choice`."""
    return options[int(len(options) * chance.random())]


def write(folder: Path) -> None:
    """Write the chats, and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in support_chats())
    (folder / "chats.jsonl").write_text(lines)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
