"""The container's health check, `python -m jengine.serving.grpc.health_check`: whether the model answers, by
GET /health; with JENGINE_PORT=none, whether the port for gRPC accepts connections.

Takes the port and TLS from the JENGINE_* variables, as the server does. A port given as a flag is not known
here.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import urllib.error
import urllib.request

from jengine.serving.config import PREFIX, is_service_link

SECONDS = 10.0


def main() -> int:
    """Returns the exit code: 0 if the model answers."""
    secured = f"{PREFIX}TLS_CERT" in os.environ
    port = _port(f"{PREFIX}PORT", "8000")
    url = f"{'https' if secured else 'http'}://127.0.0.1:{port}/health"
    # the certificate is for another name than 127.0.0.1
    context = ssl._create_unverified_context() if secured else None
    try:
        if port == "none":
            port = _port(f"{PREFIX}GRPC_PORT", "50051").replace("auto", "50051")
            url = f"127.0.0.1:{port}"
            socket.create_connection(("127.0.0.1", int(port)), SECONDS).close()
        else:
            urllib.request.urlopen(url, timeout=SECONDS, context=context).close()
    except urllib.error.HTTPError as error:
        print(error.read(1000).decode(errors="replace"))
        return 1
    except OSError as error:
        print(f"{url}: {error}")
        # it wants a client's certificate: it runs
        return 0 if isinstance(getattr(error, "reason", error), ssl.SSLError) else 1
    return 0


def _port(variable: str, default: str) -> str:
    text = os.environ.get(variable, default)
    return default if is_service_link(variable, text) else text


if __name__ == "__main__":
    sys.exit(main())
