"""Command lines: a flag for each field of a dataclass, with help from its docstring, and vLLM's flags."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, cast, get_args, get_origin, get_type_hints

from jengine.base.errors import InvalidArgument
from jengine.base.options import texts_of, types_in
from jengine.vllm.setting import Setting, whole_number
from jengine.vllm.translate import HINTS, VALUES, suggestion, value_of

METAVARS = {str: "TEXT", float: "NUMBER", int: "N"}
SHORT = {  # as in vLLM
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
    "speculative_config": "-sc",
}
FILES = ("chat_template",)  # options whose text may be a file
SEVERAL = {
    "lora_modules": "NAME=PATH",
    "lora_target_modules": "NAME",
    "allowed_media_domains": "HOST",
    "served_model_name": "NAME",
}  # options that take several values after one flag, as in vLLM

LIBRARY_ONLY = re.compile("; None: [^;.]*")  # a flag cannot give None


def add_fields(
    group: argparse._ArgumentGroup,
    of: type,
    skip: tuple[str, ...] = (),
    defaults: dict[str, Any] | None = None,
) -> None:
    """Adds a --kebab-case flag for each field of a dataclass, with help from its docstring."""
    hints, helps = get_type_hints(of), texts_of(of)
    for field in dataclasses.fields(of):
        if field.name in skip:
            continue
        text = _plain(helps.get(field.name, ""), of)
        default = (defaults or {}).get(field.name, field.default)
        flag = _flag(hints[field.name])
        if field.name in VALUES:
            flag["type"] = partial(_read_value, field.name, flag.get("type", str))
        if field.name in FILES:
            flag["metavar"] = "FILE"
        if field.name in SEVERAL:
            flag |= {"action": "extend", "nargs": "+", "metavar": SEVERAL[field.name]}
        if flag.get("action") in ("append", "extend"):
            text += " (repeatable)"
        if default not in (None, ()):
            text += (
                " (default:"
                f" {({True: 'on', False: 'off'}[default]) if isinstance(default, bool) else default})"
            )
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            *([SHORT[field.name]] if field.name in SHORT else []),
            dest=field.name,
            default=argparse.SUPPRESS,  # only given options are passed on
            help=text.replace("%", "%%"),
            **flag,
        )


def flag_values(options: argparse.Namespace, of: type, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass that were given as flags."""
    names = {field.name for field in dataclasses.fields(of)}.difference(skip)
    return {name: value for name, value in vars(options).items() if name in names}


def _flag(hint: Any) -> dict[str, Any]:
    """argparse options for a value of this type; of a union's, the first of list, text, number."""
    kinds = [kind for kind in types_in(hint) if kind is not type(None)]
    listed = [get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, tuple)]
    if listed:
        return {"action": "append", "type": _READ.get(listed[0], listed[0]), "metavar": METAVARS[listed[0]]}
    if get_origin(kinds[0]) is dict or dataclasses.is_dataclass(kinds[0]):
        return {"type": _json_or_text if str in kinds else _json_object, "metavar": "JSON"}
    if get_origin(kinds[0]) is Literal:
        return {"choices": tuple(choice for kind in kinds for choice in get_args(kind))}
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    kind = next(kind for kind in (str, float, int) if kind in kinds)
    read = _READ.get(kind, kind)
    words = [word for other in kinds if get_origin(other) is Literal for word in get_args(other)]
    return {"type": lambda text: text if text in words else read(text), "metavar": METAVARS[kind]}


def _read_value(name: str, read: Callable[[str], Any], text: str) -> Any:
    """The value of an option whose values have other names, too."""
    value = value_of(name, text)
    return read(value) if isinstance(value, str) else value


def _whole(text: str) -> int:
    try:
        return whole_number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number") from None


_READ: dict[type, Callable[[str], Any]] = {int: _whole}


def _json_or_text(text: str) -> dict[str, Any] | str:
    """A JSON object, or a word such as auto."""
    return _json_object(text) if text.lstrip().startswith("{") else text


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _plain(text: str, of: type) -> str:
    """A field's help for the command line: no clauses about None, numbers in place of constants."""
    constants = vars(sys.modules[of.__module__])
    return re.sub(r"\bMAX_\w+", lambda name: f"{constants[name[0]]:,}", LIBRARY_ONLY.sub("", text))


