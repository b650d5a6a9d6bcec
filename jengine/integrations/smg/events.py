"""Page events of an engine, relayed to one subscriber of smg's worker service. Needs the extra smg."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import contextmanager
from typing import Any

import grpc
import msgspec
import zmq
import zmq.asyncio
from smg_grpc_proto.generated import common_pb2 as pb

from jengine.serving.calls.errors import Refusal
from jengine.serving.calls.model_provider import EventSource

SILENCE_SECONDS = 1.0  # after which the load is sent, and lost events are looked for
REPLAY_SECONDS = 5.0
LAST = (-1).to_bytes(8, "big", signed=True)
TIERS = {"GPU": pb.KV_CACHE_TIER_DEVICE, "CPU": pb.KV_CACHE_TIER_HOST}
Numbered = tuple[int, bytes]  # a batch with its number
_decode = msgspec.msgpack.Decoder().decode


def lost(what: str) -> Refusal:
    """The subscriber must forget what it knows, and subscribe again."""
    return Refusal(grpc.StatusCode.DATA_LOSS, f"page events are lost: {what}")


class Relay:
    """The batches of an engine from a number on, without gaps.

    A subscriber that begins at 0 gets all batches that the engine keeps for replay, if the first one is still
    among them; otherwise only what follows.
    """

    def __init__(self, source: EventSource) -> None:
        self._source, self._context = source, zmq.asyncio.Context.instance()

    @contextmanager
    def _socket(self, kind: int, endpoint: str, topic: str | None = None) -> Any:
        socket = self._context.socket(kind)
        try:
            if topic is not None:
                socket.setsockopt_string(zmq.SUBSCRIBE, topic)
            socket.connect(near(endpoint))
            yield socket
        finally:
            socket.close(linger=0)

    async def batches(self, start: int) -> AsyncIterator[Numbered | None]:
        """The batches; None after each second of silence.

        Raises:
            Refusal: OUT_OF_RANGE, the first batches are not kept any more; DATA_LOSS, later ones are lost.
        """
        with self._socket(zmq.SUB, self._source.endpoint, self._source.topic) as live:
            replayed = await self._again(start)
            if start and replayed and replayed[0][0] != start:
                raise Refusal(
                    grpc.StatusCode.OUT_OF_RANGE, f"the first batch that is kept is {replayed[0][0]}"
                )
            if start and self._source.replay_endpoint is None:
                raise Refusal(grpc.StatusCode.OUT_OF_RANGE, "batches are kept with replay_endpoint only")
            following, last = (replayed[-1][0] + 1, replayed[-1][1]) if replayed else (start, b"")
            if replayed and replayed[0][0] == start:
                for again in replayed:
                    yield again
            known = self._source.replay_endpoint is not None
            while True:
                if not await live.poll(int(1000 * SILENCE_SECONDS)):
                    for again in await self._again(following):  # before the subscription, or the last ones
                        following, last = self._checked(again, following), again[1]
                        yield again
                    yield None
                    continue
                _, count, batch = await live.recv_multipart()
                number = int.from_bytes(count, "big")
                if number < following:
                    if not last or _decode(batch)[0] > _decode(last)[0]:  # made later
                        raise lost("the engine has started again")
                    continue  # replayed already
                if number > following and known:
                    for again in await self._again(following):
                        if again[0] < number:
                            following = self._checked(again, following)
                            yield again
                if known:
                    self._checked((number, batch), following)
                known, following, last = True, number + 1, batch
                yield number, batch

    def _checked(self, batch: Numbered, following: int) -> int:
        """The number after this one, which must be the following."""
        if batch[0] != following:
            raise lost(f"number {following} is missing")
        return following + 1

    async def _again(self, start: int) -> list[Numbered]:
        """The batches from a number on that the engine keeps."""
        if self._source.replay_endpoint is None:
            return []
        numbered: list[Numbered] = []
        with self._socket(zmq.DEALER, self._source.replay_endpoint) as replay:
            await replay.send_multipart((b"", start.to_bytes(8, "big")))
            try:
                async with asyncio.timeout(REPLAY_SECONDS):
                    while True:
                        *_, number, batch = await replay.recv_multipart()
                        if number == LAST:
                            return numbered
                        numbered.append((int.from_bytes(number, "big"), batch))
            except TimeoutError:
                raise lost("the engine does not answer") from None


def near(endpoint: str) -> str:
    """The address at which this machine reaches an endpoint that an engine on it has bound."""
    for every in ("*", "0.0.0.0", "[::]"):
        endpoint = endpoint.replace(f"//{every}:", "//127.0.0.1:")
    return endpoint


def batch_of(number: int, packed: bytes) -> pb.KvEventBatch:
    """A batch as a message."""
    seconds, events, *rank = _decode(packed)
    message = pb.KvEventBatch(sequence_number=number, timestamp=seconds, dp_rank=rank[0] if rank else 0)
    for index, event in enumerate(events):
        added = message.events.add(event_id=(number << 16) + index + 1)
        if event["type"] == "BlockStored":
            _stored(added.stored, event)
        elif event["type"] == "BlockRemoved":
            added.removed.block_hashes.extend(map(_signed, event["block_hashes"]))
            _place(added.removed, event)
        else:
            added.cleared.SetInParent()
    return message


def _stored(to: pb.KvBlocksStored, event: dict[str, Any]) -> None:
    size, host = event["block_size"], event["medium"] == "CPU"
    salt = None
    for index, name in enumerate(event["block_hashes"]):
        ids = event["token_ids"][index * size : (index + 1) * size]
        block = to.blocks.add(block_hash=_signed(name), token_ids=ids, block_size=size)
        if event["lora_id"] is not None:
            block.lora_id = event["lora_id"]
        if host:
            block.cache_level = 1
        keys = event["extra_keys"][index] or ()
        for key in keys:
            if isinstance(key, str):
                block.extra_keys.add(text=key)
            else:
                block.extra_keys.add(multimodal=pb.KvMultimodalKey(identifier=key[0], offset=key[1]))
        for key in keys[event["lora_name"] is not None :]:  # the adapter's name comes first
            salt = key if isinstance(key, str) else salt
    if event["parent_block_hash"] is not None:
        to.parent_block_hash = _signed(event["parent_block_hash"])
    if event["lora_name"] is not None:
        to.lora_name = event["lora_name"]
    if salt is not None:
        to.cache_salt = salt
    to.kv_cache_spec_kind = event["kv_cache_spec_kind"]
    if (window := event.get("kv_cache_spec_sliding_window")) is not None:
        to.kv_cache_spec_sliding_window = window
    _place(to, event)


def _place(to: pb.KvBlocksStored | pb.KvBlocksRemoved, event: dict[str, Any]) -> None:
    to.tier, to.medium, to.group_idx = TIERS[event["medium"]], event["medium"], event["group_idx"]
    to.locality = pb.KV_CACHE_LOCALITY_LOCAL


def _signed(name: int) -> int:
    return name - 2**64 if name >= 2**63 else name
