"""Images: in messages, in prompts, and in the log's folder.

The content of a message with images is a list of parts: ``{"type": "text", "text": ...}``
and ``{"type": "image", "sha256": ...}``. Every other content is a string. Before a turn
that names an image is recorded, the image is written as a client sent it: one file each,
named by the SHA-256 of its bytes. So a log never names an image that is missing.

A chat template writes one token per image, in the place of as many tokens as the model's
processor makes of an image of that size. In the recorded ids these are content ids
(`trajkit.turns.content_ids`), so a prompt with another image is another prompt. The
engine gets the template's token once per image, and does the rest itself.
"""

import asyncio
import base64
import io
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby, pairwise
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from trajkit.turns import content_ids
from trajkit.turns.images import FIRST_CONTENT_ID
from trajkit_shim.engines.base import PromptImage
from trajkit_shim.engines.model_config import config_number
from trajkit_shim.errors import GatewayError, TemplateError
from trajkit_shim.json_input import Fields, Json, as_list, refuse

KIND = "image"
FORMATS = ("GIF", "JPEG", "PNG", "WEBP")
"""The formats that are accepted, as Pillow names them; media types have these names."""

# what kinds of parts that a model would have to see or hear have in their names
_MEDIA = ("image", "audio", "video", "file", "document")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)

Ids: TypeAlias = npt.NDArray[np.int32]
Part: TypeAlias = str | Json
"""A text or an image of a message, or another message."""
Readers: TypeAlias = Mapping[str, Callable[[Fields], Any]]
"""How parts are read, by their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What a client may send."""

    max_bytes: int = 8 << 20  # of one image
    max_pixels: int = 1 << 26  # of one image, decoded
    max_images: int = 100  # of one prompt
    max_request_bytes: int = 64 << 20  # of all images that one request brings


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Image:
    """An image."""

    name: str  # SHA-256 of its bytes
    media_type: str
    width: int
    height: int
    data: bytes


# In messages


def read_parts(fields: Fields, name: str, readers: Readers) -> list[Any]:
    """Return the parts of a content: a string, or a list of objects with a reader each."""
    if isinstance(fields.peek(name), str):
        return [fields.text(name)]
    found = []
    fields.need(name, as_list)
    for part in fields.objects(name):
        kind = part.name("type")
        if kind in readers:
            found.append(readers[kind](part))
        elif any(word in kind for word in _MEDIA):
            refuse_content(part, "type", kind)
        else:
            part.leave_out(kind)
    return found


def read_image(part: Fields, url: str, name: str = "type", kind: object = None) -> Part:
    """Read or refuse an image, whose data URL is in a field of a part.

    ``kind``: of the image (default: what the field has). Raises as `open_image`.
    """
    limits = part.reading.image_limits
    if limits is None:
        refuse_content(part, name, part.peek(name) if kind is None else kind)
    found = _DATA_URL.match(url)
    if found is None:
        rule = "images at URLs are not fetched here: send the image itself, as base64"
        part.refuse(name, rule, "image_not_fetched")
    try:
        data = base64.b64decode(url[found.end() :], validate=True)
    # or not even ASCII
    except ValueError as error:
        part.refuse(name, f"could not process image: {error}", "invalid_image")
    image = open_image(data, part.at(name), limits)
    part.reading.images.append(image)
    return {"type": "image", "sha256": image.name}


def refuse_content(part: Fields, name: str, kind: object) -> NoReturn:
    """Raise the error for a part that is neither text nor an image that is accepted."""
    # these words, and those for unfit images, make Claude Code leave it out and go on
    rule = f"could not process {'PDF' if kind == 'document' else kind}: it is no text"
    part.refuse(name, rule, "unsupported_content")


def joined(parts: Iterable[Part]) -> str | list[Json]:
    """Return the content of a message: texts, joined by newlines, and images."""
    found: list[Any] = []
    for kind, group in groupby(parts, type):
        each = [*group]
        found += ["\n".join(map(str, each))] if kind is str else each
    if len(found) < 2 and all(isinstance(part, str) for part in found):
        return found[0] if found else ""
    return [{"type": "text", "text": p} if isinstance(p, str) else p for p in found]


def _parts(content: object, kind: str, name: str) -> list[str]:
    parts = content if isinstance(content, list) else ()
    return [str(part[name]) for part in parts if part["type"] == kind]


def texts_of(content: object) -> list[str]:
    return [content] if isinstance(content, str) else _parts(content, "text", "text")


def hashes_of(messages: Iterable[Json]) -> list[str]:
    return [n for m in messages for n in _parts(m["content"], "image", "sha256")]


# In the log's folder


def open_image(data: bytes, where: str, limits: ImageLimits) -> Image:
    """Return an image; raises `GatewayError` (400) if it is too large or not an image."""
    from PIL import Image as pillow

    if len(data) > limits.max_bytes:
        rule = f"image exceeds the limit of {limits.max_bytes} bytes: {len(data)}"
        refuse(where, rule, code="image_too_large")
    try:
        # reads the header only
        with pillow.open(io.BytesIO(data), formats=FORMATS) as image:
            (width, height), kind = image.size, str(image.format)
    # a decoder raises anything for bytes that are not as it expects
    except Exception as error:
        rule = f"could not process image: not one of {', '.join(FORMATS)}: {error}"
        refuse(where, rule, code="invalid_image")
    if width * height > limits.max_pixels:
        rule = f"image dimensions exceed {limits.max_pixels} pixels: {width} x {height}"
        refuse(where, rule, code="image_too_large")
    name, kind = sha256(data).hexdigest(), f"image/{kind.lower()}"
    return Image(name=name, media_type=kind, width=width, height=height, data=data)


