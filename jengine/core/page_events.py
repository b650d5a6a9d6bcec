"""The option `kv_events_config`: where an engine publishes which pages its prefix cache holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jengine.base.checks import check_whole
from jengine.base.errors import InvalidArgument

NAME = "kv_events_config"
SWITCHES = ("enable_kv_cache_events", "publisher")


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

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def of(cls, value: Mapping[str, Any] | str | None) -> PageEvents | None:
        """Reads the option: an object, or one as JSON. Returns None if nothing is to be published.

        Raises:
            InvalidArgument: naming the field and its limit.
        """
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise InvalidArgument(NAME, value, "must be a JSON object") from None
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise InvalidArgument(NAME, value, "must be an object")
        fields = {key: given for key, given in value.items() if given is not None}
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
        for name in ("endpoint", "replay_endpoint", "topic"):
            text = getattr(events, name)
            if not isinstance(text, str) and not (text is None and name == "replay_endpoint"):
                raise InvalidArgument(f"{NAME}.{name}", text, "must be text")
        check_whole(f"{NAME}.buffer_steps", events.buffer_steps, 1, None)
        check_whole(f"{NAME}.hwm", events.hwm, 0, None)
        check_whole(f"{NAME}.max_queue_size", events.max_queue_size, 1, None)
        return events if on and publisher == "zmq" else None
