"""Downloads files from the Hugging Face hub, into huggingface_hub's cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jengine.base.errors import ModelError
from jengine.base.progress import is_seen
from jengine.hub.files import OTHERS


def download(
    model: str, revision: str | None, files: Sequence[str], *ignored: str, quiet: bool = False
) -> Path:
    """The local folder of a hub id, with the files that match these patterns. Those that are cached are not
    downloaded. Without a connection, the cached files are used if all of them are there.

    Args:
        quiet: no progress bars. They are shown on a terminal and in notebooks only.

    Raises:
        ModelError: the hub has no such model, refuses it, or cannot be reached.
    """
    from huggingface_hub import snapshot_download  # slow to import, and only needed for hub ids

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=[*files],
                ignore_patterns=[*ignored, *OTHERS],
                tqdm_class=_bar(model, quiet or not is_seen()),
            )
        )
    except Exception as error:  # errors of the network and the hub have no common base class
        raise hub_error(model, revision, error) from error


def hub_error(model: str, revision: str | None, error: Exception) -> ModelError:
    """What went wrong, for people."""
    from huggingface_hub import constants, errors

    # errors of the cache hide those that led to it
    first = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    cause = first if isinstance(first, Exception) else error
    text = f"there is no such folder, and the hub has no such model: {_first_line(error)}"
    token = "`hf auth login`, or HF_TOKEN"
    if isinstance(cause, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{model}"
        text = f"is gated: accept its conditions at {page}, and give a token of that account ({token})"
    elif isinstance(cause, errors.RepositoryNotFoundError):
        text = (
            "there is no such folder, and the hub has no such model; if it is private, give a token that may"
            f" read it ({token})"
        )
    elif isinstance(cause, errors.RevisionNotFoundError):
        text = f"the hub has no revision {revision!r} of this model"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        where = f"the hub at {constants.ENDPOINT} cannot be reached"
        text = f"is not completely in the cache, and {where}: {_first_line(first or error)}"
    return ModelError(text, file=model)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _bar(model: str, quiet: bool) -> type:
    """The class of huggingface_hub's progress bars: of several, only the one of bytes that are on disk."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)  # of huggingface_hub's own class
            hidden = quiet or options.get("unit") != "B" or options.get("desc") == "Downloading bytes"
            shown = {"desc": model, "bar_format": None, "leave": False}
            super().__init__(*args, **{**options, "disable": True} if hidden else {**options, **shown})

        def set_description(self, *_: Any, **__: Any) -> None:
            """The description stays the model's name."""

        set_description_str = set_description

    return Bar
