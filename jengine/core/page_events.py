"""The option `kv_events_config`: where an engine publishes which pages its prefix cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from jengine.base.errors import InvalidArgument
from jengine.base.options import check_options, is_a, parse_object, whole

NAME = "kv_events_config"
SWITCHES = ("enable_kv_cache_events", "publisher")
text = is_a(str, "must be text")


@dataclass(frozen=True, slots=True)
class PageEvents:
    """A checked `kv_events_config` that publishes. Names and defaults as in vLLM.

    Attributes:
        endpoint: ZeroMQ address of the events. One with * or ::, ipc:// or inproc:// is bound, others are
            connected to.
        replay_endpoint: address, bound, where subscribers ask for batches that they have missed.
        buffer_steps: batches that are kept for them.
        hwm: messages that wait for a slow subscriber, before further ones are dropped for it.
        max_queue_size: events that wait to be published, before the engine waits.
        topic: the first frame of each message.
    """

    endpoint: Annotated[str, text] = "tcp://*:5557"
    replay_endpoint: Annotated[str | None, text] = None
    buffer_steps: Annotated[int, whole(1)] = 10_000
    hwm: Annotated[int, whole(0)] = 100_000
    max_queue_size: Annotated[int, whole(1)] = 100_000
    topic: Annotated[str, text] = ""

    @classmethod
    def of(cls, value: Mapping[str, Any] | str | None) -> PageEvents | None:
        """Reads the option: an object, or one as JSON. Returns None if nothing is to be published.

        Raises:
            InvalidArgument: naming the field and its limit.
        """
        if value is None:
            return None
        fields = {key: field for key, field in parse_object(NAME, value).items() if field is not None}
        known = (*SWITCHES, *cls.__dataclass_fields__)
        for key in fields:
            if key not in known:
                raise InvalidArgument(f"{NAME}.{key}", fields[key], f"unknown; known: {', '.join(known)}")
        on, publisher = fields.pop(SWITCHES[0], False), fields.pop(SWITCHES[1], "zmq")
        if not isinstance(on, bool):
            raise InvalidArgument(f"{NAME}.{SWITCHES[0]}", on, "must be true or false")
        if publisher not in ("zmq", "null"):
            raise InvalidArgument(f"{NAME}.publisher", publisher, "must be zmq or null")
        events = cls(**fields)
        check_options(events, f"{NAME}.")
        return events if on and publisher == "zmq" else None
