"""Generates parts of the documentation from the code; each replaces a line `<!-- from the code: NAME -->` of
a page.

A hook in mkdocs.yml. Options, sampling parameters, metrics and figures are never copied by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from jengine import EngineConfig, Load, LoraLoad, SamplingParams, StoreLoad
from jengine.commands.flags import add_fields
from jengine.serving.config import ServerConfig
from jengine.serving.metrics.server_metrics import PrometheusMetrics
from jengine.vllm import engine_settings, server_settings
from jengine.vllm.sampling_settings import CALLS, SAMPLING, STRUCTURED
from jengine.vllm.setting import Setting

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARKER = re.compile(r"^<!-- from the code: (.+) -->$", re.MULTILINE)

# The first field of each section of the engine's options, in the order of EngineConfig.
ENGINE_SECTIONS = {
    "model": "Model",
    "dtype": "Number formats",
    "embeddings": "Embeddings",
    "enable_lora": "Adapters",
    "max_model_len": "Capacity",
    "page_size": "KV cache",
    "batch_invariant": "Reproducibility",
    "policy": "Scheduling",
    "record_trace": "Running",
    "cache_dir": "Programs",
    "cpu_threads": "Devices",
}
SERVER_SECTIONS = {
    "host": "Ports",
    "tool_call_parser": "Model",
    "max_waiting": "Limits",
    "client_chat_templates": "Clients",
    "lame_duck_seconds": "Life cycle",
    "tls_cert": "Security",
    "request_log": "Logs",
}
SAMPLING_SECTIONS = {
    "n": "Choosing tokens",
    "max_tokens": "Ending",
    "repetition_penalty": "Penalties and constraints",
    "include_stop_str_in_output": "Output",
}
ENGINES = {"jengine": "jengine", "vllm": "vLLM", "openvino": "OpenVINO GenAI"}
MEASURES = {
    "stream": "One stream, tokens/s",
    "batch": "32 at once, tokens/s",
    "prefill": "Prompt of 1,024, tokens/s",
    "later start": "Start, s",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with each page's text. Raises KeyError for an unknown name."""
    return MARKER.sub(lambda marker: CONTENT[marker[1]](), markdown)


# --- options -----------------------------------------------------------------------------------------


