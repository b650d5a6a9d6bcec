"""The environment variables that Kubernetes sets for its Services ("service links").

Those of a Service named `jengine` or `jengine-...` begin like this server's options, but are not meant for
it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_PROTOCOL = "(?:TCP|UDP|SCTP)"
_URL = rf"{_PROTOCOL.lower()}://\S+"
_ANY = r".+"
# The form of the value for each suffix of a name, as written by kubelet's pkg/kubelet/envvars.
_FORMS = [
    (re.compile(name), re.compile(value))
    for name, value in (
        (r"\w+_SERVICE_HOST", _ANY),
        (r"\w+_SERVICE_PORT(?:_\w+)?", r"\d+"),
        (r"\w+_PORT", _URL),
        (rf"\w+_PORT_\d+_{_PROTOCOL}", _URL),
        (rf"\w+_PORT_\d+_{_PROTOCOL}_PROTO", _PROTOCOL.lower()),
        (rf"\w+_PORT_\d+_{_PROTOCOL}_PORT", r"\d+"),
        (rf"\w+_PORT_\d+_{_PROTOCOL}_ADDR", _ANY),
    )
]


def is_service_link(variable: str, value: str) -> bool:
    """Whether a variable has the name and the value of a service link."""
    return any(name.fullmatch(variable) and form.fullmatch(value) for name, form in _FORMS)


def service_links(environ: Mapping[str, str], prefix: str) -> list[str]:
    """The names of the service links that begin with this prefix."""
    return sorted(
        name for name, value in environ.items() if name.startswith(prefix) and is_service_link(name, value)
    )
