from . import doubling as doubling
from .advice import Advice as Advice, Cell as Cell, report as report
from .pricing import Selection as Selection
from .recommend import recommend as recommend
from .selection import select as select
from .sweep import expand as expand, jobs_of as jobs_of, sweep as sweep
