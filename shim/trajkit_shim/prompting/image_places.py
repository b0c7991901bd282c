"""The places of images in a prompt.

A chat template writes one token per image, in the place of as many tokens as the model's
processor makes of an image of that size. In the recorded ids these are content ids
(`trajkit.turns.content_ids`), so a prompt with another image is another prompt. The
engine gets the template's token once per image, and does the rest itself.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trajkit.turns import content_ids
from trajkit.turns.images import FIRST_CONTENT_ID
from trajkit_shim.chat.image_store import ImageStore
from trajkit_shim.chat.images import hashes_of
from trajkit_shim.engines.base import PromptImage
from trajkit_shim.engines.model_config import config_number
from trajkit_shim.errors import GatewayError, TemplateError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.render import Encoded, Ids

KIND = "image"


@dataclass(frozen=True, slots=True)
class ImageModel:
    """What a model does with images."""

    token_id: int  # of the token in the place of one
    count: Callable[[int, int], int]  # tokens of an image of a height and a width


class ImagePlaces:
    """Places images in token ids, for one model."""

    def __init__(self, model: ImageModel, store: ImageStore) -> None:
        self._model = model
        self._store = store

    def expand(self, encoded: Encoded, messages: Sequence[Json]) -> Encoded:
        """Replace the token of each image by the image's content ids.

        ``encoded`` has the text of ``messages``, and maybe of others without images.
        Raises `TemplateError` if the template has not written each image once.
        """
        names = hashes_of(messages)
        at = np.flatnonzero(encoded.ids == self._model.token_id)
        if len(at) != len(names):
            raise TemplateError(
                f"the chat template has {len(at)} places for {len(names)} images: it "
                "leaves out images of some messages",
                code="chat_template",
            )
        if not names:
            return encoded
        counts = np.ones(len(encoded.ids), np.int64)
        counts[at] = [self._n_tokens(name) for name in names]
        ids = np.repeat(encoded.ids, counts)
        starts = (np.cumsum(counts) - counts)[at].tolist()
        for name, start, n in zip(names, starts, counts[at].tolist(), strict=True):
            ids[start : start + n] = content_ids(KIND, name, n)
        return Encoded(ids, np.repeat(encoded.offsets, counts, axis=0))

    def items(self, ids: Ids, messages: Sequence[Json]) -> "list[PlacedImage]":
        """Return where the images of messages are in a prompt's recorded ids."""
        names = hashes_of(messages)
        if names and (ids == self._model.token_id).any():
            raise GatewayError(
                "an earlier reply contains the token of an image, so the "
                "engine cannot place the images of this request",
                code="image_token_sampled",
            )
        inside = np.flatnonzero(ids >= FIRST_CONTENT_ID)
        found, n_before = [], 0
        for name in names:
            n = self._n_tokens(name)
            start = int(inside[n_before])
            found.append(PlacedImage(name, self._model.token_id, start, start + n))
            n_before += n
        assert n_before == len(inside)
        return found

    def engine_ids(self, ids: Ids) -> Ids:
        """Return the ids that the engine consumes for a prompt's recorded ids."""
        return np.where(ids >= FIRST_CONTENT_ID, np.int32(self._model.token_id), ids)

    def load(self, images: "Sequence[PlacedImage]") -> list[PromptImage]:
        """Return images with their bytes."""
        store = self._store
        return [
            PromptImage(i.start, i.stop, store[i.hash].media_type, store.data(i.hash))
            for i in images
        ]

    def _n_tokens(self, name: str) -> int:
        image = self._store[name]
        try:
            return int(self._model.count(image.height, image.width))
        except ValueError as error:
            message = f"the model's processor refuses the image {name[:12]}: {error}"
            raise GatewayError(message, code="invalid_image") from error


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image and its tokens in a prompt: a `trajkit.schema.MM_ITEM`."""

    hash: str  # SHA-256
    token_id: int
    start: int
    stop: int
    kind: str = KIND


def load_image_model(path: str | Path) -> ImageModel | None:
    """Return what the model in a directory does with images; None: it takes none.

    The model's processor counts the tokens. Where its parts for video need torch, which
    is not installed, its image processor does, if it works as Qwen's. Raises `ValueError`
    if neither can.
    """
    directory = Path(path)
    names = ("preprocessor_config.json", "processor_config.json")
    if not any((directory / name).exists() for name in names):
        return None
    try:
        token_id = config_number(directory, "image_token_id", "image_token_index")
    except ValueError:
        return None
    import transformers

    def load(kind: str) -> Any:
        loader: Any = getattr(transformers, kind)
        return loader.from_pretrained(str(directory), local_files_only=True)

    with suppress(ImportError, AttributeError):
        sizes = load("AutoProcessor")._get_num_multimodal_tokens
        return ImageModel(token_id, lambda *size: sizes([size]).num_image_tokens[0])
    try:
        pixels = load("AutoImageProcessor")
        patches, merged = pixels.get_number_of_image_patches, pixels.merge_size**2
    except ImportError as error:
        missing = " ".join(str(error).split())
        raise ValueError(f"{missing} Or serve with --images refuse") from error
    except AttributeError as error:
        raise ValueError(
            "its processor does not say how many tokens an image takes: install "
            "torch and torchvision, or serve with --images refuse"
        ) from error
    return ImageModel(token_id, lambda height, width: patches(height, width) // merged)
