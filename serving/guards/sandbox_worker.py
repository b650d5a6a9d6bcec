"""A disposable process for work that could crash, block or exhaust it: compiling grammars, and rendering chat
templates.

Its stdin is a socket to the server; it exits when the server closes that. It has no other descriptors, and
imports neither jax nor gRPC.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

from jengine import InvalidArgument, ModelError, StructuredOutputs, Tokenizer, chat_prompt, probe_structure
from jengine.serving.processes.wire import RECEIVE, Done, Frames, Job, frame

CPU_SECONDS = 2.0  # CPU time of a job; then SIGPROF ends the process
MEMORY = 2**30  # bytes of address space that jobs may add; about 200 MB of it are unused stacks and arenas
MOST_TOKENS = 2**20  # maximum tokens of a rendered conversation
NICENESS = 5  # lets the event loop and the engine run first


def do(job: Job, tokenizer: Tokenizer) -> Done:
    try:
        arguments = json.loads(job.arguments)
        if job.kind == "check":
            probe_structure(StructuredOutputs(**arguments), tokenizer)
            return Done()
        ids = chat_prompt(tokenizer, **arguments)["prompt_token_ids"]
        if len(ids) > MOST_TOKENS:
            raise InvalidArgument(
                "messages",
                None,
                f"the chat template renders them as {len(ids)} tokens; at most {MOST_TOKENS}",
            )
        return Done(ids)
    except InvalidArgument as error:
        return Done(
            field=error.field, value=error.value if isinstance(error.value, str) else "", limit=error.limit
        )
    except ModelError as error:
        return Done(field="chat_template", limit=error.reason)
    except MemoryError:
        return Done(field=job.field, limit=f"needs more than {MEMORY >> 20} MiB of memory")


def main() -> int:
    """`python -m jengine.serving.guards.sandbox_worker TOKENIZER_FOLDER`: returns the exit code."""
    _end_with_the_server()
    os.nice(NICENESS)
    server = socket.socket(fileno=0)
    tokenizer = Tokenizer.load(Path(sys.argv[1]))
    # a tokenizer that llguidance cannot use can still render templates
    with contextlib.suppress(InvalidArgument):
        probe_structure(StructuredOutputs(regex="a"), tokenizer)
    _limit_memory()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # crash messages could quote a prompt
    frames: Frames[Job] = Frames(Job)
    server.sendall(frame(Done()))
    while data := server.recv(RECEIVE):
        for job in frames.take(data):
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            done = do(job, tokenizer)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            # the timer has whole ticks of the system
            done.seconds = min(time.process_time() - began, CPU_SECONDS)
            server.sendall(frame(done))
    return 0


def _end_with_the_server() -> None:
    """Exits when the server ends: immediately if the system supports it, otherwise after the current job."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        set_death_signal = 1
        # if the server has already died, reading from the socket reports it
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConnectionError:  # the server has gone
        sys.exit(0)
