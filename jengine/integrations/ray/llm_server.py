"""Ray Serve LLM's server with jengine's engine, to name as LLMConfig's server_cls.

Importing it needs vLLM or SGLang to be installed, since Ray takes the types of OpenAI's API from them.
"""

from __future__ import annotations

import copy
from typing import Any

from ray.llm._internal.serve.core.server.llm_server import LLMServer

from jengine.integrations.ray.llm_engine import JengineEngine


class JengineServer(LLMServer):  # type: ignore[misc]  # ray ships no types
    """A replica of Ray Serve LLM."""

    _default_engine_cls = JengineEngine

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Ray's options of the deployment: those of deployment_config, and runtime_env. GPUs are asked for by
        ray_actor_options, as for any actor: an engine uses all devices of its process.
        """
        options: dict[str, Any] = copy.deepcopy(llm_config.deployment_config)
        actor = options.setdefault("ray_actor_options", {})
        actor["runtime_env"] = {**actor.get("runtime_env", {}), **(llm_config.runtime_env or {})}
        return options
