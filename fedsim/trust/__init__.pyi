from . import bounds as bounds, published as published
from .audit import audit as audit, sentence as sentence
from .budget_page import budget as budget, sentences as sentences, table as table
from .claim import Released as Released, ReportError as ReportError
from .evidence import Check as Check
from .published import CARD as CARD
from .report import (
    card_of as card_of,
    claim_of_texts as claim_of_texts,
    model_card as model_card,
    read as read,
    report as report,
    write_report as write_report,
)
from .verify import plan_of as plan_of, verify as verify
