from . import doubling as doubling
from .advice import report as report
from .recommend import recommend as recommend
from .selection import Selection as Selection, select as select
from .sweep import expand as expand, jobs_of as jobs_of, sweep as sweep
