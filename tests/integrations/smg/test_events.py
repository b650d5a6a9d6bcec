"""Page events for smg: relayed without gaps, whatever a subscriber has missed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jengine.core.images import CONTENT
from jengine.engine.page_events import EventMaker, Group, KVEventBatch, hash_of
from jengine.scheduling.pages.block_table import CLEARED, HOST, LoraSalt, PageChange
from jengine.scheduling.pages.prefix_index import PrefixIndex
from jengine.serving.calls.errors import Refusal
from jengine.serving.calls.model_provider import EventSource
from tests.extras import of_extra

pb = of_extra("smg", "smg_grpc_proto.generated.common_pb2")
zmq = of_extra("smg", "zmq")

from jengine.integrations.smg import events  # noqa: E402


def batch(number: int, seconds: float | None = None) -> bytes:
    """A batch without events, made at this time; by default as many seconds as its number."""
    return msgspec.msgpack.encode(KVEventBatch(number if seconds is None else seconds, []))


class Engine:
    """Keeps batches for replay, and publishes some of them live."""

    def __init__(self, folder: Path, *, replay: bool = True) -> None:
        self.source = EventSource(
            f"ipc://{folder}/events", f"ipc://{folder}/replay" if replay else None, "kv"
        )
        self.kept: list[tuple[int, bytes]] = []

    async def run(self, test: Callable[[events.Relay], Awaitable[None]]) -> None:
        context = zmq.asyncio.Context()
        self._live, self._replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self._live.bind(self.source.endpoint)
        answering = None
        if self.source.replay_endpoint is not None:
            self._replay.bind(self.source.replay_endpoint)
            answering = asyncio.create_task(self._answer())
        try:
            await test(events.Relay(self.source))
        finally:
            if answering is not None:
                answering.cancel()
            context.destroy(linger=0)

    async def _answer(self) -> None:
        while True:
            who, _, start = await self._replay.recv_multipart()
            for number, batch in self.kept:
                if number >= int.from_bytes(start, "big"):
                    await self._replay.send_multipart((who, b"", b"kv", number.to_bytes(8, "big"), batch))
            await self._replay.send_multipart((who, b"", b"", events.LAST, b""))

    async def subscribed(self) -> None:
        assert (await self._live.recv())[:1] == b"\x01"

    async def publish(self, number: int, seconds: float | None = None) -> None:
        await self._live.send_multipart((b"kv", number.to_bytes(8, "big"), batch(number, seconds)))

    def keep(self, *numbers: int) -> None:
        self.kept = [(number, batch(number)) for number in numbers]


async def numbers(batches: Any, count: int) -> list[int]:
    """The next numbers, without silences."""
    found: list[int] = []
    while len(found) < count:
        if (one := await anext(batches)) is not None:
            assert one[1] == batch(one[0])
            found.append(one[0])
    return found


def test_a_gap_is_filled_from_the_replay(tmp_path: Path) -> None:
    engine = Engine(tmp_path)

    async def test(relay: events.Relay) -> None:
        engine.keep(0, 1, 2)
        async with aclosing(relay.batches(0)) as batches:
            assert await numbers(batches, 3) == [0, 1, 2]
            next_ones = asyncio.create_task(numbers(batches, 4))
            await engine.subscribed()
            engine.keep(*range(7))
            await engine.publish(0)  # was replayed
            await engine.publish(2)
            await engine.publish(5)  # 3 and 4 were missed
            await engine.publish(6)
            assert await next_ones == [3, 4, 5, 6]
            engine.keep(*range(9))  # 7 and 8 did not arrive, and nothing follows
            assert await numbers(batches, 2) == [7, 8]
            assert await anext(batches) is None
        async with aclosing(relay.batches(7)) as batches:  # a subscriber that has had 0 to 6
            assert await numbers(batches, 2) == [7, 8]

    asyncio.run(engine.run(test))


@pytest.mark.parametrize(
    ("start", "before", "after", "live", "code", "message"),
    [
        (2, (5, 6), (), None, "OUT_OF_RANGE", "the first batch that is kept is 5"),
        (0, (0, 1), (5, 6), 6, "DATA_LOSS", "number 2 is missing"),
        (0, (0, 1), (0,), 0, "DATA_LOSS", "the engine has started again"),
        (0, (0, 1, 2), (0, 1), 1, "DATA_LOSS", "the engine has started again"),
        (9, (), (0,), 0, "DATA_LOSS", "the engine has started again"),
    ],
)
def test_losses_are_reported(
    tmp_path: Path,
    start: int,
    before: tuple[int, ...],
    after: tuple[int, ...],
    live: int | None,
    code: str,
    message: str,
) -> None:
    engine = Engine(tmp_path)

    async def test(relay: events.Relay) -> None:
        engine.keep(*before)
        async with aclosing(relay.batches(start)) as batches:
            if live is not None:
                assert await numbers(batches, len(before)) == [*before]
            rest = asyncio.create_task(numbers(batches, 9))
            if live is not None:
                await engine.subscribed()
                engine.keep(*after)
                await engine.publish(live, 100.0)
            with pytest.raises(Refusal) as lost:
                await rest
        assert lost.value.code.name == code and message in lost.value.message

    asyncio.run(engine.run(test))


def test_without_a_replay(tmp_path: Path) -> None:
    engine = Engine(tmp_path, replay=False)

    async def test(relay: events.Relay) -> None:
        async with aclosing(relay.batches(0)) as batches:
            first = asyncio.create_task(numbers(batches, 2))
            await engine.subscribed()
            await engine.publish(4)
            await engine.publish(5)
            assert await first == [4, 5]
            await engine.publish(7)
            with pytest.raises(Refusal, match="number 6 is missing"):
                await anext(batches)
        with pytest.raises(Refusal, match="replay_endpoint"):
            await numbers(relay.batches(3), 1)

    asyncio.run(engine.run(test))


def test_messages() -> None:
    changes: list[PageChange] = []
    index = PrefixIndex(4)
    index.changed = changes.append
    image = CONTENT + 7
    parent = index.get(LoraSalt(3, "french", "secret"), (1, 2, image, image + 1))
    child = index.get(parent, (3, 4, 5, 6))
    index.hold(parent, 0, 1)
    index.hold(child, 0, 2)
    changes.append(PageChange("stored", child, 0, HOST))
    index.forget(0, 2)
    changes.append(CLEARED)
    changed = EventMaker(4, [Group("sliding_window", 8)], 99).events(changes)
    batch = events.batch_of(6, msgspec.msgpack.encode(KVEventBatch(2.5, changed, 0)))
    assert (batch.sequence_number, batch.timestamp, batch.dp_rank) == (6, 2.5, 0)
    device, host, removed, cleared = batch.events
    names = [name - 2**64 if name >= 2**63 else name for name in map(hash_of, (parent, child))]
    assert [block.block_hash for block in device.stored.blocks] == names
    assert [list(block.token_ids) for block in device.stored.blocks] == [[1, 2, 99, 99], [3, 4, 5, 6]]
    assert (device.stored.lora_name, device.stored.cache_salt) == ("french", "secret")
    assert (device.stored.kv_cache_spec_kind, device.stored.kv_cache_spec_sliding_window) == (
        "sliding_window",
        8,
    )
    first = device.stored.blocks[0].extra_keys
    assert [key.WhichOneof("key") for key in first] == ["text", "multimodal", "text"]
    assert not device.stored.HasField("parent_block_hash") and host.stored.parent_block_hash == names[0]
    assert (host.stored.tier, host.stored.blocks[0].cache_level) == (pb.KV_CACHE_TIER_HOST, 1)
    assert list(removed.removed.block_hashes) == names[1:] and removed.removed.tier == pb.KV_CACHE_TIER_DEVICE
    assert cleared.HasField("cleared") and len({event.event_id for event in batch.events}) == 4
    assert events.near("tcp://*:5557") == events.near("tcp://0.0.0.0:5557") == "tcp://127.0.0.1:5557"
    assert events.near("tcp://10.0.0.1:5557") == "tcp://10.0.0.1:5557"
