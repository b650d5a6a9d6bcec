"""Tokenizers, stop strings, token masks and grammars."""
