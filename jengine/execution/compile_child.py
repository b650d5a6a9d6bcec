"""A process that compiles programs for another one, see compile_children.py. Its arguments are the number
of an open socket and, for GPUs, the root of the cache that keeps lowered kernels.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PARENT_POLL = 1000  # milliseconds between looks at whether the parent is alive


def main() -> None:
    """Compiles what it is asked for, until the other process closes the connection or ends."""
    number = int(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(number, os.getppid()), daemon=True).start()
    connection = Connection(number)
    from jengine.execution.compile_children import READY  # imports JAX
    from jengine.execution.programs import memory_of  # noqa: F401 (what takes long to import, before READY)

    if len(sys.argv) > 2:
        from jengine.execution.kernel_objects import keep_lowered

        keep_lowered(Path(sys.argv[2]))
    connection.send_bytes(READY)
    specs = dict[str, Any]()
    while True:
        try:
            name, data, key = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer, program = _compiled(specs, name, data, key)
        except Exception as error:  # XLA raises various errors
            lines = str(error).splitlines() or [""]
            connection.send_bytes(pickle.dumps((f"{type(error).__name__}: {lines[0]}", None, 0.0)))
        else:
            connection.send_bytes(pickle.dumps(answer))
            connection.send_bytes(program)


def _compiled(specs: dict[str, Any], name: str, data: bytes | None, key: Any) -> tuple[Any, bytes]:
    from jengine.execution.compile_children import Job
    from jengine.execution.program_store import packed
    from jengine.execution.programs import UNTUNED, compile_one, memory_of

    if data is not None:
        specs[name] = Job(name, data).read()
    if name not in specs:
        raise ValueError("its shapes could not be read")
    spec, target = specs[name]
    built = compile_one(spec, key, None if target is None else UNTUNED)
    return (None, memory_of(built.program), built.seconds), packed(
        built.program, spec.mesh.devices.flat[0].platform
    )


def _end_with_parent(number: int, parent: int) -> None:
    """Ends this process when the other end of the socket is closed. A process that was forked from the parent
    may keep that open, so it also looks whether the parent is there.
    """
    poll = select.poll()
    poll.register(number, 0)  # only that it was closed
    while not poll.poll(PARENT_POLL) and os.getppid() == parent:
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
