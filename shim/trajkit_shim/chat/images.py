"""Images in messages.

The content of a message with images is a list of parts: ``{"type": "text", "text": ...}``
and ``{"type": "image", "sha256": ...}``. Every other content is a string. The bytes of an
image are in the store (`chat.image_store`), under the SHA-256 of the bytes.

While a request is read, a `GivenImage` is in the place of a part, and then an `Image`,
until `ImageStore.take` has its name.
"""

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NoReturn, TypeAlias, TypeVar

from trajkit_shim.chat.image_store import Image, ImageLimits, open_image
from trajkit_shim.json_input import Fields, Json, as_list, as_text

NoImages: TypeAlias = Literal["refuse", "omit"]
"""What to do with images if a model takes none: reject them with 400, or replace each by
`OMITTED_IMAGE`."""

Images: TypeAlias = NoImages | ImageLimits
"""The same, or which images are taken."""

OMITTED_IMAGE = "[image omitted]"

# what kinds of parts that a model would have to see or hear have in their names
_MEDIA = ("image", "audio", "video", "file", "document")

_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image of a request, before it is known whether the model takes it."""

    part: Fields
    name: str  # the field of the part that errors name, and what the image is there
    kind: object
    # reads a data URL with base64, or a URL with http or https; may raise `GatewayError`
    url: Callable[[Fields], str]


Part: TypeAlias = str | GivenImage
"""A text or an image of a message."""

T = TypeVar("T")
Readers: TypeAlias = Mapping[str, Callable[[Fields], T]]
"""How parts are read, by their types."""


def read_parts(fields: Fields, name: str, readers: Readers[T]) -> list[T]:
    """Return the parts of a content: a string, or a list of objects with a reader each."""
    value = fields.json.get(name)
    if isinstance(value, str):
        text = Fields({"text": value}, fields.at(name), fields.ignored)
        return [readers["text"](text)]
    found = []
    fields.need(name, as_list)
    for part in fields.objects(name):
        kind = part.name("type")
        if kind in readers:
            found.append(readers[kind](part))
        elif any(word in kind for word in _MEDIA):
            refuse_content(part, "type", kind)
        else:
            part.ignore("type", kind)
    return found


def read_text(part: Fields) -> str:
    return part.text("text")


def data_url(source: Fields, media_type: str, data: str) -> str:
    """Return the data URL of base64 and its type, which are two fields of an object."""
    return f"data:{source.need(media_type, as_text)};base64,{source.text(data)}"


def joined(parts: Iterable[object]) -> str | list[object]:
    """Return the content of a message: texts, joined by newlines, and images."""
    given = list(parts)
    texts = [part for part in given if isinstance(part, str)]
    if len(texts) == len(given):
        return "\n".join(texts)
    found: list[object] = []
    for is_text, group in groupby(given, lambda part: isinstance(part, str)):
        if is_text:
            found.append({"type": "text", "text": "\n".join(map(str, group))})
        else:
            found += group
    return found


def read_images(messages: Iterable[Json], images: Images) -> None:
    """Refuse the images of a request's messages, omit them, or read them.

    Only messages of users and tools may have some. Raises as `open_image`.
    """
    for message in messages:
        content = message["content"]
        if not isinstance(content, list):
            continue
        if images == "omit":
            message["content"] = joined(
                OMITTED_IMAGE if isinstance(part, GivenImage) else part["text"]
                for part in content
            )
            continue
        taken = images if message["role"] in ("user", "tool") else "refuse"
        message["content"] = [
            _read(part, taken) if isinstance(part, GivenImage) else part
            for part in content
        ]


def _read(given: GivenImage, images: Images) -> Image:
    part, name = given.part, given.name
    if isinstance(images, str):
        refuse_content(part, name, given.kind)
    url = given.url(part)
    found = _DATA_URL.match(url)
    if found is None:
        rule = "images at URLs are not fetched here: send the image itself, as base64"
        part.refuse(name, rule, "image_not_fetched")
    try:
        data = base64.b64decode(url[found.end() :], validate=True)
    # or not even ASCII
    except ValueError as error:
        part.refuse(name, f"the image is not base64: {error}", "invalid_image")
    return open_image(data, part.at(name), images)


def refuse_content(part: Fields, name: str, kind: object) -> NoReturn:
    """Raise the error for a part that is neither text nor an image that is accepted."""
    rule = f"{kind!r} is not supported: messages are text"
    part.refuse(name, rule, "unsupported_content")


def texts_of(content: object) -> list[str]:
    if not isinstance(content, list):
        return [str(content)]
    return [str(part["text"]) for part in content if part["type"] == "text"]


def hashes_of(messages: Iterable[Json]) -> list[str]:
    return [
        part["sha256"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
