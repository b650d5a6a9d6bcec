"""The options that type checkers know are those that LLM takes."""

from __future__ import annotations

from typing import Any

from jengine.core.config import EngineConfig
from jengine.core.engine_options import EngineOptions
from jengine.vllm.engine_options import VllmEngineOptions
from jengine.vllm.translate import ENGINE_SETTINGS, LIBRARY_SETTINGS


def test_they_have_the_names_and_types_of_the_fields() -> None:
    known = {name: hint.__forward_arg__ for name, hint in EngineOptions.__annotations__.items()}
    of_vllm: dict[str, Any] = VllmEngineOptions.__annotations__
    fields = {name: hint for name, hint in EngineConfig.__annotations__.items() if name != "model"}
    assert {name: hint for name, hint in known.items() if name not in of_vllm} == fields
    assert not EngineOptions.__required_keys__


def test_vllms_names_are_those_that_are_translated() -> None:
    assert {*VllmEngineOptions.__annotations__} == {*ENGINE_SETTINGS, *LIBRARY_SETTINGS}
