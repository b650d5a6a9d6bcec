"""Sandboxes for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from jengine.serving.guards.sandbox import Sandbox
from tests.serving.leaks import nothing_leaks


def within(work: Callable[[Sandbox], Awaitable[None]], **options: Any) -> None:
    """Runs a function with a sandbox, and checks that the sandbox leaks nothing."""

    async def main() -> None:
        sandbox = Sandbox(**options)
        try:
            await work(sandbox)
        finally:
            sandbox.close()

    with nothing_leaks():
        asyncio.run(main())
