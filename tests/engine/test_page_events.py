"""Page events, as a subscriber receives them over ZeroMQ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.core.images import CONTENT
from jengine.core.page_events import PageEvents
from jengine.core.request import SamplingParams
from jengine.engine import page_events
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ResetPrefixCache
from jengine.engine.page_events import LAST, EventMaker, Group, PageEventPublisher
from jengine.scheduling.pages.block_table import LoraSalt, PageChange
from jengine.scheduling.pages.prefix_index import PrefixIndex
from tests.engine.running import run
from tests.extras import of_extra

zmq = of_extra("dev", "zmq")
ONE = SamplingParams(temperature=0.0, max_tokens=1)
PROMPT = [*range(1, 41)]  # two whole pages of 16 tokens


# vLLM's declarations (vllm/distributed/kv_events.py), as a subscriber decodes with them
class Event(msgspec.Struct, omit_defaults=True, tag=True): ...


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event): ...


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODE = msgspec.msgpack.Decoder(KVEventBatch).decode


@pytest.fixture
def published(tmp_path: Path, make_engine: Callable[..., Engine]) -> Iterator[tuple[Engine, Any]]:
    how = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "topic": "kv@pod@model",
    }
    engine = make_engine(kv_events_config=how)
    context = zmq.Context()
    events, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    events.setsockopt(zmq.SUBSCRIBE, b"kv@")
    for socket, name in ((events, "events"), (replay, "replay")):
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(f"ipc://{tmp_path}/{name}")
    yield engine, (events, replay)
    engine.close()
    context.destroy(linger=0)


def asked(replay: Any, start: int) -> list[tuple[int, KVEventBatch]]:
    """What the replay socket has from a number on."""
    replay.send_multipart((b"", start.to_bytes(8, "big")))
    found = []
    while True:
        empty, topic, number, batch = replay.recv_multipart()
        if number == LAST:
            assert empty == topic == batch == b""
            return found
        assert (empty, topic) == (b"", b"kv@pod@model")
        found.append((int.from_bytes(number, "big"), DECODE(batch)))


def test_a_subscriber_knows_what_is_cached(published: tuple[Engine, Any]) -> None:
    engine, (events, replay) = published
    first = 50
    while not events.poll(100):  # until the subscription has arrived
        run(engine, [([first] * 40, ONE)])
        first += 1
    run(engine, [(PROMPT, ONE)])
    run(engine, [(PROMPT, ONE)])  # a hit stores nothing
    run(engine, [(PROMPT, ONE, "secret")])
    assert engine.do(ResetPrefixCache())
    live: list[tuple[int, KVEventBatch]] = []
    while not live or not isinstance(live[-1][1].events[-1], AllBlocksCleared):
        topic, number, batch = events.recv_multipart()
        assert topic == b"kv@pod@model"
        live.append((int.from_bytes(number, "big"), DECODE(batch)))
    kept = asked(replay, 0)
    assert [number for number, _ in kept] == [*range(len(kept))]
    assert kept[live[0][0] :] == live and asked(replay, len(kept) - 1) == live[-1:]
    assert all(batch.data_parallel_rank == 0 and batch.ts > 1e9 for _, batch in kept)
    found = [event for _, batch in kept for event in batch.events]
    plain, salted = [one for one in found if isinstance(one, BlockStored)][-2:]
    assert plain == BlockStored(
        plain.block_hashes, None, PROMPT[:32], 16, None, "GPU", None, [None, None], 0, "full_attention"
    )
    assert salted.extra_keys == [("secret",), None] and salted.token_ids == plain.token_ids
    hashes = [*plain.block_hashes, *salted.block_hashes]
    assert len({*hashes}) == 4 and all(isinstance(one, int) and 0 <= one < 2**64 for one in hashes)


def test_events_of_images_and_adapters() -> None:
    """Hashes depend on all that a page's content depends on, and on nothing else."""
    changes: list[PageChange] = []
    index = PrefixIndex(4)
    index.changed = changes.append
    image = CONTENT + 7
    for salt in (None, "a", LoraSalt(1, "x", None), LoraSalt(1, "x", "a"), LoraSalt(2, "x", None)):
        parent = index.get(salt, (1, 2, image, image + 1))
        child = index.get(parent, (image + 2, CONTENT + 90, 3, 4))
        for page, block in enumerate((parent, child), len(changes) + 1):
            index.hold(block, 0, page)
    maker = EventMaker(4, [Group("sliding_window", 8)], image_token=99)
    made = maker.events(changes)
    stored = [event for event in made if not isinstance(event, page_events.BlockRemoved)]
    assert made == stored == maker.events(changes) and len(made) == 5
    first, last = made[0], made[3]
    assert isinstance(first, page_events.BlockStored) and isinstance(last, page_events.BlockStored)
    assert first.token_ids == [1, 2, 99, 99, 99, 99, 3, 4]
    rows = [(f"{7:016x}", 2)], [(f"{9:016x}", 0), (f"{90:016x}", 1)]
    assert first.extra_keys == [*rows] and last.extra_keys == [["x", *rows[0], "a"], ["x", *rows[1]]]
    assert (first.kv_cache_spec_kind, first.kv_cache_spec_sliding_window) == ("sliding_window", 8)
    assert len({name for event in made for name in event.block_hashes}) == 10  # type: ignore[union-attr]
    other = PrefixIndex(4)
    assert page_events.hash_of(other.get(None, (1, 2, image, image + 1))) == first.block_hashes[0]
    assert page_events.hash_of(other.get(None, (1, 2, 99, 99))) not in first.block_hashes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enabled": True}, "kv_events_config.enabled=True: unknown; known: enable_kv_cache_events"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events=1: must be true or false"),
        ({"publisher": "kafka"}, "kv_events_config.publisher='kafka': must be zmq or null"),
        ({"endpoint": 5557}, "kv_events_config.endpoint=5557: must be text"),
        ({"buffer_steps": 0}, "buffer_steps=0: must be a whole number, at least 1"),
        ("tcp", "kv_events_config='tcp': must be a JSON object"),
        ([], "must be an object"),
    ],
)
def test_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        EngineConfig.of("demo", {"kv_events_config": given})
    assert message in str(refused.value)


def test_without_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(InvalidArgument, match=r"kv_events_config='tcp:.*needs pip install"):
        PageEventPublisher(PageEvents(), EventMaker(16, []))


def test_without_pages_or_an_address(tmp_path: Path) -> None:
    on = {"enable_kv_cache_events": True}
    with pytest.raises(InvalidArgument, match="enable_prefix_caching=False: must be True with"):
        EngineConfig.of("demo", {"kv_events_config": on, "enable_prefix_caching": False})
    assert (
        PageEvents.of('{"publisher": "zmq"}') is None and PageEvents.of({**on, "publisher": "null"}) is None
    )
    how = PageEvents.of({**on, "endpoint": f"ipc://{tmp_path}/none/events"})
    assert how is not None
    with pytest.raises(InvalidArgument, match=r"kv_events_config\.endpoint.*cannot be used"):
        PageEventPublisher(how, EventMaker(16, []))
