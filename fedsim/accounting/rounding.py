"""Bounds for people, rounded the safe way: whoever goes by what is shown claims no more than holds.

Epsilon, delta and noise multipliers are rounded up, sampling probabilities down.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext


def at_most(value: float, form: str) -> str:
    """`value` in a format such as ".2e", its last digit rounded up.

    >>> at_most(2.3412e-6, ".2e"), at_most(0.12301, ".1%"), at_most(4.0, ".4f")
    ('2.35e-6', '12.4%', '4.0000')
    """
    if math.isinf(value):
        return str(value)
    with localcontext(rounding=ROUND_CEILING):
        return format(Decimal(repr(float(value))), form)


def at_least(value: float, form: str) -> str:
    """`value` in a format such as ".3g", its last digit rounded down.

    >>> at_least(0.25599, ".3g"), at_least(0.25, ".3g")
    ('0.255', '0.25')
    """
    with localcontext(rounding=ROUND_FLOOR):
        return format(Decimal(repr(float(value))), form)
