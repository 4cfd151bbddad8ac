from . import (
    checkpoint as checkpoint,
    directory as directory,
    formats as formats,
    ledger as ledger,
    metrics as metrics,
)
from .checkpoint import (
    State as State,
    private_part as private_part,
    restored as restored,
    results as results,
    save as save,
)
from .console import (
    Console as Console,
    guarantee_line as guarantee_line,
    spent as spent,
)
from .directory import RECEIPT as RECEIPT, Identity as Identity, StoredRun as StoredRun
from .formats import Segment as Segment
from .ledger import (
    ChainedLog as ChainedLog,
    Differs as Differs,
    Ledger as Ledger,
    LedgerError as LedgerError,
    Reached as Reached,
    Replayed as Replayed,
    claimed_epsilon as claimed_epsilon,
    gradient_sha256 as gradient_sha256,
)
from .metrics import (
    BOARD as BOARD,
    SENDING as SENDING,
    Metrics as Metrics,
    visible as visible,
)
from .model_source import (
    expect_language_model as expect_language_model,
    expect_same_model as expect_same_model,
    find_model as find_model,
    load_data as load_data,
    make_task as make_task,
    model_name as model_name,
    model_sha256 as model_sha256,
    save_model as save_model,
)
from .terminal import (
    Terminal as Terminal,
    aligned as aligned,
    time_in_words as time_in_words,
    verbosity as verbosity,
)
