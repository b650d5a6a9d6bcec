"""A sandbox worker in which grammars overflow the stack, like a fault in llguidance: `python -m
tests.serving.small_stack_worker`."""

import sys

from jengine.serving.guards import sandbox_worker
from jengine.text import grammars

if __name__ == "__main__":
    grammars.STACK = 2**20
    sys.exit(sandbox_worker.main())
