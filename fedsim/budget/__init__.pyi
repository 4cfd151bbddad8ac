from .admission import (
    GROUP_SIZE as GROUP_SIZE,
    admitted as admitted,
    close as close,
    count_at_once as count_at_once,
)
from .applicant import Applicant as Applicant, shortened as shortened
from .ledger import (
    BudgetLedger as BudgetLedger,
    Entry as Entry,
    Limit as Limit,
    hold as hold,
    place_of as place_of,
)
from .people import union as union
from .receipt import expect_receipt as expect_receipt, together as together
from .spending import Books as Books, Charge as Charge, books as books
