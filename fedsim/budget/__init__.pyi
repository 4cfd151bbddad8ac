from .admission import (
    GROUP_SIZE as GROUP_SIZE,
    Applicant as Applicant,
    admitted as admitted,
    close as close,
    count_at_once as count_at_once,
    shortened as shortened,
)
from .ledger import (
    BudgetLedger as BudgetLedger,
    Entry as Entry,
    Limit as Limit,
    Released as Released,
    hold as hold,
    look as look,
    place_of as place_of,
)
from .receipt import (
    expect_receipt as expect_receipt,
    together as together,
)
from .spending import (
    Books as Books,
    Charge as Charge,
    Total as Total,
    books as books,
    union as union,
)
