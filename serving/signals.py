"""What signals ask of a server: SIGTERM and SIGINT to stop, SIGHUP to reload, or to stop where its terminal was closed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable


def stop_signal(reload: Callable[[], None]) -> asyncio.Future[signal.Signals]:
    """The first signal that asks to stop, in the event loop that runs now. A second SIGINT ends the process at once.

    Args:
        reload: called on SIGHUP.
    """
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()
    attached = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # as under nohup

    def asked(number: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(number)
        if number == signal.SIGINT:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, _leave)

    def hung_up() -> None:
        if attached and not _has_terminal():
            asked(signal.SIGHUP)
        else:
            reload()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number)
    loop.add_signal_handler(signal.SIGHUP, hung_up)
    return stop


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal, which it loses when that is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _leave(*_: object) -> None:
    """At once: whatever is in flight is cut off, and the engine process ends when this one is gone."""
    os.write(sys.stderr.fileno(), b"\n")
    os._exit(130)