class Parser(argparse.ArgumentParser):
    """Reports an error as one line, in the name of the command that was given, and never shows the values of
    unknown options.

    Options may be written with underscores, as in Python, and a field of a JSON option of vLLM as
    --option.field VALUE.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        form = argparse.RawDescriptionHelpFormatter  # descriptions and examples have lines of their own
        super().__init__(*args, **{"formatter_class": form, **options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(
            2,
            f"{self.prog}: error: {message}{' See' if message.endswith('?') else '; see'} {self.prog}"
            " --help\n",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known = self._option_string_actions
        words = [*(sys.argv[1:] if args is None else args)]
        end = words.index("--") if "--" in words else len(words)  # what follows is no option
        try:
            words[:end] = _without_dots([_dashed(word, known) for word in words[:end]], known)
        except ValueError as error:
            self.error(str(error))
        parsed, others = super().parse_known_args(words, namespace)
        if others:
            self.error(self._unknown(others))
        return parsed, others

    def _unknown(self, words: Sequence[str]) -> str:
        option = next(
            (word.partition("=")[0] for word in words if word.startswith("-") and len(word) > 1), None
        )
        if option is None:
            return f"{words[0]!r}: there is one argument too many"
        return f"{option}: there is no such option{suggestion(option, self._option_string_actions)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            command = isinstance(action, argparse._SubParsersAction)
            what = (
                "there is no such command"
                if command
                else f"must be {', '.join(names)}{HINTS.get(action.dest, '')}"
            )
            raise argparse.ArgumentError(action, f"{value!r}: {what}{suggestion(str(value), names)}")


class Help(argparse.Action):
    """Shows every option, or the command's own ones and these of other groups."""

    def __init__(self, common: Sequence[str] | None = None, **options: Any) -> None:
        self._common = common
        super().__init__(**{**options, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}, nargs=0)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        groups = parser._optionals, parser._positionals
        if (common := self._common) is not None:
            for action in parser._actions:
                if action.container not in groups and action.dest not in common:  # type: ignore[attr-defined]
                    action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


def add_help(parser: argparse.ArgumentParser, common: Sequence[str]) -> None:
    """Adds --help, which shows these options of groups, and --help-all. The parser has no help yet."""
    parser.add_argument("-h", "--help", action=cast(Any, Help), common=common, help="show common options")
    parser.add_argument("--help-all", action=cast(Any, Help), help="show every option")


class VllmFlag(argparse.Action):
    """A flag of vLLM: sets jengine's option with the same meaning, or notes that it has no effect."""

    def __init__(self, setting: Setting, note: Callable[[str], None], **options: Any) -> None:
        self._setting, self._note = setting, note
        super().__init__(**options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        if self._setting.switch:
            values = not (option or "").startswith("--no-")
        shown = f"{option} has no effect: {self._setting.why}"
        try:
            options, note = self._setting.take(values)
        except InvalidArgument as wrong:
            parser.error(f"{option}: {wrong.limit}")
        except ValueError as wrong:
            parser.error(f"{option}: {wrong}")
        for name, value in options.items():
            setattr(namespace, name, _as_flag(parser, name, value))
        if note:
            self._note(shown)


def add_vllm_flags(
    parser: argparse.ArgumentParser, settings: Iterable[Setting], note: Callable[[str], None]
) -> None:
    """Adds vLLM's flags that are no options of jengine. Help does not show them."""
    taken = parser._option_string_actions
    for setting in settings:
        name = setting.name.replace("_", "-")
        switch = setting.switch
        flags = [
            flag
            for flag in (*setting.flags, f"--{name}", *([f"--no-{name}"] if switch else []))
            if flag not in taken
        ]
        if not flags:
            continue
        nargs: Any = 0 if switch else None
        action = cast(Any, VllmFlag)
        parser.add_argument(
            *flags, action=action, setting=setting, note=note, nargs=nargs, dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )  # fmt: skip


def _as_flag(parser: argparse.ArgumentParser, name: str, value: Any) -> Any:
    """The value of jengine's own flag for this text."""
    flag = parser._option_string_actions.get(f"--{name.replace('_', '-')}")
    if flag is None or not isinstance(value, str):
        return value
    value = parser._get_value(flag, value)
    parser._check_value(flag, value)
    return value


def _dashed(word: str, known: Iterable[str]) -> str:
    """An option with dashes instead of underscores, up to its field or value."""
    option = word.partition("=")[0].partition(".")[0]
    if not option.startswith("--") or option in known:
        return word
    return option.replace("_", "-") + word[len(option) :]


def _without_dots(words: list[str], known: Iterable[str]) -> list[str]:
    """--option.field VALUE as --option={"field": VALUE}, all fields together. VALUE is JSON or text.

    Raises:
        ValueError: a field is given both a value and fields.
    """
    objects: dict[str, dict[str, Any]] = {}
    out: list[str] = []
    waiting = iter(words)
    for word in waiting:
        option, equals, value = word.partition("=")
        name, dot, path = option.partition(".")
        if not (word.startswith("-") and dot and name in known):
            out.append(word)
            continue
        *folders, last = path.removesuffix("+").split(".")
        fields = objects.setdefault(name, {})
        for folder in folders:
            fields = fields.setdefault(folder, {})
            if not isinstance(fields, dict):
                raise ValueError(f"{option}: {folder!r} has the value {fields!r}, so it has no fields")
        fields[last] = _value(value if equals else next(waiting, ""))
    return out + [f"{name}={json.dumps(fields)}" for name, fields in objects.items()]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
