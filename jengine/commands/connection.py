"""Flags for connecting to a server, and the client that they configure."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine import InvalidArgument
from jengine.commands.terminal import passing

if TYPE_CHECKING:
    from jengine.client import Client

FILES = {
    "api_key_file": "file with the API key to send",
    "tls_ca": "PEM file of the authorities whose certificates to trust; turns TLS on",
    "tls_cert": "PEM file of your own certificate, for mutual TLS",
    "tls_key": "PEM file of its private key",
}
CONNECTION = ("tls", *FILES)


def add_connection(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tls", action="store_true", help="use TLS, with the certificate authorities of this machine"
    )
    for name, text in FILES.items():
        group.add_argument("--" + name.replace("_", "-"), metavar="FILE", type=Path, help=text)


def client_options(options: argparse.Namespace) -> dict[str, Any]:
    """Options for jengine.client.Client.

    Raises:
        InvalidArgument: the key file cannot be read.
    """
    try:
        key = None if options.api_key_file is None else options.api_key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as wrong:
        raise InvalidArgument("api_key_file", str(options.api_key_file), f"cannot be read: {wrong}") from None
    return {
        "api_key": key,
        **{name: getattr(options, name) for name in ("tls", "tls_ca", "tls_cert", "tls_key")},
    }


def connect(address: str, options: argparse.Namespace) -> Client:
    """A client for the server at host:port. On a terminal, waits for a server that starts, and shows it."""
    from jengine.client import Client

    client = Client(address, **client_options(options))
    if sys.stderr.isatty():
        with passing() as show:
            client.wait_until_ready(progress=show)
    return client
