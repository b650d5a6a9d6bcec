"""Names of blocks and pages for others (other processes, later starts, subscribers), and changes of the
prefix cache as events in vLLM's format.

Names of the events and of their fields are vLLM's (`vllm.distributed.kv_events`). A batch is an array, an
event a map, as in vLLM since 0.24.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple

import jax
import msgspec

from jengine.base.errors import InvalidArgument
from jengine.core.images import CONTENT
from jengine.core.page_events import NAME, PageEvents
from jengine.core.weights import FIRST_VERSION, Version
from jengine.execution.spec import ExecutionSpec
from jengine.models.cache import CacheGroup
from jengine.models.config import ModelConfig
from jengine.scheduling.pages.block_table import Block, LoraSalt, PageChange, Salt
from jengine.stores.memory import NAME_BYTES

FORMAT = 1  # changes when pages or names mean something else
NO_MATTER = ("eos_token_ids", "shards", "expert_shards")  # of a model's configuration
SAMPLES, SAMPLE_BYTES = 1024, 4096  # of a large file of weights that its identity reads


def digest_of(block: Block) -> bytes:
    """A digest of a block's tokens, images, prefix, cache salt and adapter: NAME_BYTES, the same in every
    process. An adapter counts as another one when it is loaded again.
    """
    unnamed: list[Block] = []
    parent: Block | Salt = block
    while isinstance(parent, Block) and parent.digest is None:
        unnamed.append(parent)
        parent = parent.parent
    before = parent.digest if isinstance(parent, Block) else _of_salt(parent)
    assert before is not None
    for unnamed_block in reversed(unnamed):
        before = unnamed_block.digest = _following(before, unnamed_block.tokens)
    return before


def digests(salt: Salt, tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    """The digests of a sequence's whole blocks, in order; see `digest_of`."""
    before = _of_salt(salt)
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        before = _following(before, tokens[start : start + page_size])
        yield before


def _of_salt(salt: Salt) -> bytes:
    return _digest(repr(salt).encode())  # of a fixed length, so that no salt can be continued by tokens


def _following(before: bytes, tokens: Iterable[int]) -> bytes:
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=NAME_BYTES).digest()


class PageNames:
    """Names of pages in stores: engines whose pages are interchangeable have equal names for them.

    Args:
        weights: identity of the first weights; see `files_digest`.
    """

    def __init__(self, spec: ExecutionSpec, weights: str) -> None:
        self._facts, self._own = {**facts_of(spec), "weights": weights}, secrets.token_hex(16)

    def space(self, version: Version = FIRST_VERSION) -> bytes:
        """What the names of all pages have in common that were computed with these weights. Weights that
        replaced the first ones have names that no other engine knows: their contents are not compared.
        """
        facts = self._facts if version == FIRST_VERSION else {**self._facts, "version": [self._own, version]}
        return _digest(json.dumps(facts, sort_keys=True, default=str).encode())


def page_name(space: bytes, block: bytes, group: int) -> bytes:
    """The name of a block's page of a cache group."""
    return _digest(space + block + group.to_bytes(4, "big"))


def facts_of(spec: ExecutionSpec) -> dict[str, Any]:
    """What the contents of pages depend on, besides tokens and weights. The layout is that of all devices
    together, so engines with different numbers of devices share pages, unless kv heads are repeated.
    """
    page = [[list(leaf.shape), str(leaf.dtype)] for leaf in jax.tree.leaves(spec.page)]
    return {
        "format": FORMAT,
        "model": _plain(spec.model.config),
        "dtype": str(spec.model.dtype),
        "quantization": spec.model.weights,
        "cache": str(spec.cache_dtype),
        "page_size": spec.page_size,
        "page": page,
        "groups": [[group.kind, group.window, group.pool] for group in spec.cached],
        "draft": None if spec.draft is None else _plain(spec.draft.config),
        "max_model_len": spec.max_model_len,  # some forms of RoPE depend on it
        # then all pages come from the same programs
        "programs": spec.fingerprint() if spec.table.batch_invariant else None,
    }


def _plain(model: ModelConfig) -> dict[str, Any]:
    return {name: fact for name, fact in model.plain().items() if name not in NO_MATTER}


def files_digest(folder: Path, more: Iterable[Path] = ()) -> str:
    """Identity of a model's files by their names and contents: of large files, the size and evenly spaced
    samples of the contents. Takes no longer than reading a few megabytes of each.
    """
    files = [folder] if folder.is_file() else sorted(path for path in folder.iterdir() if path.is_file())
    whole = hashlib.blake2b(digest_size=NAME_BYTES)
    for file in (*files, *more):
        size = file.stat().st_size
        whole.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            step = max(size // SAMPLES, SAMPLE_BYTES)
            for at in range(0, size, step):
                data.seek(at)
                whole.update(data.read(min(SAMPLE_BYTES, size - at)))
            data.seek(max(size - SAMPLE_BYTES, 0))
            whole.update(data.read(SAMPLE_BYTES))
    return whole.hexdigest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=NAME_BYTES).digest()


