"""A disposable process of `guards.sandbox`: `python -m jengine.serving.guards.worker KIND ARGUMENT...`.

It reads jobs from its stdin, a socket to the server, and exits when the server closes that. It has no other
descriptors, and imports neither jax nor gRPC.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from jengine import InvalidArgument, ModelError, StructuredOutputs, Tokenizer
from jengine.serving.processes.watchdog import die_with_parent
from jengine.serving.processes.wire import MAX_FRAME, RECEIVE, Done, Frames, Job, Picture, frame, picture_of

TEXT_SECONDS = 2.0  # processor time of a grammar or a conversation,
BYTES_A_SECOND = 2**18  # and of a conversation's text, with a model's template
IMAGE_SECONDS = 10.0  # processor time of an image; the largest one takes a fifth of it
MOST_TOKENS = 2**20  # maximum tokens of a rendered conversation
MOST_BYTES = MAX_FRAME - 2**16  # of a part's patches, which are one message
COMPILED = 8  # templates that are kept
NICENESS = 5  # of rare, long work: lets the event loop and the engine run first
DoJob = Callable[[Job], tuple[Done, list[Picture]]]  # may raise InvalidArgument and ModelError


def chats(folder: str) -> DoJob:
    """Renders conversations with the model's templates, and turns text into tokens."""
    return _renderer(Tokenizer.load(Path(folder)))


def texts(folder: str) -> DoJob:
    """Compiles grammars, and renders with the templates of clients and adapters."""
    from jengine.spi import probe_structure

    tokenizer = Tokenizer.load(Path(folder))
    # a tokenizer that llguidance cannot use can still render templates
    with contextlib.suppress(InvalidArgument):
        probe_structure(StructuredOutputs(regex="a"), tokenizer)
    render = _renderer(tokenizer)

    def do(job: Job) -> tuple[Done, list[Picture]]:
        if job.kind != "check":
            return render(job)
        probe_structure(StructuredOutputs(**json.loads(job.arguments)), tokenizer)
        return Done(), []

    return do


def images(folder: str, rows: str, processing: str) -> DoJob:
    """Decodes images and cuts them for their model; for the arguments see ImageReader."""
    from jengine.spi import ImageReader

    reader = ImageReader.without_text(Path(folder), int(rows), json.loads(processing))
    with contextlib.suppress(ImportError, InvalidArgument):  # jobs say that Pillow is missing
        reader.warm_up()

    def do(job: Job) -> tuple[Done, list[Picture]]:
        source = job.source.decode() if job.kind == "data_url" else job.source
        image = reader.adjusted(json.loads(job.arguments)).read(source, job.field, paths=False)
        if (size := max(part.pixels.nbytes + part.places.nbytes for part in image.parts)) > MOST_BYTES:
            limit = f"{size} bytes of patches; at most {MOST_BYTES}: see mm_processor_kwargs, image_pool_rows"
            raise InvalidArgument(job.field, "an image", limit)
        return Done(), [picture_of(part) for part in image.parts]

    return do


# by name: niceness, and bytes of address space that jobs may add; a large image exists several times
KINDS: dict[str, tuple[Callable[..., DoJob], int, int]] = {
    "chats": (chats, 0, 2**30),
    "texts": (texts, NICENESS, 2**30),
    "images": (images, NICENESS, 2**31),
}


def _renderer(tokenizer: Tokenizer) -> DoJob:
    from jengine.spi import ChatTemplate, judging_text, rendered_chat

    @lru_cache(COMPILED)
    def with_template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> Tokenizer:
        other = copy.copy(tokenizer)
        other.chat_templates = {"default": ChatTemplate(source, dict(special_tokens))}
        return other

    def render(job: Job) -> tuple[Done, list[Picture]]:
        arguments = json.loads(job.arguments)
        if job.kind == "encode":
            return Done(tokenizer.encode(*arguments)), []
        special_tokens = tuple(sorted(arguments.pop("special_tokens").items()))
        render = judging_text if job.kind == "judge" else rendered_chat
        text, ids = render(with_template(arguments.pop("template"), special_tokens), **arguments)
        if len(ids) > MOST_TOKENS:
            limit = f"the chat template renders them as {len(ids)} tokens; at most {MOST_TOKENS}"
            raise InvalidArgument("messages", None, limit)
        return Done(ids, text=text), []

    return render


def serve_jobs(do: DoJob, server: socket.socket, memory: int) -> int:
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
                pictures: list[Picture] = []
                try:
                    done, pictures = do(job)
                except InvalidArgument as error:
                    done = Done.refused(error)
                except ModelError as error:
                    done = Done(field="chat_template", limit=error.reason)
                except MemoryError:
                    done = Done(field=job.field, limit=f"needs more than {memory >> 20} MiB of memory")
                for picture in pictures:
                    server.sendall(frame(picture))
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                # the timer has whole ticks of the system
                done.seconds = min(time.process_time() - began, job.seconds)
                server.sendall(frame(done))
    return 0


def _limit_memory(memory: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> int:
    """Returns the exit code. Ends with the server: immediately if the system supports it, otherwise after the
    current job.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(os.getppid())  # if the server has already died, reading from the socket reports it
    start, niceness, memory = KINDS[sys.argv[1]]
    os.nice(niceness)
    server = socket.socket(fileno=0)
    return serve_jobs(start(*sys.argv[2:]), server, memory)


if __name__ == "__main__":
    sys.exit(main())
