"""Stands in for a process that compiles: does what the keys say, without JAX. Its data is the key's."""

from __future__ import annotations

import os
import pickle
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    folder = Path(os.environ["SCRIPTED_CHILD"])
    if (folder / "refuse").exists():
        sys.exit("no room for another process")
    connection.send_bytes(b"ready")
    while True:
        try:
            _, _, key = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        with (folder / "log").open("a") as log:
            log.write(f"{os.getpid()} {key}\n")
        if key == "dies" or (key == "dies once" and (folder / "log").read_text().count(key) == 1):
            print(f"{key}: out of memory", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 9)
        if key == "hangs":
            time.sleep(1000)
        error = "RuntimeError: out of registers" if key == "fails" else None
        connection.send_bytes(pickle.dumps((error, None, 0.1)))
        if error is None:
            connection.send_bytes(key.encode())


if __name__ == "__main__":
    main()