KINDS = {
    "full": "full_attention",
    "latent": "mla_attention",
    "window": "sliding_window",
    "state": "mamba",
}  # vLLM's names of cache groups
log = logging.getLogger(__name__)


class _Event(msgspec.Struct, omit_defaults=True, tag=True):
    """An event of a block."""


class BlockStored(_Event):
    """Blocks that follow one another can be found."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event):
    """Blocks cannot be found any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """No block can be found any more."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """What changed, in order. ts: seconds since the epoch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Group(NamedTuple):
    """A cache group by vLLM's names."""

    kind: str
    window: int | None = None

    @classmethod
    def of(cls, group: CacheGroup) -> Group:
        """Describe a model's cache group."""
        return cls(KINDS[group.kind], group.window)


def hash_of(block: Block) -> int:
    """A block's name in events: the first 64 bits of its digest."""
    return int.from_bytes(digest_of(block)[:8], "big")


class EventMaker:
    """Makes events from changes.

    Args:
        page_size: tokens of a block.
        groups: the model's cache groups.
        image_token: id in prompts where an image's content stands.
    """

    def __init__(self, page_size: int, groups: Sequence[Group], image_token: int = 0) -> None:
        self._page_size, self._groups, self._image_token = page_size, groups, image_token

    def events(self, changes: Iterable[PageChange]) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """The events of consecutive changes. Blocks that follow one another share an event."""
        made: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        growing: dict[tuple[int, str], BlockStored | BlockRemoved] = {}  # events that may take more blocks
        before = ""
        for change in changes:
            if change.kind != before:
                growing, before = {}, change.kind
            if change.block is None:
                made.append(AllBlocksCleared())
                continue
            key, block, name = (change.group, change.medium), change.block, hash_of(change.block)
            event = growing.get(key)
            if change.kind == "removed":
                if event is None:
                    made.append(growing.setdefault(key, BlockRemoved([], change.medium, change.group)))
                growing[key].block_hashes.append(name)
                continue
            parent = hash_of(block.parent) if isinstance(block.parent, Block) else None
            if not isinstance(event, BlockStored) or parent is None or event.block_hashes[-1] != parent:
                event = growing[key] = self._stored(change, block, parent)
                made.append(event)
            event.block_hashes.append(name)
            event.token_ids += [id if id < CONTENT else self._image_token for id in block.tokens]
            assert event.extra_keys is not None
            event.extra_keys.append(_extra_keys(block))
        return made

    def _stored(self, change: PageChange, block: Block, parent: int | None) -> BlockStored:
        """An event that no block is in yet."""
        group, salt = self._groups[change.group], salt_of(block)
        number, name = (salt.number, salt.name) if isinstance(salt, LoraSalt) else (None, None)
        return BlockStored(
            [], parent, [], self._page_size, number, change.medium, name, [], change.group, *group
        )


def salt_of(block: Block) -> Salt:
    parent: Block | Salt = block
    while isinstance(parent, Block):
        parent = parent.parent
    return parent


def _extra_keys(block: Block) -> list[Any] | None:
    """What a block's hash depends on besides tokens, as in vLLM: adapter, images, the first cache salt."""
    keys: list[Any] = []
    salt = salt_of(block)
    if isinstance(salt, LoraSalt):
        keys.append(salt.name)
        salt = salt.salt
    content = [(at, id - CONTENT) for at, id in enumerate(block.tokens) if id >= CONTENT]
    for _, rows in groupby(content, lambda row: row[1] - row[0]):  # rows of an image have consecutive ids
        at, first = next(rows)
        keys.append((f"{first:016x}", at))
    if salt is not None and not isinstance(block.parent, Block):
        keys.append(salt)
    return keys or None


LAST = (-1).to_bytes(8, "big", signed=True)  # in place of a number: the replay is complete
MOST = 1000  # changes in a batch


class PageEventPublisher:
    """Publishes changes from a separate thread, which also makes the hashes.

    Each message has three frames: the topic, the batch's number (8 bytes, big endian, from 0) and the batch.
    A subscriber that misses one sends the number from which it wants them to replay_endpoint, from a DEALER
    socket. The answers are messages like the missed ones; the last one has the number -1 and no batch.

    Raises:
        InvalidArgument: pyzmq is missing, or an address cannot be used.
    """

    def __init__(self, config: PageEvents, maker: EventMaker) -> None:
        try:
            import zmq
        except ModuleNotFoundError as missing:
            raise InvalidArgument.needs_extra(NAME, config.endpoint, "fleets", missing) from None
        self._maker, self._topic = maker, config.topic.encode()
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
                    frames = number.to_bytes(8, "big"), pack(KVEventBatch(time.time(), events, 0))
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
