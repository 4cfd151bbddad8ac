from . import doubling as doubling
from .advice import Advice as Advice, report as report
from .recommend import recommend as recommend
from .selection import (
    Job as Job,
    expand as expand,
    jobs_of as jobs_of,
    outcomes_of as outcomes_of,
    select as select,
)
