"""Counts the fields of a serialized message before it is parsed.

Protobuf parses a message in one call that holds the interpreter's lock. For 4 MB of empty submessages this
takes 0.1 s, during which the event loop serves no other request. Requests within jengine's limits have few
fields, since token ids are packed into one.
"""

from __future__ import annotations

from functools import cache

from google.protobuf.descriptor import Descriptor

MAX_FIELDS = 2**15  # in a request and its submessages
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5  # wire types


def has_too_many_fields(raw: bytes, descriptor: Descriptor, limit: int = MAX_FIELDS) -> bool:
    """Whether a message of this type has more than `limit` fields. Malformed messages are left to the parser.

    Stops at the limit, so it takes at most about 20 ms. Short messages are not scanned.
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
    """The types of message fields, by number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number, and the position after it. Raises IndexError if the bytes end before."""
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
