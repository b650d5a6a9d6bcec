"""A page server: keeps pages for engines with kv_connector=remote, in memory or in a folder.

The token is in the environment variable JENGINE_KV_TOKEN or in a file. Pages are not encrypted on their way:
the network must be private.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from jengine.base.errors import InvalidArgument
from jengine.base.options import parse_bytes
from jengine.stores.disk import DiskStore
from jengine.stores.frames import read_token
from jengine.stores.memory import MemoryStore, PageStore
from jengine.stores.network import PageServer

PORT = 14579


def main(arguments: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code; 2: an argument is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m jengine.stores",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine's)")
    parser.add_argument("--port", type=int, default=PORT, help=f"0: any free one (default: {PORT})")
    parser.add_argument("--max-bytes", default="10GiB", help="of all pages together (default: 10GiB)")
    parser.add_argument("--root-dir", type=Path, help="keep pages in this folder (default: in memory)")
    parser.add_argument("--token-file", type=Path, help="file with the token")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        max_bytes, token = parse_bytes("max_bytes", options.max_bytes), read_token(options.token_file)
        assert max_bytes is not None
        folder = options.root_dir
        store: PageStore = MemoryStore(max_bytes) if folder is None else DiskStore(folder, max_bytes)
        server = PageServer(store, token, options.host, options.port, writable=True)
    except (InvalidArgument, OSError, OverflowError) as error:
        print(f"jengine.stores: error: {error}", file=sys.stderr)
        return 2
    try:
        print(f"serving pages at {server.host}:{server.port}", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
