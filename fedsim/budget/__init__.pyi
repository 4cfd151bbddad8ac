from .admission import (
    GROUP_SIZE as GROUP_SIZE,
    BudgetRequest as BudgetRequest,
    admitted as admitted,
    close as close,
    count_at_once as count_at_once,
    expect_receipt as expect_receipt,
)
from .ledger import (
    BudgetLedger as BudgetLedger,
    Entry as Entry,
    Limit as Limit,
    Released as Released,
    open_locked as open_locked,
    open_read_only as open_read_only,
    place_of as place_of,
)
from .spending import (
    Account as Account,
    RunCost as RunCost,
    Total as Total,
    books as books,
    union as union,
)
