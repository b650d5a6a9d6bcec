"""The fixtures of the service's tests."""

from tests.serving.conftest import make_server, tokenizer_folder

__all__ = ["make_server", "tokenizer_folder"]
