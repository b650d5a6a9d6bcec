"""Limits on the parameters of a request, set by the server and the key."""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import NamedTuple
from urllib.parse import unquote

import grpc

from jengine import InvalidArgument, SamplingParams
from jengine.serving.calls.errors import Refusal
from jengine.serving.config import ServerConfig
from jengine.serving.guards.security import current_key
from jengine.spi import GenerationParams


class RequestBounds(NamedTuple):
    """The server's limits; None: no limit.

    Attributes:
        max_tokens: for each completion.
        logprobs: log probabilities in an answer.
        seconds: from a request's arrival to its end.
    """

    max_tokens: int | None
    seconds: float | None
    logprobs: int

    @classmethod
    def of(cls, config: ServerConfig) -> RequestBounds:
        return cls(config.max_tokens_limit, config.max_request_seconds, config.max_answer_logprobs)

    def params[P: GenerationParams](self, params: P) -> P:
        """The parameters, with the server's max_tokens if they set none: log probabilities of that many fill
        at most half an answer.

        Raises:
            InvalidArgument: they exceed the server's limit.
        """
        if params.max_tokens is None:
            limits = [] if self.max_tokens is None else [self.max_tokens]
            if isinstance(params, SamplingParams) and params.logprobs is not None:
                limits.append(
                    max(self.logprobs // 2 // (params.n * (params.logprobs + 1)), params.min_tokens, 1)
                )
            return dataclasses.replace(params, max_tokens=min(limits)) if limits else params
        if self.max_tokens is not None and params.max_tokens > self.max_tokens:
            raise InvalidArgument(
                "max_tokens",
                params.max_tokens,
                f"at most {self.max_tokens} on this server (max_tokens_limit)",
            )
        return params

    def timeout(self, seconds: float | None) -> float | None:
        """The request's timeout, or the server's.

        Raises:
            InvalidArgument: it is longer than the server's.
        """
        if self.seconds is None or seconds is None:
            return self.seconds if seconds is None else seconds
        if seconds > self.seconds:
            raise InvalidArgument(
                "timeout", seconds, f"at most {self.seconds:g} seconds on this server (max_request_seconds)"
            )
        return seconds


def check_priority(priority: int) -> None:
    """Raises Refusal if the key does not allow this priority. Without keys, all priorities are allowed."""
    key = current_key.get()
    if key is not None and type(priority) is int and priority < key.min_priority:
        message = (
            f"priority={priority}: at least {key.min_priority} with this key (its min_priority; lower runs"
            " first)"
        )
        raise Refusal(grpc.StatusCode.PERMISSION_DENIED, message, cause="priority")


def sees_all_clients() -> bool:
    """Whether the caller may see other clients' activity: its key allows it, or there are no keys."""
    key = current_key.get()
    return key is None or key.admin == 1


def check_admin(peer: str) -> None:
    """Raises Refusal unless the caller is an administrator: its key has admin=1 or, without keys, it is on
    this machine.

    Args:
        peer: address of the caller in gRPC's form: "ipv4:127.0.0.1:12345", "ipv6:%5B::1%5D:12345".
    """
    if current_key.get() is None and not is_loopback(peer):
        message = "without API keys, only clients on the server's machine may do this"
    elif not sees_all_clients():
        message = "this needs an API key whose line in the keys file has admin=1"
    else:
        return
    raise Refusal(grpc.StatusCode.PERMISSION_DENIED, message, cause="admin")


def is_loopback(peer: str) -> bool:
    """Whether a peer, in gRPC's form, is on this machine. False if it is not an address."""
    kind, _, rest = unquote(peer).partition(":")
    try:
        address = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return kind in ("ipv4", "ipv6") and (mapped or address).is_loopback
