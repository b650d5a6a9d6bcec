"""Generates parts of the documentation from the code; each replaces a line `<!-- from the code: NAME -->` of
a page.

A hook in mkdocs.yml. Options, sampling parameters, metrics and figures are never copied by hand;
docs_figures.py makes the tables of figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import docs_figures
import docs_kernels
from api_index import public_names
from prometheus_client.core import Metric
from vllm_same import SAME

from jengine import EngineConfig, Load, SamplingParams
from jengine.base.options import groups_of
from jengine.core import beam_params, lora, request, service_level
from jengine.core.updates import LoraLoad, StoreLoad
from jengine.insight.profiling import data as profiles
from jengine.serving.config import ServerConfig
from jengine.serving.http.policy import POLICIES
from jengine.serving.metrics.model_metrics import ModelMetrics
from jengine.serving.metrics.server_metrics import Metrics
from jengine.vllm.flags import add_fields
from jengine.vllm.setting import Setting
from jengine.vllm.settings import CALLS, ENGINE, SAMPLING, SERVER, STRUCTURED

ROOT = Path(__file__).parent.parent
LIMITS = beam_params, lora, profiles, request, service_level
MARKER = re.compile(r"^<!-- from the code: (.+) -->$", re.MULTILINE)

# the first field of each section
SAMPLING_SECTIONS = {
    "n": "Choosing tokens",
    "max_tokens": "Ending",
    "repetition_penalty": "Penalties and constraints",
    "include_stop_str_in_output": "Output",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with each page's text. Raises KeyError for an unknown name."""
    return MARKER.sub(lambda marker: CONTENT[marker[1]](), markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with each page as HTML. Docstrings of the API name limits by their constants."""
    if not page.url.startswith("reference/api/"):
        return html
    constants = {name: value for module in LIMITS for name, value in vars(module).items()}
    return re.sub(r"\bMAX_[A-Z_]+", lambda name: f"{constants[name[0]]:,}", html)


# --- options -----------------------------------------------------------------------------------------


def options(of: type, sections: dict[str, str]) -> str:
    """A heading for each field of a dataclass, with the flag, environment variable, default and help of the
    command line.

    Args:
        sections: title by the first field.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_fields(parser, of)  # type: ignore[arg-type]  # a parser also has add_argument
    flags = {action.dest: action for action in parser._actions}
    lines = []
    for field in dataclasses.fields(of):
        if field.name in sections:
            lines += [f"## {sections[field.name]}", ""]
        flag = flags[field.name]
        heading = f"### `{field.name}` {{ #{field.name} }}"
        lines += [heading, "", _facts(field, flag, of), "", _text(flag, of), ""]
    return "\n".join(lines)


def sections_of(of: type) -> dict[str, str]:
    """A section for each group of options: the first line of its docstring, by its first field."""
    groups = [group for group in groups_of(of) if group is not of]
    return {next(iter(inspect.get_annotations(group))): _title(group) for group in groups}


def _title(group: type) -> str:
    return inspect.getdoc(group).partition("\n")[0].removesuffix(".")  # type: ignore[union-attr]


def _facts(field: dataclasses.Field[Any], flag: argparse.Action, of: type) -> str:
    value = (
        ""
        if flag.nargs == 0
        else " " + ("{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else str(flag.metavar))
    )
    facts = ["Argument `MODEL`" if field.name == "model" else f"`{' / '.join(flag.option_strings)}{value}`"]
    if of is not SamplingParams:
        facts.append(f"`JENGINE_{field.name.upper()}`")
    if field.default not in (None, ()):
        facts.append(f"default `{json.dumps(field.default)}`")
    return " · ".join(facts)


def _text(flag: argparse.Action, of: type) -> str:
    """A flag's help, with values as code and options as links."""
    text = re.sub(r"( \(repeatable\))?( \(default: [^()]*\))?$", "", (flag.help or "").replace("%%", "%"))
    text = text[:1].upper() + text[1:]
    for value in flag.choices or ():
        text = re.sub(rf"(?<![\w`-])({value}): ", r"`\1`: ", text, flags=re.IGNORECASE)
    names = {field.name for field in dataclasses.fields(of)} - {flag.dest}
    text = re.sub(
        r"(?<![\w`-])[a-z]+(?:_[a-z]+)+(?![\w`-])",
        lambda name: f"[`{name[0]}`](#{name[0]})" if name[0] in names else name[0],
        text,
    )
    return text if text.endswith(".") else text + "."


# --- metrics -----------------------------------------------------------------------------------------


def metrics() -> str:
    """A table of the metrics that a server exports to Prometheus."""
    load = Load(
        running=0,
        waiting=0,
        free_pages=0,
        pages=0,
        preemptions=0,
        compiles_since_start=0,
        loras=LoraLoad(max_loras=1),
        store=StoreLoad("disk"),
    )
    server = Metrics(ModelMetrics("model", lambda: load, lambda: 0))
    server.certificate_expiry = lambda: 0.0
    rows = [
        f"| `{_exposed(metric)}` | {metric.type} | {metric.documentation} |" for metric in server.collect()
    ]
    return "\n".join(["| Metric | Type | Meaning |", "| --- | --- | --- |", *sorted(rows)])


def _exposed(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


# --- vLLM --------------------------------------------------------------------------------------------


def vllm_same() -> str:
    """A table of vLLM's settings that jengine has under the same name."""
    rows = [f"| `{name}` | {note} |" for name, note in SAME.items()]
    return "\n".join(["| Setting | Differences |", "| --- | --- |", *rows])


def vllm_settings(kind: str | None, settings: tuple[Setting, ...]) -> str:
    """A table of vLLM's settings of this kind, or of all kinds."""
    rows = [f"| `{one.name}` | {_accepted(one)}{one.why} |" for one in settings if kind in (None, one.kind)]
    return "\n".join(["| vLLM | jengine |", "| --- | --- |", *rows])


def _accepted(setting: Setting) -> str:
    if setting.kind == "renamed":
        given = [
            f"`{name}={value!r}`" for options in setting.gives.values() for name, value in options.items()
        ]
        return (
            f"`{setting.to}`{'; ' if setting.why else ''}"
            if setting.to
            else ""
            if setting.variable
            else f"{given[0]}; "
            if setting.why
            else given[0]
        )
    values = (
        [f"`{fit}`" for fit in setting.fits if not isinstance(fit, bool)]
        if setting.kind == "not supported"
        else []
    )
    return f"only {', '.join(values)}: " if values else ""


# --- other files -------------------------------------------------------------------------------------


def included(name: str) -> str:
    """A file of the repository for a page in docs/design, without its title, since the page has its own."""
    text = (ROOT / name).read_text().partition("\n")[2]
    return text.replace("](docs/design/", "](").replace("](docs/", "](../")


def notebook() -> str:
    """The cells of the quickstart notebook, without the title, which the page has, and without the
    installation.
    """
    cells = json.loads((ROOT / "notebooks" / "01_quickstart.ipynb").read_text())["cells"]
    return "\n\n".join(_cells(cells[1:]))


def _cells(cells: list[dict[str, Any]]) -> Iterator[str]:
    for cell in cells:
        if cell["id"] == "install":
            continue
        text = "".join(cell["source"])
        yield f"```python\n{text}\n```" if cell["cell_type"] == "code" else text


# --- requests ----------------------------------------------------------------------------------------


def request_fields(path: str) -> str:
    """A table of what happens to fields, tools and items of requests. Names that share a note share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for outcome, notes in POLICIES[path].items():
        for name, note in notes.items():
            rows.setdefault((outcome, note), []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {outcome} | {note} |" for (outcome, note), names in rows.items()]
    return "\n".join(["| Name | What happens | Notes |", "| --- | --- | --- |", *lines])


CONTENT: dict[str, Callable[[], str]] = {
    "public names": public_names,
    "engine options": lambda: options(EngineConfig, sections_of(EngineConfig)),
    "server options": lambda: options(ServerConfig, sections_of(ServerConfig)),
    "sampling parameters": lambda: options(SamplingParams, SAMPLING_SECTIONS),
    "metrics": metrics,
    **{f"fields of {path}": partial(request_fields, path) for path in POLICIES},
    "vllm: same": vllm_same,
    "vllm: renamed": lambda: vllm_settings("renamed", (*ENGINE, *SERVER)),
    "vllm: no effect": lambda: vllm_settings("no effect", (*ENGINE, *SERVER)),
    "vllm: not supported": lambda: vllm_settings("not supported", (*ENGINE, *SERVER)),
    "vllm: sampling": lambda: vllm_settings(None, (*SAMPLING, *STRUCTURED, *CALLS)),
    "comparison": partial(docs_figures.compare, "compare_avx512_bf16"),
    "comparison, AVX2": partial(docs_figures.compare, "compare_avx2"),
    "perplexity": docs_figures.perplexity,
    "quantized steps": docs_figures.quantized_steps,
    "gpu": docs_figures.gpu,
    "gpu kernels": docs_figures.gpu_kernels,
    "start time": docs_figures.start_time,
    "several models": docs_figures.several_models,
    "sharing": docs_figures.sharing,
    "targets": docs_figures.targets,
    "simulation": docs_figures.simulation,
    "speculation": docs_figures.speculation,
    "constraints": docs_figures.constraints,
    "host tier": docs_figures.host_tier,
    "batch invariance": docs_figures.batch_invariance,
    "adapters": docs_figures.adapters,
    "weight updates": docs_figures.weight_updates,
    "replicas": docs_figures.replicas,
    "executed kernels": docs_figures.executed_kernels,
    "planted faults": docs_figures.planted_faults,
    "kernels by card": docs_kernels.cards,
    "bounds of products": docs_kernels.predictions,
    "ARCHITECTURE.md": lambda: included("ARCHITECTURE.md"),
    "CHANGELOG.md": lambda: included("CHANGELOG.md"),
    "benchmarks/NOTES.md": lambda: included("benchmarks/NOTES.md"),
    "notebook": notebook,
}

if __name__ == "__main__":  # python tools/docs_pages.py "engine options"
    print(CONTENT[sys.argv[1]]())
