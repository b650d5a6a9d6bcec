"""What a family of vision models provides: how images are cut, how prompts refer to them, and the encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jengine.base.errors import ModelError
from jengine.core.images import VISUAL as VISUAL

if TYPE_CHECKING:
    import jax
    import numpy as np
    from flax import nnx
    from PIL.Image import Image

Json = Mapping[str, Any]  # fields of a file or of an option
Encode = Callable[[str], list[int]]  # text to token ids
# fields of preprocessor_config.json with the only value that any family supports
SWITCHES = {"do_convert_rgb": True, "do_rescale": True, "do_resize": True}


class Patches(NamedTuple):
    """An image, or a part of one that the encoder reads by itself, cut into patches."""

    pixels: np.ndarray  # float32 [patches, features]
    places: np.ndarray  # int32 [patches, P]: what the family's encoder needs to know of each patch's place
    rows: int  # embeddings that the encoder makes of it
    grid: tuple[int, int]  # height and width of these rows in the image


class RowEncoder(Protocol):
    """What turns patches into rows of embeddings. Holds no weights.

    Attributes:
        features: numbers of a patch.
        places: numbers of its place; 0: the patches are embeddings that prompts give.
        patches_per_row: patches of one embedding.
        levels: hidden sizes in an embedding row: 1, or more with DeepStack.
        ahead: whether the tokens of a part see each other, those behind them too. They follow one another.
        smallest, largest: patches of the smallest and of the largest part. All parts have a multiple of
            `smallest` patches, unless patches_per_row is 1.
        most_rows: embeddings of the largest image.
    """

    features: int
    places: int
    patches_per_row: int
    levels: int
    ahead: bool
    smallest: int
    largest: int
    most_rows: int

    def module(self, dtype: Any) -> nnx.Module:
        """The encoder. Declares its weights as a Decoder does, with sources in the checkpoint."""

    def encode(self, module: Any, pixels: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        """pixels float32 [N, features], places int32 [N, P], segments int32 [N] -> [N // patches_per_row,
        hidden * levels].

        Several parts lie one after the other, told apart by their segments; 0 is padding. Each begins at a
        multiple of patches_per_row, and a patch attends to those of its own segment.
        """
        rows: jax.Array = module(pixels, places, segments)
        return rows

    def facts(self) -> dict[str, Any]:
        """All that the encoder's programs depend on, as plain data."""


class Vision(RowEncoder, Protocol):
    """The images of one model. Made from the configuration files of its folder. A server's process, which has
    no JAX, cuts images and makes prompts, so only `module` and `encode` may import it.

    Attributes:
        token: the token that stands for an image in a text prompt, before `prompt` replaces it.
        marker: its text, as chat templates write it.
        row_token: the token that stands for one embedding row, where prompts are shown or counted.
    """

    token: int
    marker: str
    row_token: int

    def cut(self, image: Image) -> list[Patches]:
        """An RGB image as its parts, in the order of their embeddings in a prompt."""

    def limited(self, rows: int) -> Vision:
        """This vision for images of at most so many embeddings: larger ones are scaled down, if the family
        reads images of any size.
        """
        return self

    def prompt(self, parts: Sequence[Patches]) -> list[int]:
        """Token ids that stand for the image in a prompt; VISUAL at each embedding row."""


def require(fields: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Checks that fields have the values of SWITCHES and `fixed`. A missing field and null are accepted.

    Raises:
        ModelError: naming the field and its value.
    """
    for name, value in {**SWITCHES, **fixed}.items():
        if fields.get(name, value) not in (value, None):
            raise ModelError(f"{name}={fields[name]!r} is not supported, only {value!r}")
