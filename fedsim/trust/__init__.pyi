from . import bounds as bounds
from .audit import audit as audit, sentence as sentence
from .budget_page import budget as budget, sentences as sentences, table as table
from .evidence import Check as Check
from .report import CARD as CARD, model_card as model_card, report as report
from .verify import plan_of as plan_of, verify as verify
