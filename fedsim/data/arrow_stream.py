"""Where the rows lie in an Arrow IPC stream, from the headers of its record batches alone.

Arrow's own reader finds the same, but through a mapping: a page fault at every header makes a
store of thousands of batches slow to open and a gigabyte large in every process. A header here is
one small read. See "Encapsulated message format" in the Arrow columnar format, and its Message.fbs.
"""

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa

HEADER = 1024  # bytes read at once; one of ours has about 250
CONTINUATION = b"\xff\xff\xff\xff"
RECORD_BATCH = 3  # of the union MessageHeader


class Batch(NamedTuple):
    """A record batch with one column of lists."""

    rows: int
    tokens: int
    offsets_at: int
    """Byte of the stream at which its rows + 1 int32 offsets begin."""
    values_at: int
    """Byte at which the lists' items begin."""


def read_kind(read: Callable[[int, int], bytes]) -> pa.DataType:
    """The type of the lists' items. Raises: pa.ArrowInvalid: not one column of lists."""
    schema = pa.ipc.read_schema(pa.py_buffer(_message(read, 0)[0]))
    if len(schema) != 1 or not pa.types.is_list(schema.field(0).type):
        raise pa.ArrowInvalid(f"expected one column of lists, got {schema}")
    return schema.field(0).type.value_type


def read_batches(read: Callable[[int, int], bytes], size: int) -> Iterator[Batch]:
    """The record batches of a stream of `size` bytes; read(at, n) gives n bytes, or what is left.

    Raises: pa.ArrowInvalid: the stream is cut off, compressed, or has other messages.
    """
    at = len(_message(read, 0)[0])
    while at < size:
        message, header = _message(read, at)
        if header is None:
            return
        try:
            batch, length = _parse(header, at + len(message))
        except struct.error:
            raise pa.ArrowInvalid(f"a damaged header at byte {at}") from None
        at += len(message) + length
        if at > size:
            raise pa.ArrowInvalid(f"cut off: expected {at} bytes or more, got {size}")
        yield batch


def _message(read: Callable[[int, int], bytes], at: int) -> tuple[bytes, bytes | None]:
    """A message without its body: all of it, and its flatbuffer; None at the end of the stream."""
    data = read(at, HEADER)
    if len(data) < 8 or data[:4] != CONTINUATION:
        raise pa.ArrowInvalid(f"expected a message at byte {at}")
    (length,) = struct.unpack_from("<i", data, 4)
    if length == 0:
        return data[:8], None
    if length + 8 > len(data):
        data = read(at, length + 8)
    if length < 0 or length + 8 > len(data):
        raise pa.ArrowInvalid(f"cut off in the header at byte {at}")
    return data[: length + 8], data[8 : length + 8]


def _parse(header: bytes, body: int) -> tuple[Batch, int]:
    """The batch of a Message whose body begins at byte `body`, and the body's length."""
    message = _u32(header, 0)
    (kind,) = struct.unpack_from("<B", header, _field(header, message, 1))
    (length,) = struct.unpack_from("<q", header, _field(header, message, 3))
    if kind != RECORD_BATCH:
        raise pa.ArrowInvalid("expected record batches alone")
    batch = _target(header, _field(header, message, 2))
    nodes, buffers = (_target(header, _field(header, batch, n)) + 4 for n in (1, 2))
    if _field(header, batch, 3, default=0):
        raise pa.ArrowInvalid("expected uncompressed record batches")
    # of a list and its items: rows, null count; then validity, offsets, validity, items
    rows, _, tokens, _ = struct.unpack_from("<4q", header, nodes)
    _, _, offsets, _, _, _, values, _ = struct.unpack_from("<8q", header, buffers)
    return Batch(rows, tokens, body + offsets, body + values), length


def _field(data: bytes, table: int, number: int, default: int | None = None) -> int:
    """Where a table's field is; `default` if the table does not have it."""
    (back,) = struct.unpack_from("<i", data, table)
    (size,) = struct.unpack_from("<H", data, table - back)
    slot = 4 + 2 * number
    place = struct.unpack_from("<H", data, table - back + slot)[0] if slot < size else 0
    if place:
        return table + place
    if default is None:
        raise struct.error
    return default


def _target(data: bytes, place: int) -> int:
    return place + _u32(data, place)


def _u32(data: bytes, place: int) -> int:
    return struct.unpack_from("<I", data, place)[0]
