"""A server's signals: SIGTERM and SIGINT stop it; SIGHUP reloads it, or stops it if its terminal was
closed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable


def stop_signal(reload: Callable[[], None]) -> asyncio.Future[signal.Signals]:
    """The first signal that stops the server, as a future of the running event loop. A second SIGINT exits
    immediately.

    Args:
        reload: called on SIGHUP.
    """
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()
    attached = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # not under nohup

    def on_signal(number: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(number)
        if number == signal.SIGINT:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, _leave)

    def hung_up() -> None:
        if attached and not _has_terminal():
            on_signal(signal.SIGHUP)
        else:
            reload()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGHUP, hung_up)
    return stop


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal. It loses that when the terminal is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _leave(*_: object) -> None:
    """Exits immediately, without finishing requests. The engine process ends with this one."""
    os.write(sys.stderr.fileno(), b"\n")
    os._exit(130)
