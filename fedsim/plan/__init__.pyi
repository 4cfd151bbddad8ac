from .defaults import (
    allocated as allocated,
    bands_predicted as bands_predicted,
    complete as complete,
)
from .evaluations import (
    MOST_ROWS as MOST_ROWS,
    TWO_HELD_OUT as TWO_HELD_OUT,
    Evaluations as Evaluations,
    delta_of as delta_of,
    evaluations_of as evaluations_of,
    noise_of as noise_of,
)
from .options import (
    ADJACENCY as ADJACENCY,
    REPRODUCTION as REPRODUCTION,
    TRIAL as TRIAL,
    AllocatedSampling as AllocatedSampling,
    AnySampling as AnySampling,
    Audit as Audit,
    CorrelatedNoise as CorrelatedNoise,
    CyclicSampling as CyclicSampling,
    IndependentNoise as IndependentNoise,
    Number as Number,
    PoissonSampling as PoissonSampling,
    Release as Release,
    SharedTexts as SharedTexts,
    ShuffledSampling as ShuffledSampling,
    Trial as Trial,
    holds as holds,
)
from .plan import FLAT as FLAT, LEFT_OUT_AT as LEFT_OUT_AT, Plan as Plan, plans as plans
from .planner import (
    MOST_PARAMETERS as MOST_PARAMETERS,
    before_of as before_of,
    calibrate as calibrate,
    drawn_once as drawn_once,
    expect_affordable as expect_affordable,
    make_plan as make_plan,
    method_for as method_for,
    planned_phases as planned_phases,
    sampling_for as sampling_for,
    sharing as sharing,
)
from .records import (
    claimed_fields as claimed_fields,
    claimed_phases as claimed_phases,
    ledger_head as ledger_head,
)
