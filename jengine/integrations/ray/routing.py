"""Routes requests to replicas that have probably cached their prefix, unless these have much more work than
others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

FIRST = 512  # characters of a prompt, or of a conversation's first question, in the key
SLACK, SHARE = 4, 1.25  # a replica may have up to SHARE times the mean number of requests plus SLACK


def prefix_key(body: Mapping[str, Any]) -> str:
    """A key for requests with a common prefix. Empty if there is no prompt.

    For a conversation: everything before its first question, and the beginning of that question. So later
    turns are routed to the same replica as earlier ones.
    """
    messages, prompt = body.get("messages"), body.get("prompt", body.get("input"))
    if isinstance(messages, list) and messages:
        first = next(
            (
                i
                for i, message in enumerate(messages)
                if isinstance(message, dict) and message.get("role") == "user"
            ),
            len(messages) - 1,
        )
        text = json.dumps([body.get("tools"), messages[:first]]) + json.dumps(messages[first])[:FIRST]
    elif isinstance(prompt, str):
        text = prompt[:FIRST]
    elif isinstance(prompt, list) and prompt:
        text = json.dumps(prompt[0] if isinstance(prompt[0], list | str) else prompt[:FIRST])[:FIRST]
    else:
        return ""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def ranked(key: str, loads: Mapping[str, int]) -> list[str]:
    """Replicas, the best first, by rendezvous hashing, so that few keys move when replicas change. Overloaded
    ones are last.

    Args:
        loads: number of requests of each replica.
    """
    limit = SLACK + SHARE * sum(loads.values()) / max(len(loads), 1)

    def place(replica: str) -> tuple[bool, bytes]:
        return loads[replica] > limit, hashlib.blake2b(f"{key} {replica}".encode(), digest_size=8).digest()

    return sorted(loads, key=place)


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # ray's types are not checked
    """Ray Serve's interface to `ranked`. The argument `key` of a call is its key; without one, the least
    loaded replica is used.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all of them are full
        key = pending_request.kwargs.get("key") if pending_request is not None else None
        if not key:
            return [candidate_replicas]
        replicas = {replica.replica_id.to_full_id_str(): replica for replica in candidate_replicas}
        loads = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in replicas.items()
        }
        return [[replicas[name]] for name in ranked(key, loads)]
