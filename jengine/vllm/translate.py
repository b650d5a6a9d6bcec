"""Translates options that carry vLLM's names. Used by the command line, variables, files and Python alike."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jengine.base.errors import InvalidArgument
from jengine.vllm.setting import Setting
from jengine.vllm.settings import CALLS, ENGINE, LIBRARY, SAMPLING, SERVER, STRUCTURED

Settings = Mapping[str, Setting]


def by_name(settings: Iterable[Setting]) -> Settings:
    return {setting.name: setting for setting in settings}


ENGINE_SETTINGS, SERVER_SETTINGS, LIBRARY_SETTINGS = by_name(ENGINE), by_name(SERVER), by_name(LIBRARY)
SERVE_SETTINGS: Settings = {**ENGINE_SETTINGS, **SERVER_SETTINGS}
SAMPLING_SETTINGS, STRUCTURED_SETTINGS, CALL_SETTINGS = by_name(SAMPLING), by_name(STRUCTURED), by_name(CALLS)
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep

# Other names of an option's values, as vLLM reads them.
VALUES: dict[str, dict[str, str | None]] = {
    "dtype": {
        "half": "float16",
        "float": "float32",
        "bf16": "bfloat16",
        "fp16": "float16",
        "fp32": "float32",
    },
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "max_model_len": {"auto": None, "-1": None},
    "tool_call_parser": {"openai": "harmony", "deepseek_v3": "deepseek"},
}
HINTS = {
    "quantization": (
        "; AWQ, GPTQ and other quantized checkpoints need no option, and int4 quantizes others on load"
    )
}


def value_of(name: str, value: Any) -> Any:
    """A value under jengine's name. Numpy's, JAX's and PyTorch's types count as their names."""
    others = VALUES.get(name, {})
    if name == "dtype" and value is not None and not isinstance(value, str):
        value = getattr(value, "__name__", str(value)).removeprefix("torch.")
    return others.get(value, value) if isinstance(value, str) else value


def suggestion(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """The end of a message, with the most similar name; "" if none is similar."""
    similar = difflib.get_close_matches(name, [*known], n=1, cutoff=0.7)
    return f"; did you mean {shown(similar[0])}?" if similar else ""


def translated(
    values: Mapping[str, Any], known: Iterable[str], settings: Settings, what: str = "option"
) -> tuple[dict[str, Any], list[str]]:
    """Options under jengine's names, and notes about those without effect.

    Raises:
        InvalidArgument: an unknown or unsupported one, or two that mean the same.
    """
    out: dict[str, Any] = {}
    names, notes = {*known}, []
    for name, value in values.items():
        if name in names:
            options, note = {name: value}, ""
        elif name in settings:
            options, note = settings[name].take(value)
        else:
            raise InvalidArgument(
                name, value, f"there is no such {what}{suggestion(name, {*names, *settings})}"
            )
        for option, translation in options.items():
            if option in out and out[option] != translation:
                raise InvalidArgument(
                    name, value, f"{option} is given as {out[option]!r} too, perhaps under vLLM's name"
                )
            out[option] = translation
        notes += [note] if note else []
    return out, notes


def warn(notes: Iterable[str]) -> None:
    """One UserWarning each, at the line outside jengine that passed the option."""
    for note in notes:
        warnings.warn(note, stacklevel=2, skip_file_prefixes=(PACKAGE,))


def takes[T: type](settings: Settings, what: str = "option") -> Callable[[T], T]:
    """Lets a dataclass be created with vLLM's names too."""

    def decorate(cls: T) -> T:
        create: Callable[..., None] = cls.__init__  # type: ignore[misc]
        fields = frozenset(inspect.signature(create).parameters) - {"self"}

        @functools.wraps(create)
        def init(self: object, /, *values: object, **options: object) -> None:
            if not fields.issuperset(options):
                options, notes = translated(options, fields, settings, what)
                warn(notes)
            create(self, *values, **options)

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return decorate


def accepts[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Lets a method be called with vLLM's further arguments, where these ask for nothing."""

    @functools.wraps(function)
    def call(*values: P.args, **options: P.kwargs) -> R:
        for name in options.keys() & CALL_SETTINGS.keys():
            _, note = CALL_SETTINGS[name].take(options.pop(name))
            warn([note] if note else [])
        return function(*values, **options)

    return call
