"""Ends of requests without an answer, which must not look like one. docs/service/endings.md has them all."""

from __future__ import annotations

from typing import Literal

import grpc

from jengine import RequestOutput
from jengine.serving.calls.errors import Refusal
from jengine.serving.calls.model_provider import RESTART_SECONDS

# Aborts that an API shows as the end of an answer: only those that its client or an administrator has asked
# for (`Abort`, `Pause`), or also those by the server.
Aborts = Literal["none", "asked for", "all"]
CODES = {  # by the reason for an abort
    "timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
    "rejected": grpc.StatusCode.DEADLINE_EXCEEDED,  # its targets for latency cannot be met
    "shutdown": grpc.StatusCode.UNAVAILABLE,
    "unloaded": grpc.StatusCode.NOT_FOUND,  # its adapter
}


def check_ending(output: RequestOutput, aborts: Aborts) -> None:
    """Raises Refusal if a completion has ended with an error, or was aborted in a way that the API does not
    show.
    """
    for completion in output.outputs:
        ended, why = completion.finish_reason, completion.stop_reason
        shown = aborts == "all" or (aborts == "asked for" and why not in CODES)
        if ended == "error" or (ended == "abort" and not shown):
            code = CODES.get(str(why), grpc.StatusCode.INTERNAL)
            raise Refusal(
                code,
                "the request ended without an answer" + ("" if why is None else f": {why}"),
                cause=ended,
                retry_seconds=RESTART_SECONDS if code is grpc.StatusCode.UNAVAILABLE else None,
            )
