"""What a user is refused: the setting or column that an error names, whatever its words are."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedsim.errors import ConfigError


@contextmanager
def refuses(
    what: str, kind: type[ConfigError] = ConfigError, *, says: str = ""
) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """An error of this kind about this input is raised in here.

    Args:
      what: `field`, or `field=value` with the value as it is shown.
      says: a fact that its line has to give.
    """
    with pytest.raises(kind) as raised:
        yield raised
    error, (field, given, value) = raised.value, what.partition("=")
    assert error.field == field, error
    assert not given or str(error.value) == value, error
    assert says in str(error)
