"""The version of jengine, apart from `jengine/__init__.py` so that its modules can import it."""

__version__ = "0.6.0"
