"""How many fields a serialized message has, counted before it is parsed.

Protobuf parses a message in one call that holds the interpreter's lock. 4 MB of empty submessages take it 0.1 s, in which the event
loop serves no other request. Requests within jengine's limits have few fields: token ids are packed into one.
"""

from __future__ import annotations

from functools import cache

from google.protobuf.descriptor import Descriptor

MAX_FIELDS = 2**15  # of a request, those of its submessages included
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5  # wire types


def has_too_many_fields(raw: bytes, descriptor: Descriptor, limit: int = MAX_FIELDS) -> bool:
    """Whether a message of this type has more than `limit` fields. Malformed messages are left to the parser.

    Counts up to the limit, so it takes some 20 ms at most; short messages take no time.
    """
    if len(raw) <= 2 * limit:  # a field has at least a tag and a byte
        return False
    left = limit
    spans = [(0, len(raw), descriptor)]
    try:
        while spans:
            at, end, kind = spans.pop()
            messages = _message_fields(kind)
            while at < end:
                left -= 1
                if left < 0:
                    return True
                tag, at = _varint(raw, at)
                wire_type = tag & 7
                if wire_type == DELIMITED:
                    size, at = _varint(raw, at)
                    if (inner := messages.get(tag >> 3)) is not None:
                        spans.append((at, min(at + size, end), inner))
                    at += size
                elif wire_type == VARINT:
                    _, at = _varint(raw, at)
                elif wire_type in (FIXED64, FIXED32):
                    at += 8 if wire_type == FIXED64 else 4
                else:
                    return False
    except IndexError:
        pass
    return False


@cache
def _message_fields(kind: Descriptor) -> dict[int, Descriptor]:
    """The types of the fields that are messages, by number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends. Raises IndexError where the bytes end before it does."""
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("malformed varint")
