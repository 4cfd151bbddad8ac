"""Chats from an export of Slack: `python examples/slack_rooms.py` in the directory of `slack`.

Each message becomes a row of slack.jsonl, with the messages before it as context, cut so that each
row fits: which rows there are must not depend on what they say. All who speak in a row own it.
"""

import json
from pathlib import Path

BEFORE, MOST = 6, 250


def cut(text):
    return text.encode()[:MOST].decode(errors="ignore")


with open("slack.jsonl", "w") as out:
    for channel in sorted(path for path in Path("slack").iterdir() if path.is_dir()):
        days = [json.loads(file.read_text()) for file in sorted(channel.glob("*.json"))]
        said = [m for day in days for m in day if m.get("text") and m.get("user")]
        for i, last in enumerate(said):
            before = said[max(0, i - BEFORE) : i]
            context = [{"role": "user", "content": cut(m["text"])} for m in before]
            reply = {"role": "assistant", "content": last["text"]}
            people = sorted({m["user"] for m in [*before, last]})
            out.write(json.dumps({"messages": [*context, reply], "people": people}) + "\n")
