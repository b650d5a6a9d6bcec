"""A trace: arrival times and lengths of requests. Stored in columns, so that a million requests stay
small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jengine.base.errors import InvalidArgument

OWN_TOKENS = 1 << 30  # from here on, each request has a token of its own
OUTPUT_TOKEN = OWN_TOKENS - 1  # represents every generated token; no prompt contains it
END_TOKEN = -(2**31)  # ends a request before its limit


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """Requests in order of arrival. Optional columns are None if the file has none.

    Attributes:
        arrivals: float64, seconds from the first.
        prompts, outputs: int64, numbers of tokens, at least 1.
        limits: int64, the requests' max_tokens, at least their outputs: they end with an end-of-sequence
            token. None: max_tokens are the outputs.
        prefixes: by request, ids of the first blocks of its prompt; prompts with equal leading ids have equal
            leading tokens.
        block: tokens in such a block.
        priorities: int64; lower runs first, under policy="priority".
        clients: by request, its client.
        loras: by request, the adapter that it uses; None: none.
        ttft_ms, tpot_ms: float64, the request's own targets; nan if it has none.
        left_out: number of rows of the file without an output token, such as failed requests.
    """

    arrivals: np.ndarray
    prompts: np.ndarray
    outputs: np.ndarray
    limits: np.ndarray | None = None
    prefixes: Sequence[tuple[int, ...]] | None = None
    block: int = 1
    priorities: np.ndarray | None = None
    clients: Sequence[str | None] | None = None
    loras: Sequence[str | None] | None = None
    ttft_ms: np.ndarray | None = None
    tpot_ms: np.ndarray | None = None
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrivals[-1] - self.arrivals[0]) if len(self) else 0.0

    def scaled(self, rate: float) -> RequestTrace:
        """These requests, arriving `rate` times as fast.

        Raises:
            InvalidArgument: rate is not above 0.
        """
        if not 0.0 < rate < float("inf"):
            raise InvalidArgument("rate_scale", rate, "must be a number above 0")
        return replace(self, arrivals=self.arrivals / rate)

    def take(self, rows: np.ndarray) -> RequestTrace:
        """The requests at these indices, in ascending order."""
        prefixes = None if self.prefixes is None else [self.prefixes[i] for i in rows]
        clients = None if self.clients is None else [self.clients[i] for i in rows]
        loras = None if self.loras is None else [self.loras[i] for i in rows]
        columns = ("arrivals", "prompts", "outputs", "limits", "priorities", "ttft_ms", "tpot_ms")
        taken: dict[str, Any] = {
            name: None if (column := getattr(self, name)) is None else column[rows] for name in columns
        }
        return replace(self, prefixes=prefixes, clients=clients, loras=loras, **taken)

    def prompt_token_ids(self, row: int) -> list[int]:
        """Artificial tokens for a request's prompt: equal to another prompt's exactly where their prefixes
        are equal.

        Tokens of blocks are numbers from 0 on; the tokens after them are the request's own.
        """
        length, token = int(self.prompts[row]), OWN_TOKENS + row
        if self.prefixes is None:
            return [token] * length
        size = self.block
        known = [id for id in self.prefixes[row] for _ in range(size)] if size > 1 else [*self.prefixes[row]]
        return known[:length] if len(known) >= length else known + [token] * (length - len(known))


def make_trace(
    rows: Sequence[tuple[float, int, int]], *, left_out: int = 0, **columns: object
) -> RequestTrace:
    """A trace of (arrival, prompt tokens, output tokens) rows in any order. Other columns must have the same
    length.

    Raises:
        InvalidArgument: there are no rows.
    """
    if not rows:
        raise InvalidArgument("trace", "no requests", "must hold at least one request with an output")
    table = np.array(rows, np.float64)
    order = np.argsort(table[:, 0], kind="stable")
    trace = RequestTrace(
        arrivals=table[:, 0] - table[:, 0].min(),
        prompts=table[:, 1].astype(np.int64),
        outputs=table[:, 2].astype(np.int64),
        left_out=left_out,
        **columns,  # type: ignore[arg-type]
    )
    return trace.take(order)