class ImageStore:
    """The images of a run. Those of recorded turns are files of a folder.

    ``directory`` is made with the first file. ``fsync``: also write each image to disk.
    ``requested`` has the images that a request has.
    """

    def __init__(
        self, directory: Path, limits: ImageLimits | None = None, *, fsync: bool = False
    ) -> None:
        self.directory, self.fsync = directory, fsync
        self.limits = limits or ImageLimits()
        self.requested: WeakValueDictionary[str, Image] = WeakValueDictionary()
        self._writing = Lock()

    def take(self, images: Sequence[Image]) -> list[Image]:
        """Return the images of a request, the same object for the same image.

        The store knows them as long as the caller keeps them. Raises `GatewayError`
        (400): there are too many, or they are too large together.
        """
        most, most_bytes = self.limits.max_images, self.limits.max_request_bytes
        if len(images) > most:
            message = f"{len(images)} images; the limit is {most}"
            raise GatewayError(message, code="too_many_images")
        n_bytes = sum({image.name: len(image.data) for image in images}.values())
        if n_bytes > most_bytes:
            message = f"images of {n_bytes} bytes together; the limit is {most_bytes}"
            raise GatewayError(message, code="image_too_large")
        return [self.requested.setdefault(image.name, image) for image in images]

    async def write(self, images: Collection[Image]) -> None:
        """Write the images that have no file; raises `GatewayError` (500)."""
        if self._missing(images):
            await asyncio.to_thread(self._write, images)

    def _missing(self, images: Collection[Image]) -> dict[Path, Image]:
        """The images that have no file, by their paths."""
        paths = {self.directory / image.name: image for image in images}
        return {path: image for path, image in paths.items() if not path.exists()}

    def _write(self, images: Collection[Image]) -> None:
        # two requests may bring the same image, and two workers
        with self._writing:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                for path, image in self._missing(images).items():
                    temporary = path.with_name(f".{path.name}.{os.getpid()}")
                    with temporary.open("wb") as file:
                        file.write(image.data)
                        if self.fsync:
                            file.flush()
                            os.fsync(file.fileno())
                    temporary.replace(path)
            except OSError as error:
                message = f"the image could not be written: {error}"
                raise GatewayError(message, 500, code="log_failed") from error


# In prompts


@dataclass(frozen=True, slots=True)
class ImageModel:
    """What a model does with images."""

    token_id: int  # of the token in the place of one
    count: Callable[[int, int], int]  # tokens of an image of a height and a width


@dataclass(frozen=True, slots=True)
class ImagePlaces:
    """Places images in token ids, for one model."""

    model: ImageModel
    store: ImageStore

    def expand(
        self, ids: Ids, offsets: Ids, messages: Sequence[Json]
    ) -> tuple[Ids, Ids]:
        """Replace the token of each image by the image's content ids.

        ``ids`` have the text of ``messages``, and maybe of others without images.
        Raises `TemplateError` if the template has not written each image once.
        """
        names, here = hashes_of(messages), ids == self.model.token_id
        if here.sum() != len(names):
            raise TemplateError(
                f"the chat template has {here.sum()} places for {len(names)} images: it "
                "leaves out images of some messages",
                code="chat_template",
            )
        counts = np.ones(len(ids), np.int64)
        counts[here] = sizes = [*map(self._n_tokens, names)]
        made = [content_ids(KIND, *each) for each in zip(names, sizes, strict=True)]
        expanded, inside = np.repeat(ids, counts), np.repeat(here, counts)
        expanded[inside] = np.concatenate([np.empty(0, np.int32), *made])
        return expanded, np.repeat(offsets, counts, axis=0)

    def items(self, ids: Ids, messages: Sequence[Json]) -> list[dict[str, Any]]:
        """Return where the images of messages are in a prompt's recorded ids.

        Each is a `trajkit.schema.MM_ITEM`.
        """
        token_id, names = self.model.token_id, hashes_of(messages)
        if names and (ids == token_id).any():
            raise GatewayError(
                "an earlier reply contains the token of an image, so the engine cannot "
                "place the images of this request",
                code="image_token_sampled",
            )
        inside = np.flatnonzero(ids >= FIRST_CONTENT_ID)
        stops = np.cumsum([0, *map(self._n_tokens, names)]).tolist()
        assert stops[-1] == len(inside)
        return [
            {
                "kind": KIND,
                "hash": name,
                "token_id": token_id,
                "start": int(inside[begin]),
                "stop": int(inside[end - 1]) + 1,
            }
            for name, (begin, end) in zip(names, pairwise(stops), strict=True)
        ]

    def engine_ids(self, ids: Ids) -> Ids:
        """Return the ids that the engine consumes for a prompt's recorded ids."""
        return np.where(ids >= FIRST_CONTENT_ID, np.int32(self.model.token_id), ids)

    def load(self, items: Iterable[dict[str, Any]]) -> list[PromptImage]:
        """Return images with their bytes."""
        found = [(item, self.store.requested[item["hash"]]) for item in items]
        return [
            PromptImage(item["start"], item["stop"], image.media_type, image.data)
            for item, image in found
        ]

    def _n_tokens(self, name: str) -> int:
        image = self.store.requested[name]
        try:
            return int(self.model.count(image.height, image.width))
        except ValueError as error:
            message = f"the model's processor refuses the image {name[:12]}: {error}"
            raise GatewayError(message, code="invalid_image") from error


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
    except (AttributeError, ImportError) as error:
        why = " ".join(str(error).split())
        if isinstance(error, AttributeError):
            why = "its processor does not say how many tokens an image takes: install "
            why += "torch and torchvision."
        raise ValueError(f"{why} Or serve with --images refuse") from error
    return ImageModel(token_id, lambda height, width: patches(height, width) // merged)
