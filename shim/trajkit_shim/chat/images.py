"""Images in messages.

The content of a message with images is a list of parts: ``{"type": "text", "text": ...}``
and ``{"type": "image", "sha256": ...}``. Every other content is a string. The bytes of an
image are in the store (`chat.image_store`), under the SHA-256 of the bytes.
"""

import base64
import re
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Literal, NoReturn, TypeAlias

from trajkit_shim.chat.image_store import ImageStore
from trajkit_shim.json_input import Fields, Json, as_text

NoImages: TypeAlias = Literal["refuse", "omit"]
"""What to do with images if a model takes none: reject them with 400, or replace each by
`OMITTED_IMAGE`."""

Images: TypeAlias = NoImages | ImageStore
"""The same, or where to store them."""

OMITTED_IMAGE = "[image omitted]"

_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)


def read_image(
    part: Fields, name: str, source: Callable[[], str], images: Images
) -> str | Json:
    """Return an image of a user's or tool's message: a part, or a text in its place.

    Parameters
    ----------
    part : Fields
        The part of the message; ``name`` is its field that errors name.
    source : function
        Gives a data URL with base64, or a URL with http or https.
    images : Images

    Raises
    ------
    GatewayError
        Images are refused, or the source is something else. See also `ImageStore.add`
        and `ImageStore.fetch`.
    """
    if images == "omit":
        return OMITTED_IMAGE
    if images == "refuse":
        refuse_content(part, name, part.json.get("type", name))
    url, where = source(), part.at(name)
    given = _DATA_URL.match(url)
    if given is None:
        return _part(images.fetch(url, where))
    try:
        data = base64.b64decode(url[given.end() :], validate=True)
    # or not even ASCII
    except ValueError as error:
        part.refuse(name, f"the image is not base64: {error}", "invalid_image")
    return _part(images.add(data, where))


def refuse_content(part: Fields, name: str, kind: object) -> NoReturn:
    """Raise the error for a part that is neither text nor an image that is accepted."""
    rule = f"{kind!r} is not supported: messages are text"
    part.refuse(name, rule, "unsupported_content")


def data_url(source: Fields, media_type: str, data: str) -> str:
    """Return the data URL of base64 and its type, which are two fields of an object."""
    return f"data:{source.need(media_type, as_text)};base64,{source.text(data)}"


def joined(parts: Iterable[str | Json]) -> str | list[Json]:
    """Return the content of a message: texts, joined by newlines, and images."""
    found: list[Json] = []
    for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            found.append({"type": "text", "text": "\n".join(map(str, group))})
        else:
            found += (part for part in group if isinstance(part, dict))
    if all(part["type"] == "text" for part in found):
        return str(found[0]["text"]) if found else ""
    return found


def texts_of(content: object) -> list[str]:
    """Return the texts of a message's content."""
    if not isinstance(content, list):
        return [str(content)]
    return [part["text"] for part in content if part["type"] == "text"]


def hashes_of(messages: Iterable[Json]) -> list[str]:
    """Return the images of messages, in order."""
    return [
        part["sha256"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]


def _part(sha256: str) -> Json:
    return {"type": "image", "sha256": sha256}
