"""Downloads files from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jengine.base.errors import ModelError


def download(model: str, revision: str | None, files: Sequence[str], *ignored: str) -> Path:
    """The local folder of a hub id, with the files that match these patterns. Those that are cached are not
    downloaded.

    Raises:
        ModelError: the hub has no such model, or cannot be reached.
    """
    from huggingface_hub import snapshot_download  # slow to import, and only needed for hub ids

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=[*files],
                ignore_patterns=[*ignored, "consolidated*"],
            )
        )
    except Exception as error:  # errors of the network and the hub have no common base class
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"there is no such folder, and the hub has no such model: {cause}", file=model
        ) from error
