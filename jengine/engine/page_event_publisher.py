"""Sends events of pages to subscribers, over ZeroMQ."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from queue import Empty, Queue

import msgspec

from jengine.base.errors import InvalidArgument
from jengine.core.page_events import NAME, PageEvents
from jengine.engine.page_events import EventMaker, KVEventBatch
from jengine.scheduling.pages.page_change import PageChange

log = logging.getLogger(__name__)
LAST = (-1).to_bytes(8, "big", signed=True)  # in place of a number: the replay is complete
MOST = 1000  # changes in a batch


class PageEventPublisher:
    """Publishes changes from a separate thread, which also makes the hashes.

    Each message has three frames: the topic, the batch's number (8 bytes, big endian, from 0) and the batch.
    A subscriber that misses one sends the number from which it wants them to replay_endpoint, from a DEALER
    socket. The answers are messages like the missed ones; the last one has the number -1 and no batch.

    Args:
        rank: among several engines that share a model.

    Raises:
        InvalidArgument: pyzmq is missing, or an address cannot be used.
    """

    def __init__(self, config: PageEvents, maker: EventMaker, rank: int = 0) -> None:
        try:
            import zmq
        except ModuleNotFoundError as missing:
            raise InvalidArgument.needs_extra(NAME, config.endpoint, "fleets", missing) from None
        self._maker, self._topic, self._rank = maker, config.topic.encode(), rank
        self._changes: Queue[PageChange | None] = Queue(config.max_queue_size)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._out.set_hwm(config.hwm)
        bound = (
            "*" in config.endpoint
            or "::" in config.endpoint
            or config.endpoint.startswith(("ipc:", "inproc:"))
        )
        self._replay = None if config.replay_endpoint is None else self._context.socket(zmq.ROUTER)
        try:
            name = "endpoint"
            (self._out.bind if bound else self._out.connect)(config.endpoint)
            if self._replay is not None and config.replay_endpoint is not None:
                name = "replay_endpoint"
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidArgument(
                f"{NAME}.{name}", getattr(config, name), f"cannot be used: {error}"
            ) from None
        self._threads = [threading.Thread(target=self._publish, name="page-events", daemon=True)]
        if self._replay is not None:
            again = threading.Thread(target=self._answer, name="page-events-replay", daemon=True)
            self._threads.append(again)
        for thread in self._threads:
            thread.start()

    def note(self, change: PageChange) -> None:
        """Queues a change. Waits if max_queue_size changes have not been published yet."""
        self._changes.put(change)

    def close(self) -> None:
        """Publishes what is queued, and ends. May be called repeatedly."""
        if not self._context.closed:
            self._changes.put(None)
            self._threads[0].join()
            self._context.term()  # ends the other thread
            for thread in self._threads:
                thread.join()

    def _publish(self) -> None:
        pack, number, open_ = msgspec.msgpack.Encoder().encode, 0, True
        while open_:
            changes: list[PageChange] = []
            change = self._changes.get()
            while change is not None:
                changes.append(change)
                if len(changes) == MOST:
                    break
                try:
                    change = self._changes.get_nowait()
                except Empty:
                    break
            else:
                open_ = False
            if changes:
                try:
                    events = self._maker.events(changes)
                    frames = number.to_bytes(8, "big"), pack(KVEventBatch(time.time(), events, self._rank))
                    with self._lock:
                        self._kept.append(frames)
                    self._out.send_multipart((self._topic, *frames))
                except Exception:  # the engine must not wait for a thread that has ended
                    log.exception("page events are lost: subscribers see that number %d is missing", number)
                number += 1
        self._out.close(linger=1000)

    def _answer(self) -> None:
        import zmq

        assert self._replay is not None
        try:
            while True:
                who, *between, start = self._replay.recv_multipart()
                if len(start) != 8 or between not in ([], [b""]):
                    log.warning("a request for events to replay is invalid: it must be a number of 8 bytes")
                    continue
                with self._lock:
                    sent = [*self._kept]
                for number, batch in sent:
                    if number >= start:  # of equal length
                        self._replay.send_multipart((who, *between, self._topic, number, batch))
                self._replay.send_multipart((who, *between, b"", LAST, b""))
        except zmq.ContextTerminated:
            self._replay.close(linger=0)
