"""Threads of mails as chats: `python examples/mail_threads.py` in the directory of `mail.mbox`.

A thread becomes a row of mail.jsonl, owned by everybody who wrote or received a mail of it, except
the desk, whose mails are the assistant's turns.
"""

import email
import email.policy
import html
import json
import mailbox
import re
from email.utils import getaddresses

DESK = "desk@shop.example"


def parsed(file):
    return email.message_from_binary_file(file, policy=email.policy.default)


def written(mail):
    date = mail["Date"] and mail["Date"].datetime
    return date.timestamp() if date else 0.0


def plain(mail):
    body = mail.get_body(("plain", "html"))
    try:
        text = body.get_content() if body else ""
    except LookupError:  # a character set that Python does not know
        text = body.get_payload(decode=True).decode("latin-1")
    if body and body.get_content_subtype() == "html":
        text = html.unescape(re.sub("<[^>]*>", " ", text))
    return text.strip() or "(no text)"


def addresses(mails, *names):
    fields = [str(mail[name]) for mail in mails for name in names if mail[name]]
    return {address.lower() for _, address in getaddresses(fields) if address}


def of_desk(mail):
    return addresses([mail], "From") == {DESK}


threads = {}
for number, mail in enumerate(mailbox.mbox("mail.mbox", factory=parsed)):
    names = mail["References"] or mail["In-Reply-To"] or mail["Message-ID"] or f"<{number}>"
    threads.setdefault(names.split()[0], []).append(mail)

with open("mail.jsonl", "w") as out:
    for mails in threads.values():
        if not any(map(of_desk, mails)):
            continue  # nobody answered
        mails.sort(key=written)
        people = addresses(mails, "From", "To", "Cc") - {DESK}
        turns = [
            {"role": "assistant" if of_desk(mail) else "user", "content": plain(mail)}
            for mail in mails
        ]
        out.write(json.dumps({"people": sorted(people), "messages": turns}) + "\n")
