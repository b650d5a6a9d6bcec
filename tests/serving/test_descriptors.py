"""At the limit of open files: connections leave some for the rest, and the log is not flooded."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource

import pytest

from jengine.serving.app import most_connections, report_sparsely


@pytest.mark.parametrize(
    "limit, ports, most", [(65_536, 3, 4096), (1024, 2, 412), (256, 3, 18), (100, 1, 1), (-1, 3, 4096)]
)
def test_connections_leave_descriptors(
    limit: int, ports: int, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert resource.RLIM_INFINITY == -1
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    assert most_connections(4096, ports) == most
    assert [f"max_connections is {most}, not 4096" in line for line in caplog.messages] == [True] * (
        most < 4096
    )


def test_one_line_for_many_attempts(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        report_sparsely(loop)
        for _ in range(1000):
            error = OSError(errno.EMFILE, "Too many open files")
            loop.call_exception_handler(
                {"message": "socket.accept() out of system resource", "exception": error}
            )
        loop.call_exception_handler({"message": "another fault", "exception": ValueError("x")})

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "connections cannot be accepted",
        "another fault",
    ]
