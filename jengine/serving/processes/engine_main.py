"""Entry point of the engine process, `python -m jengine.serving.processes.engine_main`: setup that must
precede slow imports.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys

from jengine.serving.processes.watchdog import Heartbeat, die_with_parent


def main(server: int, beats: int, interval: float, parent: int) -> int:
    """Returns the exit code.

    Args:
        server: descriptor of the socket to the server.
        beats, interval: as for Heartbeat.
        parent: the server's process id.
    """
    die_with_parent(parent)
    # The server drains before it stops the engine, even if signals are sent to the whole process group or by
    # a service manager.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # writes all threads' stacks to stderr
    # Hides XLA's notices and warnings, but not its errors. Must be set before jax is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for descriptor in (server, beats):
        os.set_inheritable(descriptor, False)
    heartbeat = Heartbeat(beats, interval)
    heartbeat.start()

    from jengine.serving.processes.engine_child import run

    return run(socket.socket(fileno=server), heartbeat)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
