"""The settings in an adapter's adapter_config.json, as PEFT applies them.

Python's `re` backtracks and holds the interpreter meanwhile: a short pattern of an untrusted file can stop a
process for hours. So another process matches names, within SECONDS of processor time.
"""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jengine.base.errors import ModelError, shown

MAX_LENGTH = 10_000  # characters of a pattern
SECONDS = 2  # of processor time, for all patterns of a call
SCRIPT = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    try:
        match = re.compile(pattern).fullmatch
        result = [number for number, name in enumerate(names) if match(name)]
    except (re.error, OverflowError, RecursionError) as error:
        result = str(error)
    print(json.dumps(result), flush=True)
"""


class InvalidPattern(ValueError):
    """A regular expression that cannot be applied; says why.

    Attributes:
        number: its place among the patterns.
    """

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


def full_matches(patterns: Sequence[str], names: Sequence[str]) -> list[set[str]]:
    """The names that each pattern matches from start to end, as `re.fullmatch` does.

    Raises:
        InvalidPattern: one is no regular expression, is longer than MAX_LENGTH, or takes too long.
    """
    if not patterns:
        return []
    for number, pattern in enumerate(patterns):
        if len(pattern) > MAX_LENGTH:
            raise InvalidPattern(number, f"has {len(pattern)} characters, more than {MAX_LENGTH}")
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "ignore", "-c", SCRIPT, str(SECONDS)],
        input=json.dumps([patterns, names]),
        capture_output=True,
        text=True,
    )
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    for number, result in enumerate(results):
        if isinstance(result, str):
            raise InvalidPattern(number, f"is no regular expression: {result}")
    if len(results) < len(patterns):
        slow = ended.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        why = "takes too long" if slow else f"cannot be matched: {ended.stderr.strip()[-200:]}"
        raise InvalidPattern(len(results), why)
    return [{names[number] for number in result} for result in results]


MAX_NAME = 1000  # characters of a module's name
NAMES = f"a list of names of at most {MAX_NAME} characters"
# Settings that change results in ways that are not supported, and the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[str, Sequence[Any]]] = {
    "use_dora": ("DoRA is not supported: merge the adapter into the weights", (False,)),
    "modules_to_save": ("whole modules are not replaced: merge the adapter into the weights", ([],)),
    "bias": ("biases are not changed: merge the adapter into the weights", ("none",)),
    "lora_bias": ("biases of adapters are not supported", (False,)),
    "layer_replication": ("layers are not repeated", ([],)),
    "trainable_token_indices": ("rows of embeddings are not replaced", ([],)),
    "alora_invocation_tokens": ("activated LoRA is not supported", ([],)),
    "use_qalora": ("QALoRA is not supported", (False,)),
    "use_bdlora": ("block-diagonal LoRA is not supported", (False,)),
    "arrow_config": ("routing among adapters is not supported", ()),
}
CHANGES_BASE = re.compile(r"(?i)pissa|olora|corda|loftq")  # values of init_lora_weights

Patterns = Mapping[str, Any]  # values of the modules that a regular expression matches
Targets = str | tuple[str, ...]  # a regular expression, or ends of modules' names


@dataclass(frozen=True)
class LoraConfig:
    """
    Attributes:
        file: that errors name.
        r, alpha: of modules that no pattern matches.
        rs: whether scales are those of rsLoRA.
        targets, excluded: modules that have factors, and of these, modules that have none.
        parameters: ends of the names of parameters that have factors.
    """

    file: Path
    r: int
    alpha: float
    ranks: Patterns
    alphas: Patterns
    rs: bool
    targets: Targets
    excluded: Targets
    parameters: tuple[str, ...]

    def scales(self, ranks: Mapping[str, int]) -> dict[str, np.float32]:
        """What multiplies the product of each module's factors.

        Args:
            ranks: of the modules' factors, by names as in PEFT.

        Raises:
            ModelError: a rank is another one here; a scale is not finite.
        """
        scales = dict[str, np.float32]()
        r_of = self._values("rank_pattern", self.ranks, [*ranks])
        alpha_of = self._values("alpha_pattern", self.alphas, [*ranks])
        for name, rank in ranks.items():
            r, alpha = r_of.get(name, self.r), alpha_of.get(name, self.alpha)
            if r != rank:
                raise ModelError(
                    f"module {name} has rank {rank}, but the configuration says r={r}", file=self.file
                )
            with np.errstate(over="ignore"):
                scales[name] = np.float32(alpha / (math.sqrt(r) if self.rs else r))
            if not np.isfinite(scales[name]):
                raise ModelError(
                    f"lora_alpha={shown(alpha)} of module {name} gives a scale that is not finite in float32",
                    file=self.file,
                )
        return scales

    def check_targets(
        self, names: Collection[str], others: Collection[str], parameters: Collection[str]
    ) -> None:
        """Checks that each target has factors, if the model has modules of it that are not excluded, and that
        a target has some.

        Args:
            names: of modules with factors.
            others: names of the model's other modules.
            parameters: names of parameters with factors.

        Raises:
            ModelError: a target has none.
        """
        if isinstance(self.targets, str):
            matches = any(self._matches("target_modules", [self.targets], [*names]))
        else:
            present, absent = _by_end(names), _by_end(others)
            missing = {name: absent[name] for name in self.targets if name in absent and name not in present}
            excluded = self._excluded([name for names in missing.values() for name in names])
            for target, without in missing.items():
                if not excluded.issuperset(without):
                    raise ModelError(
                        f"target_modules has {shown(target)}, but no module of it has tensors", file=self.file
                    )
            matches = bool(parameters or not self.targets or present.keys() & {*self.targets})
        if not matches:
            targets = shown(self.targets if isinstance(self.targets, str) else [*self.targets])
            raise ModelError(f"target_modules={targets} matches no module with tensors", file=self.file)
        present = _by_end(parameters)
        for target in self.parameters:
            if target not in present:
                raise ModelError(
                    f"target_parameters has {shown(target)}, but no such one has tensors", file=self.file
                )

    def _excluded(self, names: Sequence[str]) -> set[str]:
        if isinstance(self.excluded, str):
            return self._matches("exclude_modules", [self.excluded], names)[0]
        by_end = _by_end(names)
        return {name for end in self.excluded for name in by_end.get(end, ())}

    def _values(self, field: str, patterns: Patterns, names: Sequence[str]) -> dict[str, Any]:
        """The value of the first pattern that matches the end of a module's name, by name."""
        values: dict[str, Any] = {}
        matches = self._matches(field, [*patterns], names, r"(.*\.)?({})")
        for value, matching in zip(patterns.values(), matches, strict=True):
            for name in matching:
                values.setdefault(name, value)
        return values

    def _matches(
        self, field: str, patterns: Sequence[str], names: Sequence[str], form: str = "{}"
    ) -> list[set[str]]:
        try:
            return full_matches([form.format(pattern) for pattern in patterns], names)
        except InvalidPattern as error:
            raise ModelError(f"{field} {shown(patterns[error.number])}: {error}", file=self.file) from None


