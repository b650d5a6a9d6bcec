"""Servers with a mock engine."""

from __future__ import annotations

from tests.serving.conftest import make_server, tokenizer_folder

__all__ = ["make_server", "tokenizer_folder"]
