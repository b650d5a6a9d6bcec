"""Tables of measured figures for the documentation, from benchmarks/results."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

CARDS_OF_TARGETS = {
    "a100": " (A100)",
    "rtx5090": " (RTX 5090)",
    "rtx3090": " (RTX 3090)",
    "l4": " (L4)",
    "b200": " (B200)",
}
ENGINES = {"jengine": "jengine", "vllm": "vLLM", "openvino": "OpenVINO GenAI"}
MEASURES = {
    "stream": "One stream, tokens/s",
    "batch": "32 at once, tokens/s",
    "prefill": "Prompt of 1,024, tokens/s",
    "later start": "Start, s",
}


def compare(name: str) -> str:
    """Medians of jengine and other engines on one machine, from the file of this name."""
    found = _found(name)
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
    found = _found("quantization_perplexity")
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
    found = _found("quantized_steps")
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


def gpu() -> str:
    """The engine on GPUs: steps and rates."""
    suites = {"H200": _found("gpu_suite")["engine"], "H100": _found("gpu_suite_h100")["engine"]}
    first, second = ({row["case"]: row for row in suite["rows"]} for suite in suites.values())
    rows = [
        "| | H200: step, ms | Tokens/s | Of peak | H100: step, ms | Tokens/s | Of peak |",
        "| --- |" + " ---: |" * 6,
    ]
    for case, row in first.items():
        if "share" in row:
            other = second[case]
            cells = f"{row['ms']:.2f} | {_rates(row)} | {other['ms']:.2f} | {_rates(other)}"
            rows.append(f"| {case} | {cells} |")
    machines = [suite["machine"] for suite in suites.values()]
    where = "; ".join(f"{one['devices'][0]}, JAX {one['jax']}, {one['date'][:10]}" for one in machines)
    return "\n".join([*rows, "", f"*{where}.*"])


def gpu_kernels() -> str:
    """Attention's kernels beside others' on a GPU, in microseconds."""
    suite = _found("gpu_suite_h100")
    beside = {"decode": ("FlashInfer",), "prefill": ("cudnn through JAX", "PyTorch SDPA")}
    rows = ["| | jengine | FlashInfer | cuDNN | PyTorch |", "| --- |" + " ---: |" * 4]
    for part, names in beside.items():
        us = {row["case"]: row["us"] for row in suite[part]["rows"] if "us" in row}
        for case, own in us.items():
            cache, _, load = case.partition(", ")
            others = [us.get(other) for name in names for other in (f"{case}, {name}", f"{name}, {load}")]
            found = [f"{other:.0f}" for other in others if other is not None]
            if cache == "bfloat16 cache" and found:
                row = [f"{own:.0f}", *([""] if part == "prefill" else []), *found]
                rows.append(f"| {part}, {load} | " + " | ".join(row + [""] * (4 - len(row))) + " |")
    return "\n".join(rows)


def _rates(row: dict[str, Any]) -> str:
    return f"{_number(row['tokens/s'])} | {row['share']:.0%}"


def start_time() -> str:
    found = _found("start_time")
    models = found["models"]
    rows = ["| | First start, s | Later start, s |", "| --- | ---: | ---: |"]
    rows += [
        f"| {name} | {model['first']['seconds']:.1f} | {model['later']['seconds']:.1f} |"
        for name, model in models.items()
    ]
    return "\n".join([*rows, "", _machine(found | models["demo"])])


def several_models() -> str:
    """Mixed traffic to two models, with a place for both and with one."""
    found = _found("several_models")
    both, one = (found["places"][places] for places in ("2", "1"))
    clients, requests, tokens = found["clients"], both["requests"], found["tokens"]
    loads = f"{len(one['loads'])} loads of {min(one['loads']):.1f} to {max(one['loads']):.1f} s"
    return (
        f"With two models of 134 million parameters in bfloat16 and {clients} clients that ask either at"
        f" random, {requests} requests of {tokens} tokens took {both['seconds']:.0f} s if both were loaded."
        f" With `--max-loaded-models 1` they took {one['seconds']:.0f} s, with {loads}; a request waited"
        f" {one['longest_seconds']:.0f} s at most. All were answered.\n\n{_machine(found)}"
    )


def sharing() -> str:
    found = _found("sharing")
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
    found = _found("scheduling")
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
    found = _found("executed_kernels")
    titles = ("Kernel", "Case", "Blocks of threads", "Instructions", "Seconds", "Schedules", "Error", "Lines")
    rows = ["| " + " | ".join(titles) + " |", "| --- | --- |" + " ---: |" * 6]
    for one in found["kernels"]:
        if "same_as" in one:
            continue
        blocks = " x ".join(str(size) for size in one["grid"] if size > 1) or "1"
        cells = (
            f"`{one['kernel']}`" + CARDS_OF_TARGETS.get(one["target"], ""),
            one["case"],
            f"{blocks} of {one['threads']}",
            f"{one['instructions']:,}",
            one["seconds"],
            one["schedules"],
            f"{one['error']:.1g}",
            f"{one['executed_lines']:,} of {one['lines']:,}",
        )
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    alike = Counter((one["target"], one["same_as"]) for one in found["kernels"] if "same_as" in one)
    same = [
        f"The PTX of {count} cases for {CARDS_OF_TARGETS[target][2:-1]} is that for"
        f" {CARDS_OF_TARGETS[other][2:-1]}, but for the target's name."
        for (target, other), count in alike.items()
    ]
    return "\n".join([*rows, "", " ".join(same), "", _machine(found)])


def planted_faults() -> str:
    rows = ["| Kernel | Fault | Told by | Message | Where |", "| --- | --- | --- | --- | --- |"]
    for one in _found("executed_kernels")["faults"]:
        where = f"`{one['source']}`, PTX line {one['line']}" if one["line"] else ""
        rows.append(f"| {one['kernel']} | {one['fault']} | {one['told']} | {one['message']} | {where} |")
    return "\n".join(rows)


def simulation() -> str:
    found = _found("simulation")
    million = found["million"]
    return (
        f"A million requests with the lengths of Azure's conversations, {million['output_tokens'] / 1e6:.0f}"
        f" million output tokens, simulate in {million['seconds'] / 60:.0f} minutes on one core."
        f"\n\n{_machine(found)}"
    )


def speculation() -> str:
    """Tokens a second with drafts by cost over those without."""
    found, load = _found("speculation_smollm2"), _found("speculation_smollm2_waves")
    tasks = {
        "edit": "Edit a program",
        "extract": "Copy sentences of the prompt",
        "quotes": "Summarize with quotes",
        "schema": "JSON by a schema",
        "compact": "the same, without whitespace",
        "chat": "Chat",
        "random": "Random words, temperature 1",
    }
    cells = {(cell["task"], cell["streams"]): f"{cell['auto']['ratio']:.2f}" for cell in found["cells"]}
    loaded = {cell["task"]: f"{cell['auto']['ratio']:.2f}" for cell in load["cells"]}
    rows = [
        " | ".join(["", title, *(cells[task, count] for count in (1, 4, 16, 32)), loaded.get(task, ""), ""])
        for task, title in tasks.items()
    ]
    streams = "| Tokens a second, relative to no drafts | 1 stream | 4 | 16 | 32 | 16, under load |"
    return "\n".join(
        [
            streams,
            "| --- | ---: | ---: | ---: | ---: | ---: |",
            *(row.strip() for row in rows),
            "",
            "Streams begin together, and the last one to end counts. Drafts help some more than others, so"
            " few run at the end. Under load, each stream is followed by another.",
            "",
            _machine(found),
        ]
    )


def constraints() -> str:
    """What constraints cost, by the fastest tenth of the steps, which others disturb least."""
    found = _found("structured")
    arms, mask = found["p10_and_median_of_steps"], found["mask"]
    of_sample = arms["json"]["of_sample"][0]
    micros = mask["microseconds_a_token"]
    return (
        f"A JSON schema costs each token {micros['fill']:.0f} microseconds of the host's time to find what is"
        f" allowed, and {micros['accept']:.0f} to advance. On a CPU, {found['rows']} sequences of the demo"
        f" model, for which this is much, run at {of_sample:.2f} of the speed without a constraint.\n\n"
        f"{_machine(found)}"
    )


def host_tier() -> str:
    found = _found("host_tier")
    rows = ["| | Without | With |", "| --- | ---: | ---: |"]
    for title, name in (
        ("Tokens computed again", "tokens_computed_again"),
        ("Time to the first token of a later turn, median, ms", "first_token_median_ms"),
        ("All later turns, s", "later_turns_s"),
    ):
        off, on = (median(run[name] for run in found[arm]) for arm in ("off", "on"))
        rows.append(f"| {title} | {off:,.0f} | {on:,.0f} |")
    return "\n".join([*rows, "", _machine(found)])


def batch_invariance() -> str:
    found = _found("batch_invariance")
    [one] = found["models"].values()
    return (
        f"With the demo model, {one['output_ratio']:.2f} of the usual throughput under load, and"
        f" {one['alone_ratio']:.2f} of the speed of a request that runs alone.\n\n"
        f"{_machine(found)}"
    )


def adapters() -> str:
    found = _found("lora")
    rows = ["| Places | Adapters in use | Tokens a second, relative |", "| ---: | ---: | ---: |"]
    rows += [f"| {one['places']} | {one['adapters']} | {one['ratio']:.2f} |" for one in found["throughput"]]
    return "\n".join([*rows, "", _machine(found)])


def weight_updates() -> str:
    found = _found("weight_updates")
    rows = ["| | Seconds |", "| --- | ---: |"]
    rows += [f"| update: {how} | {seconds:.2f} |" for how, seconds in found["update_seconds"].items()]
    for level in ("1", "2"):
        sleep = found[f"sleep_{level}"]
        given = sleep["bytes_of_arrays_given_back"] / 2**20
        rows.append(f"| `sleep({level})`, which gives {given:.0f} MiB back | {sleep['sleep_seconds']:.2f} |")
        rows.append(f"| `wake_up()` after it | {sleep['wake_seconds']:.2f} |")
    rows.append(f"| for comparison: a new engine | {found['new_engine_seconds']:.2f} |")
    return "\n".join([*rows, "", _machine(found)])


def replicas() -> str:
    found = _found("replicas")
    rows = ["| Routing | Tokens found in a cache | First token, median | 90 % of them |"]
    rows += ["| --- | ---: | ---: | ---: |"]
    for title, arm in (("as it is", "routed"), ("random", "random")):
        one = found["results"][arm]
        times = " | ".join(f"{one[name]:.0f} ms" for name in ("first_token_ms", "first_token_p90_ms"))
        rows.append(f"| {title} | {one['hit_rate']:.0%} | {times} |")
    return "\n".join([*rows, "", _machine(found)])


def _found(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text()) | {"file": name}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}"


def _machine(found: dict[str, Any]) -> str:
    """The machine, and the file."""
    machine = found["machine"]
    others = machine["used_by_others"]
    busy = "" if others < 0.05 else f", while other work took {others:.0%} of the machine"
    return (
        f"*{machine['cpu']}, {machine['cores']} cores, JAX {machine['jax']}, {machine['date'][:10]}{busy};"
        f" `benchmarks/results/{found['file']}.json`.*"
    )