def lora_config(config: Mapping[str, Any], file: Path) -> LoraConfig:
    """Reads the settings.

    Raises:
        ModelError: a setting is not supported, or its value is invalid.
    """

    def value[T](name: str, default: T, is_valid: Callable[[Any], bool], must: str) -> T:
        stored = config.get(name)
        if stored is None:
            return default
        if not is_valid(stored):
            raise ModelError(f"{name}={shown(stored)} must be {must}", file=file)
        return stored  # type: ignore[no-any-return]

    def patterns(name: str, is_valid: Callable[[Any], bool], must: str) -> Patterns:
        stored: Patterns = value(name, {}, lambda x: isinstance(x, dict), "an object")
        for pattern, number in stored.items():
            if not isinstance(pattern, str) or not is_valid(number):
                raise ModelError(f"{name} {shown(pattern)}={shown(number)} must be {must}", file=file)
        return stored

    def targets(name: str) -> Targets:
        stored = value(name, (), lambda x: isinstance(x, str) or _are_names(x), f"text, or {NAMES}")
        return stored if isinstance(stored, str) else tuple(stored)

    kind = value("peft_type", "LORA", lambda x: isinstance(x, str), "text")
    if kind != "LORA":
        raise ModelError(f"peft_type {shown(kind)} is not supported; LORA is", file=file)
    for name, (why, nothing) in UNSUPPORTED.items():
        stored = config.get(name)
        if stored is not None and stored not in nothing:
            raise ModelError(f"{name}={shown(stored)}: {why}", file=file)
    if isinstance(method := config.get("init_lora_weights"), str) and CHANGES_BASE.search(method):
        raise ModelError(
            f"init_lora_weights={shown(method)} changes the model's own weights; save the adapter as a plain"
            " one with path_initial_model_for_weight_conversion",
            file=file,
        )
    rank, number = "a whole number of at least 1", "a finite number"
    return LoraConfig(
        file,
        r=value("r", 8, _is_rank, rank),
        alpha=float(value("lora_alpha", 8, _is_finite, number)),
        ranks=patterns("rank_pattern", _is_rank, rank),
        alphas=patterns("alpha_pattern", _is_finite, number),
        rs=value("use_rslora", False, lambda x: isinstance(x, bool), "true or false"),
        targets=targets("target_modules"),
        excluded=targets("exclude_modules"),
        parameters=tuple(value("target_parameters", (), _are_names, NAMES)),
    )


def _by_end(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by each of their ends, such as `self_attn.q_proj` and `q_proj`."""
    by_end: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for first in range(len(parts)):
            by_end.setdefault(".".join(parts[first:]), []).append(name)
    return by_end


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple | set) and all(
        isinstance(name, str) and len(name) <= MAX_NAME for name in value
    )
