from .audit import audit as audit, sentence as sentence
from .budget import budget as budget, sentences as sentences, table as table
from .claim import ReportError as ReportError
from .evidence import Check as Check
from .published import CARD as CARD, is_folder as is_folder
from .report import (
    claim_of_texts as claim_of_texts,
    model_card as model_card,
    publish as publish,
    report as report,
)
from .verify import plan_of as plan_of, verify as verify
