"""Pages of the lab show the claims of all committed records."""

import json
import re
from pathlib import Path

from experiments.harness import records

ROOT = Path(__file__).parents[2]
CLAIMS_OF_PAGES = re.compile(r"^```\{record\} ([\w/]+)$", re.M)


def test_the_claims_of_every_record_are_on_a_page_of_the_lab():
    pages = [page.read_text() for page in ROOT.glob("docs/lab/*.md")]
    shown = {name for page in pages for name in CLAIMS_OF_PAGES.findall(page)}
    committed = {
        records.name_of(file): json.loads(file.read_text()) for file in records.committed()
    }
    judged = {name for name, record in committed.items() if record["claims"]}
    assert judged <= shown
