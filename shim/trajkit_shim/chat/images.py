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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby, pairwise
from pathlib import Path
from threading import get_ident
from typing import Any, NoReturn, TypeAlias

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


MAX_PIXELS = 1 << 26
"""Of one image, decoded. What a request brings together is bounded by its body's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image."""

    name: str  # SHA-256 of its bytes
    media_type: str
    width: int
    height: int
    data: bytes


Images: TypeAlias = Mapping[str, Image]
"""Images by their names."""


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
    if not part.reading.takes_images:
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
    image = open_image(data, part.at(name))
    part.reading.images[image.name] = image
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


def open_image(data: bytes, where: str) -> Image:
    """Return an image; raises `GatewayError` (400) if it is too large or not an image."""
    from PIL import Image as pillow

    try:
        # reads the header only
        with pillow.open(io.BytesIO(data), formats=FORMATS) as image:
            (width, height), kind = image.size, str(image.format)
    # a decoder raises anything for bytes that are not as it expects
    except Exception as error:
        rule = f"could not process image: not one of {', '.join(FORMATS)}: {error}"
        refuse(where, rule, code="invalid_image")
    if width * height > MAX_PIXELS:
        rule = f"image dimensions exceed {MAX_PIXELS} pixels: {width} x {height}"
        refuse(where, rule, code="image_too_large")
    name, kind = sha256(data).hexdigest(), f"image/{kind.lower()}"
    return Image(name=name, media_type=kind, width=width, height=height, data=data)


async def write_images(images: Images, directory: Path, *, fsync: bool = False) -> None:
    """Write images that have no file in a directory, which is made with the first one.

    ``fsync``: also to disk. Raises `GatewayError` (500).
    """
    missing = [images[name] for name in images if not (directory / name).exists()]
    if missing:
        await asyncio.to_thread(_write, missing, directory, fsync)


def _write(images: Iterable[Image], directory: Path, fsync: bool) -> None:
    # two requests may bring the same image, and two workers
    own = directory / f".{os.getpid()}.{get_ident()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for image in images:
            with own.open("wb") as file:
                file.write(image.data)
                if fsync:
                    file.flush()
                    os.fsync(file.fileno())
            own.replace(directory / image.name)
    except OSError as error:
        with suppress(OSError):
            own.unlink(missing_ok=True)
        message = f"the image could not be written: {error}"
        raise GatewayError(message, 500, code="log_failed") from error


# In prompts


@dataclass(frozen=True, slots=True)
class ImageModel:
    """What a model does with images: how they are placed in token ids.

    ``images``: those of a request.
    """

    token_id: int  # of the token in the place of one
    count: Callable[[int, int], int]  # tokens of an image of a height and a width

    def expand(
        self,
        ids: Ids,
        offsets: Ids | None,
        messages: Sequence[Json],
        images: Images,
    ) -> tuple[Ids, Ids | None]:
        """Replace the token of each image by the image's content ids.

        ``ids`` have the text of ``messages``, and maybe of others without images.
        Raises `TemplateError` if the template has not written each image once.
        """
        names, here = hashes_of(messages), ids == self.token_id
        if here.sum() != len(names):
            raise TemplateError(
                f"the chat template has {here.sum()} places for {len(names)} images: it "
                "leaves out images of some messages",
                code="chat_template",
            )
        counts = np.ones(len(ids), np.int64)
        counts[here] = sizes = [self._n_tokens(images[name]) for name in names]
        made = [content_ids(KIND, *each) for each in zip(names, sizes, strict=True)]
        expanded, inside = np.repeat(ids, counts), np.repeat(here, counts)
        expanded[inside] = np.concatenate([np.empty(0, np.int32), *made])
        if offsets is not None:
            offsets = np.repeat(offsets, counts, axis=0)
        return expanded, offsets

    def place(
        self, ids: Ids, messages: Sequence[Json], images: Images
    ) -> tuple[list[Json], list[PromptImage]]:
        """Return where the images of messages are in a prompt's recorded ids.

        For the log (`trajkit.schema.MM_ITEM`), and for the engine.
        """
        names = hashes_of(messages)
        if names and (ids == self.token_id).any():
            raise GatewayError(
                "an earlier reply contains the token of an image, so the engine cannot "
                "place the images of this request",
                code="image_token_sampled",
            )
        inside = np.flatnonzero(ids >= FIRST_CONTENT_ID)
        sizes = [self._n_tokens(images[name]) for name in names]
        stops = np.cumsum([0, *sizes]).tolist()
        assert stops[-1] == len(inside)
        items, sent = list[Json](), list[PromptImage]()
        for name, (begin, end) in zip(names, pairwise(stops), strict=True):
            start, stop = int(inside[begin]), int(inside[end - 1]) + 1
            item: Json = {"kind": KIND, "hash": name, "token_id": self.token_id}
            items.append({**item, "start": start, "stop": stop})
            image = images[name]
            sent.append(PromptImage(start, stop, image.media_type, image.data))
        return items, sent

    def engine_ids(self, ids: Ids) -> Ids:
        """Return the ids that the engine consumes for a prompt's recorded ids."""
        return np.where(ids >= FIRST_CONTENT_ID, np.int32(self.token_id), ids)

    def _n_tokens(self, image: Image) -> int:
        try:
            return int(self.count(image.height, image.width))
        except ValueError as error:
            name = image.name[:12]
            message = f"the model's processor refuses the image {name}: {error}"
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
