"""`jengine completions SHELL`: prints a script that completes commands, options and file names."""

from __future__ import annotations

import argparse

from jengine.commands.terminal import write

EPILOG = """\
bash:  jengine completions bash > ~/.local/share/bash-completion/completions/jengine
zsh:   jengine completions zsh > ~/.zfunc/_jengine    (a folder of $fpath, before compinit runs)
fish:  jengine completions fish > ~/.config/fish/completions/jengine.fish
"""
FILES, FOLDERS = ("FILE", "MODEL"), ("DIR",)  # metavars


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], whole: argparse.ArgumentParser
) -> None:
    parser = commands.add_parser(
        "completions",
        help="print a shell completion script",
        description="Print a script that completes jengine's commands, options and file names.",
        epilog=EPILOG,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=lambda options: _print(whole, commands, options.shell))


def _print(
    whole: argparse.ArgumentParser, commands: argparse._SubParsersAction[argparse.ArgumentParser], shell: str
) -> None:
    import shtab

    for command in commands.choices.values():
        for action in command._actions:
            if action.metavar in FILES + FOLDERS:
                action.complete = shtab.FILE if action.metavar in FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
    write(shtab.complete(whole, shell=shell))