def options(
    of: type, sections: dict[str, str], defaults: dict[str, Any] | None = None, skip: tuple[str, ...] = ()
) -> str:
    """A heading for each field of a dataclass, with the flag, environment variable, default and help of the
    command line.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_fields(parser, of, skip, defaults)  # type: ignore[arg-type]  # a parser also has add_argument
    flags = {action.dest: action for action in parser._actions}
    lines = []
    for field in dataclasses.fields(of):
        if field.name in sections:
            lines += [f"## {sections[field.name]}", ""]
        if field.name not in flags:
            continue
        flag = flags[field.name]
        lines += [
            f"### `{field.name}` {{ #{field.name} }}",
            "",
            _facts(field, flag, of, defaults or {}),
            "",
            _text(flag, of),
            "",
        ]
    return "\n".join(lines)


def _facts(field: dataclasses.Field[Any], flag: argparse.Action, of: type, defaults: dict[str, Any]) -> str:
    value = (
        ""
        if flag.nargs == 0
        else " " + ("{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else str(flag.metavar))
    )
    default = defaults.get(field.name, field.default)
    facts = ["Argument `MODEL`" if field.name == "model" else f"`{' / '.join(flag.option_strings)}{value}`"]
    if of is not SamplingParams:
        facts.append(f"`JENGINE_{field.name.upper()}`")
    if default not in (None, ()):
        facts.append(f"default `{json.dumps(default)}`")
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
    server = PrometheusMetrics("model", lambda: load, lambda: 0)
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
    rows = [
        f"| `{name}` | {note} |" for name, note in {**engine_settings.SAME, **server_settings.SAME}.items()
    ]
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


# --- figures -----------------------------------------------------------------------------------------


def compare() -> str:
    """Medians of jengine and other engines on one machine."""
    found = json.loads((RESULTS / "compare_avx512_bf16.json").read_text())
    rows = ["| | " + " | ".join(MEASURES.values()) + " |", "| --- |" + " ---: |" * len(MEASURES)]
    for arm, result in found["arms"].items():
        engine, _, numbers = arm.partition(" ")
        if not result["failed"] and result["measured"].keys() >= MEASURES.keys():
            medians = [result["measured"][name]["median"] for name in MEASURES]
            rows.append(
                f"| {ENGINES.get(engine, engine)}, {numbers} | " + " | ".join(map(_number, medians)) + " |"
            )
    return "\n".join([*rows, "", _machine(found)])


def perplexity() -> str:
    found = json.loads((RESULTS / "quantization_perplexity.json").read_text())
    base = found["perplexity"]["bfloat16"]
    rows = [
        (
            "| | English | / bfloat16 | Technical | / bfloat16 | Chats | / bfloat16 | Weights, MiB | Cache,"
            " KiB a token |"
        ),
        "| --- |" + " ---: |" * 8,
    ]
    for name, row in found["perplexity"].items():
        texts = " | ".join(_beside(row, base, text) for text in ("english", "technical", "chats"))
        rows.append(f"| {name} | {texts} | {row['weights_mib']:.1f} | {row['cache_kib_a_token']:.2f} |")
    return "\n".join([*rows, "", _machine(found)])


def _beside(row: dict[str, float], base: dict[str, float], text: str) -> str:
    """A text's perplexity, and its ratio to the base's with the standard error; empty cells where it was not
    measured.
    """
    if text not in row:
        return "|"
    error = f" ± {row[f'{text}_ratio_error']:.3f}" if f"{text}_ratio_error" in row else ""
    return f"{row[text]:.3f} | {row[text] / base[text]:.3f}{error}"


def quantized_steps() -> str:
    """Durations of decode steps, and of reading their weights, in milliseconds."""
    found = json.loads((RESULTS / "quantized_steps.json").read_text())
    forms = {name: row for name, row in found.items() if isinstance(row, dict) and "floor_ms" in row}
    counts = list(next(iter(forms.values()))["ms"])
    rows = [
        "| | Weights, MiB | Reading them, ms | " + " | ".join(f"{n} rows, ms" for n in counts) + " |",
        "| --- |" + " ---: |" * (len(counts) + 2),
    ]
    for name, row in forms.items():
        times = " | ".join(f"{row['ms'][n]:.2f}" for n in counts)
        rows.append(f"| {name} | {row['bytes'] / 2**20:.1f} | {row['floor_ms']:.2f} | {times} |")
    return "\n".join([*rows, "", _machine(found)])


def start_time() -> str:
    found = json.loads((RESULTS / "start_time.json").read_text())
    rows = ["| | First start, s | Later start, s |", "| --- | ---: | ---: |"]
    rows += [
        f"| {name} | {model['first']['seconds']:.1f} | {model['later']['seconds']:.1f} |"
        for name, model in found["models"].items()
    ]
    return "\n".join([*rows, "", _machine(found)])


def sharing() -> str:
    found = json.loads((RESULTS / "sharing.json").read_text())
    arrivals, chat, ratios = found["arrivals"], found["chat"], found["arrivals"]["ratios"]
    rows = [
        "| Requests | Quantity | Factor |",
        "| --- | --- | ---: |",
        (
            f"| {arrivals['requests']} at once, with a common prefix | median time to first token |"
            f" {ratios['first_token_median']} |"
        ),
        f"| the same | output tokens a second | {ratios['tokens_per_second']} |",
        f"| turn {chat['turns']} of a conversation | time to first token | {chat['ratio_last_turn']} |",
    ]
    return "\n".join([*rows, "", _machine(found)])


def targets() -> str:
    """The share of requests within their targets, by load."""
    found = json.loads((RESULTS / "scheduling.json").read_text())
    loads = {name: load for name, load in found["latency"]["tight"].items() if name != "targets"}
    arms = {
        "best_fixed": "best of the fixed settings",
        "throughput": "`throughput`",
        "latency, serve": '`latency`, `on_late="serve"`',
    }
    arms |= {"latency, reject": '`latency`, `on_late="reject"`', "auto": "`auto`"}
    rows = [
        "| Strategy | " + " | ".join(map(str.capitalize, loads)) + " |",
        "| --- |" + " ---: |" * len(loads),
    ]
    rows += [
        f"| {title} | " + " | ".join(f"{load[arm]['in_target']:.2f}" for load in loads.values()) + " |"
        for arm, title in arms.items()
    ]
    return "\n".join([*rows, "", _machine(found)])


def executed_kernels() -> str:
    found = json.loads((RESULTS / "executed_kernels.json").read_text())
    titles = ("Kernel", "Case", "Blocks of threads", "Instructions", "Seconds", "Schedules", "Error", "Lines")
    rows = ["| " + " | ".join(titles) + " |", "| --- | --- |" + " ---: |" * 6]
    for one in found["kernels"]:
        blocks = " x ".join(str(size) for size in one["grid"] if size > 1) or "1"
        cells = (
            f"`{one['kernel']}`" + (" (A100)" if one["target"] == "a100" else ""),
            one["case"],
            f"{blocks} of {one['threads']}",
            f"{one['instructions']:,}",
            one["seconds"],
            one["schedules"],
            f"{one['error']:.1g}",
            f"{one['executed_lines']:,} of {one['lines']:,}",
        )
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*rows, "", _machine(found)])


def planted_faults() -> str:
    rows = ["| Kernel | Fault | Told by | Message | Where |", "| --- | --- | --- | --- | --- |"]
    for one in json.loads((RESULTS / "executed_kernels.json").read_text())["faults"]:
        where = f"`{one['source']}`, PTX line {one['line']}" if one["line"] else ""
        rows.append(f"| {one['kernel']} | {one['fault']} | {one['told']} | {one['message']} | {where} |")
    return "\n".join(rows)


def simulation() -> str:
    million = json.loads((RESULTS / "simulation.json").read_text())["million"]
    return (
        f"A million requests with the lengths of Azure's conversations, {million['output_tokens'] / 1e6:.0f}"
        f" million output tokens, simulate in {million['seconds'] / 60:.0f} minutes on one core."
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}"


def _machine(found: dict[str, Any]) -> str:
    machine = found["machine"]
    others = machine["used_by_others"]
    busy = "" if others < 0.05 else f", while other work took {others:.0%} of the machine"
    return (
        f"*{machine['cpu']}, {machine['cores']} cores, JAX {machine['jax']}, {machine['date'][:10]}{busy}.*"
    )


# --- other files -------------------------------------------------------------------------------------


def included(name: str) -> str:
    """A file of the repository, without its title, since the page has its own. Its links to pages of design
    are for a page beside these.
    """
    return (ROOT / name).read_text().partition("\n")[2].replace("](docs/design/", "](")


def readme(block: str) -> str:
    """A generated block of README.md."""
    return (
        (ROOT / "README.md")
        .read_text()
        .split(f"<!-- {block}: begin -->")[1]
        .split(f"<!-- {block}: end -->")[0]
        .strip()
    )


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


CONTENT: dict[str, Callable[[], str]] = {
    "engine options": lambda: options(EngineConfig, ENGINE_SECTIONS),
    "server options": lambda: options(ServerConfig, SERVER_SECTIONS),
    "sampling parameters": lambda: options(SamplingParams, SAMPLING_SECTIONS),
    "metrics": metrics,
    "vllm: same": vllm_same,
    "vllm: renamed": lambda: vllm_settings("renamed", (*engine_settings.ENGINE, *server_settings.SERVER)),
    "vllm: no effect": lambda: vllm_settings("no effect", (*engine_settings.ENGINE, *server_settings.SERVER)),
    "vllm: not supported": lambda: vllm_settings(
        "not supported", (*engine_settings.ENGINE, *server_settings.SERVER)
    ),
    "vllm: sampling": lambda: vllm_settings(None, (*SAMPLING, *STRUCTURED, *CALLS)),
    "comparison": compare,
    "perplexity": perplexity,
    "quantized steps": quantized_steps,
    "start time": start_time,
    "sharing": sharing,
    "targets": targets,
    "simulation": simulation,
    "executed kernels": executed_kernels,
    "planted faults": planted_faults,
    "popular checkpoints": lambda: readme("popular checkpoints"),
    "ARCHITECTURE.md": lambda: included("ARCHITECTURE.md"),
    "CONTRIBUTING.md": lambda: included("CONTRIBUTING.md"),
    "CHANGELOG.md": lambda: included("CHANGELOG.md"),
    "benchmarks/NOTES.md": lambda: included("benchmarks/NOTES.md"),
    "notebook": notebook,
}

if __name__ == "__main__":  # python tools/docs_pages.py "engine options"
    print(CONTENT[sys.argv[1]]())
