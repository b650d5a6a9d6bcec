"""A sandbox worker in which grammars overflow the stack, like a fault in llguidance: `python -m
tests.serving.small_stack_worker texts FOLDER`."""

import sys

from jengine.serving.guards import worker
from jengine.text import grammars

if __name__ == "__main__":
    grammars.STACK = 2**20
    sys.exit(worker.main())
