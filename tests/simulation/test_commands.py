"""`jengine simulate` and `jengine tune`, without an engine."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest

from jengine import EngineConfig, cli
from jengine.capacity.simulation.replay import EngineShape, best_options
from jengine.capacity.simulation.setup import Setup
from jengine.capacity.simulation.summary import Targets
from jengine.commands import simulate
from jengine.core.scheduling_options import STRATEGIES
from tests.simulation.shapes import make_shape, poisson


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = poisson(0, 60, rate=300.0)
    lines = [{"jengine_trace": 1}] + [
        {"arrival": float(at), "prompt_tokens": int(prompt), "output_tokens": int(output)}
        for at, prompt, output in zip(rows.arrivals, rows.prompts, rows.outputs, strict=True)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Replaces every model with make_shape. Returns the requested configurations."""
    asked: list[EngineConfig] = []

    def of(config: EngineConfig, costs_file: Path | None = None, drafts_right: float = 0.0) -> Setup:
        asked.append(config)
        return Setup(config, None, None, drafts_right)  # type: ignore[arg-type]

    def shape(self: Setup, **changes: int) -> object:
        rows = changes.get("max_num_seqs", self.config.max_num_seqs or 4)
        return make_shape(max_num_seqs=rows, page_size=changes.get("page_size", 4), num_pages=2000, tiles=4)

    monkeypatch.delenv("JENGINE_CACHE_DIR")
    monkeypatch.setattr(Setup, "of", of)
    monkeypatch.setattr(Setup, "shape", shape)
    return asked


def test_simulate_prints_percentiles(trace, capsys, no_model):
    assert (
        cli.main(["simulate", "demo", trace, "--max-num-seqs", "2", "--target-ttft-ms", "100", "--quiet"])
        == 0
    )
    text = capsys.readouterr().out
    assert no_model[0].max_num_seqs == 2
    assert all(
        word in text
        for word in (
            "60 requests",
            "p95",
            "first token, ms",
            "goodput",
            "device busy",
            "preemption",
            "running",
        )
    )


def test_simulate_as_json_and_in_part(trace, capsys):
    arguments = ["simulate", "demo", trace, "--requests", "10", "--rate-scale", "0.5", "--json", "--quiet"]
    assert cli.main(arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["requests"] == 10 and facts["in_target"] is None and facts["total"]["50"] > 0


def test_what_has_no_value_is_null(tmp_path, capsys):
    """No request fits, so none has a duration."""
    file = tmp_path / "long.jsonl"
    request = {"arrival": 0.0, "prompt_tokens": 1000, "output_tokens": 1}
    file.write_text(f'{{"jengine_trace": 1}}\n{json.dumps(request)}\n')
    assert cli.main(["simulate", "demo", str(file), "--json", "--quiet"]) == 0
    facts = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert facts["refused"] == facts["unanswered"] == 1 and facts["mean_total"] is None


def test_simulate_finds_the_engines_needed(trace, capsys):
    arguments = ["simulate", "demo", trace, "--replicas", "auto", "--quiet", "--target-ttft-ms"]
    assert cli.main([*arguments, "30", "--json"]) == 0
    engines = json.loads(capsys.readouterr().out)["engines"]
    assert engines > 1
    assert cli.main([*arguments, "30"]) == 0
    assert f"{engines} engines needed for 95% of the requests" in capsys.readouterr().out
    assert cli.main([*arguments, "0.01"]) == 1
    assert "no number of engines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--replicas", "auto"], "needs targets"),
        (["--replicas", "0"], "replicas"),
        (["--requests", "0"], "requests=0"),
        (["--rate-scale", "-1"], "rate_scale"),
        (["--target-ttft-ms", "-1"], "target_ttft_ms"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
    ],
)
def test_bad_arguments_are_named(trace, capsys, arguments, says):
    assert cli.main(["simulate", "demo", trace, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_tune_writes_options_that_engines_take(trace, capsys, tmp_path):
    out = tmp_path / "options.toml"
    assert (
        cli.main(
            [
                "tune",
                "demo",
                trace,
                "--max-model-len",
                "128",
                "--objective",
                "throughput",
                "--out",
                str(out),
                "--quiet",
            ]
        )
        == 0
    )
    text = out.read_text()
    options = tomllib.loads(text)
    assert options["max_model_len"] == 128 and options["max_num_seqs"] > 4
    EngineConfig.of("demo", options)
    assert "output tokens a second" in text.splitlines()[0] and "max_num_seqs" in capsys.readouterr().err


def test_values_that_tune_writes(tmp_path):
    given = {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "lora_target_modules": ("q_proj", "v_proj"),
        "max_model_len": None,
        "dtype": "bfloat16",
    }
    options = tomllib.loads("".join(map(simulate._line, given.items())))
    config, wanted = (EngineConfig.of("demo", values) for values in (options, given))
    assert json.loads(str(config.speculative_config)) == given["speculative_config"]
    assert dataclasses.replace(config, speculative_config=given["speculative_config"]) == wanted


def test_tune_without_a_file_prints_them(trace, capsys):
    assert cli.main(["tune", "demo", trace, "--quiet", "--target-ttft-ms", "20"]) == 0
    text = capsys.readouterr().out
    options = tomllib.loads(text)
    assert options["max_num_seqs"] > 4
    if "strategy" in options:
        assert f"\n# {options['strategy']}: " in text


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_options_file_explains_a_strategy(name):
    text = simulate._line(("strategy", name))
    assert text.startswith(f"# {name}: ") and tomllib.loads(text) == {"strategy": name}


def test_a_search_keeps_what_cannot_be_improved():
    shape, tried = make_shape(max_num_seqs=16, num_pages=4000), []

    def shape_of(changes):
        tried.append(changes)
        return make_shape(max_num_seqs=changes.get("max_num_seqs", 16), num_pages=4000)

    tuned = best_options(
        shape_of, {"max_num_seqs": (1, 2, 16)}, poisson(1, 40, 1e3), Targets(), objective="throughput"
    )
    assert shape.limits.max_num_seqs == 16 and tuned.changes == {}
    assert tuned.before == tuned.after and tuned.tried == len(tried) == 4


def test_estimated_costs_are_named_and_not_recommended(trace, capsys, monkeypatch):
    """More than eight sequences are faster, by costs that nothing has measured."""

    def shape(self: Setup, **changes: int) -> EngineShape:
        rows = changes.get("max_num_seqs", 4)
        made = make_shape(max_num_seqs=rows, page_size=changes.get("page_size", 4), num_pages=2000, tiles=4)
        return dataclasses.replace(made, measured=rows <= 8)

    monkeypatch.setattr(Setup, "shape", shape)
    assert cli.main(["tune", "demo", trace, "--quiet", "--objective", "throughput"]) == 0
    text = capsys.readouterr()
    assert tomllib.loads(text.out)["max_num_seqs"] == 8
    assert re.search(r"--max-num-seqs \d\d.*: may be better, but its programs were not measured", text.err)
