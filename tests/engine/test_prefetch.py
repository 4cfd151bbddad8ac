"""Reading ahead changes when something is read, never what, nor in which order."""

import threading

import pytest

from fedsim.engine.worker import prefetched


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_items_come_in_order_with_what_was_read_of_them(count):
    assert list(prefetched(lambda i: i * i, range(count))) == [(i, i * i) for i in range(count)]


def test_the_next_item_is_read_while_this_one_is_worked_on():
    begun = [threading.Event() for _ in range(3)]

    def read(item):
        begun[item].set()

    for item, _ in prefetched(read, range(3)):
        assert item == 2 or begun[item + 1].wait(10)


def test_no_more_than_one_item_is_read_ahead():
    asked = []

    def items():
        for item in range(5):
            asked.append(item)
            yield item

    for item, _ in prefetched(lambda item: item, items()):
        assert len(asked) <= item + 2


def test_an_error_comes_at_its_items_turn():
    def read(item):
        if item == 2:
            raise OSError("gone")
        return item

    read_until = []
    with pytest.raises(OSError, match="gone"):
        for item, _ in prefetched(read, range(4)):
            read_until.append(item)
    assert read_until == [0, 1]
