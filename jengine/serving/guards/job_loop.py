"""What a disposable process does: it reads jobs from its stdin, a socket to the server, and exits when the
server closes that. It has no other descriptors.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jengine.serving.processes.wire import RECEIVE, Done, Frames, Job, Picture, frame

NICENESS = 5  # of rare, long work: lets the event loop and the engine run first


def serve_jobs(do: Callable[[Job], tuple[Done, list[Picture]]], server: socket.socket, memory: int) -> int:
    """Does jobs until the server closes the socket, or has gone. Returns the exit code. A job that takes more
    than its processor time ends the process, by SIGPROF.

    Args:
        memory: bytes of address space that jobs may add; about 200 MB of it are unused stacks and arenas.
    """
    _limit_memory(memory)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # crash messages could quote a prompt
    frames: Frames[Job] = Frames(Job)
    with contextlib.suppress(ConnectionError):
        server.sendall(frame(Done()))
        while data := server.recv(RECEIVE):
            for job in frames.take(data):
                began = time.process_time()
                signal.setitimer(signal.ITIMER_PROF, job.seconds)
                try:
                    done, pictures = do(job)
                except MemoryError:
                    limit = f"needs more than {memory >> 20} MiB of memory"
                    done, pictures = Done(field=job.field, limit=limit), []
                for picture in pictures:
                    server.sendall(frame(picture))
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                # the timer has whole ticks of the system
                done.seconds = min(time.process_time() - began, job.seconds)
                server.sendall(frame(done))
    return 0


def end_with_the_server(niceness: int = 0) -> socket.socket:
    """The socket. Exits when the server ends: immediately if the system supports it, otherwise after the
    current job.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        set_death_signal = 1
        # if the server has already died, reading from the socket reports it
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    os.nice(niceness)
    return socket.socket(fileno=0)


def _limit_memory(memory: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
