"""An image worker whose decoder hangs, crashes, or takes all memory: `python -m
tests.serving.faulty_image_worker images ARGUMENT...`."""

import os
import signal
import sys
from typing import Any

import PIL.Image

from jengine.serving.guards import worker

OPEN = PIL.Image.open


def faulty(file: Any, **options: Any) -> Any:
    data = file.getvalue()
    while data == b"hang":
        pass
    if data == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if data == b"memory":
        return bytearray(2**33)
    return OPEN(file, **options)


if __name__ == "__main__":
    PIL.Image.open = faulty
    sys.exit(worker.main())
