"""The token that servers of pages and their clients share."""

from __future__ import annotations

import os
from pathlib import Path

from jengine.base.errors import InvalidArgument

TOKEN = "JENGINE_KV_TOKEN"  # an environment variable
FEWEST_BYTES = 16


def read_token(file: Path | None, field: str = "token_file") -> bytes:
    """The contents of a file or, without one, of the environment variable TOKEN.

    Raises:
        InvalidArgument: there is no token, it is too short, or the file cannot be read.
    """
    if file is None:
        token, field = os.environ.get(TOKEN, "").strip().encode(), TOKEN
    else:
        try:
            token = file.read_bytes().strip()
        except OSError as error:
            raise InvalidArgument(field, str(file), f"cannot be read: {error}") from None
    if len(token) < FEWEST_BYTES:
        limit = f"must hold a token of at least {FEWEST_BYTES} bytes; or set token_file"
        raise InvalidArgument(field, "a short token" if token else "", limit)
    return token
