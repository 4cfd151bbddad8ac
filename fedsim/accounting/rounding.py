"""Upper bounds for people: a bound that is shown is never less than the one that holds."""

from decimal import ROUND_CEILING, Decimal, localcontext


def at_most(value: float, form: str) -> str:
    """`value` in a format such as ".2e", its last digit rounded up.

    >>> at_most(2.3412e-6, ".2e"), at_most(0.12301, ".1%"), at_most(4.0, ".4f")
    ('2.35e-6', '12.4%', '4.0000')
    """
    with localcontext(rounding=ROUND_CEILING):
        return format(Decimal(repr(float(value))), form)
