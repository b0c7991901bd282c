"""The images of a run: one file each, named by the SHA-256 of its bytes.

Files are as clients sent them. An image is in memory until a turn that names it is about
to be recorded. Then it is written under a temporary name and renamed. So a log never names
an image that is missing. The image of a turn that then cannot be recorded keeps its file.
"""

import asyncio
import io
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Json, refuse

FORMATS = ("GIF", "JPEG", "PNG", "WEBP")
"""The formats that are accepted, as Pillow names them; media types have these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What a client may send."""

    max_bytes: int = 8 << 20  # of one image
    max_pixels: int = 1 << 26  # of one image, decoded
    max_images: int = 100  # of one prompt
    max_request_bytes: int = 64 << 20  # of all images that one request brings
    max_total_bytes: int | None = None  # of the store


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Image:
    """An image."""

    name: str  # SHA-256 of its bytes
    media_type: str
    width: int
    height: int
    data: bytes  # empty if they are in its file


def open_image(data: bytes, where: str, limits: ImageLimits) -> Image:
    """Return an image; raises `GatewayError` (400) if it is too large or not an image."""
    from PIL import Image as pillow

    if len(data) > limits.max_bytes:
        rule = f"the image has {len(data)} bytes; the limit is {limits.max_bytes}"
        refuse(where, rule, code="image_too_large")
    try:
        # reads the header only
        with pillow.open(io.BytesIO(data), formats=FORMATS) as image:
            (width, height), kind = image.size, str(image.format)
    # a decoder raises anything for bytes that are not as it expects
    except Exception as error:
        rule = f"not an image of {', '.join(FORMATS)}: {error}"
        refuse(where, rule, code="invalid_image")
    if width * height > limits.max_pixels:
        rule = f"{width} x {height} pixels; the limit is {limits.max_pixels}"
        refuse(where, rule, code="image_too_large")
    return Image(
        name=sha256(data).hexdigest(),
        media_type=f"image/{kind.lower()}",
        width=width,
        height=height,
        data=data,
    )


class ImageStore:
    """The images of a run. Those of recorded turns are files of a folder.

    ``directory`` is made with the first file. ``fsync``: also write each image to disk.
    """

    def __init__(
        self, directory: Path, limits: ImageLimits | None = None, *, fsync: bool = False
    ) -> None:
        self.directory = directory
        self.limits = limits or ImageLimits()
        self.fsync = fsync
        self._writing = Lock()
        self._stored: dict[str, Image] = {}
        self._total_bytes = 0
        # only as long as a request has them
        self._requested: WeakValueDictionary[str, Image] = WeakValueDictionary()

    def take(self, messages: Sequence[Json]) -> list[Image]:
        """Return the images that messages bring, and put their names in their places.

        The store knows the images as long as the caller keeps them. Raises `GatewayError`:
        there are too many, they are too large together (400), or they cannot be stored
        later (507).
        """
        limits = self.limits
        places = [
            (content, i)
            for message in messages
            if isinstance(content := message["content"], list)
            for i, part in enumerate(content)
            if not isinstance(part, dict) or part["type"] == "image"
        ]
        if len(places) > limits.max_images:
            message = f"{len(places)} images; the limit is {limits.max_images}"
            raise GatewayError(message, code="too_many_images")
        parts = [content[i] for content, i in places]
        given = {part.name: part for part in parts if isinstance(part, Image)}
        n_bytes = sum(len(image.data) for image in given.values())
        if n_bytes > limits.max_request_bytes:
            message = f"the request's images have {n_bytes} bytes together; the limit "
            message += f"is {limits.max_request_bytes}"
            raise GatewayError(message, code="image_too_large")
        brought: list[Image] = []
        for content, i in places:
            part = content[i]
            if isinstance(part, Image):
                # others may have the same image
                image = self._requested.setdefault(part.name, part)
                brought.append(image)
                content[i] = {"type": "image", "sha256": image.name}
        self._new(brought)
        return brought

    async def write(self, images: Collection[Image]) -> None:
        """Write the images that have no file.

        Raises `GatewayError`: there is no room (507), or a file cannot be written (500).
        """
        if self._new(images):
            await asyncio.to_thread(self._write, images)

    def __getitem__(self, name: str) -> Image:
        """Return an image of a request or of the folder."""
        return self._requested.get(name) or self._stored[name]

    def data(self, name: str) -> bytes:
        return self[name].data or (self.directory / name).read_bytes()

    def _new(self, images: Collection[Image]) -> dict[str, Image]:
        """The images that have no file, by name; raises if there is no room (507)."""
        new = {image.name: image for image in images if image.name not in self._stored}
        total = self._total_bytes + sum(len(image.data) for image in new.values())
        limit = self.limits.max_total_bytes
        if limit is not None and total > limit:
            message = f"the images would take {total} bytes; the limit is {limit}"
            raise GatewayError(message, 507, code="log_full")
        return new

    def _write(self, images: Collection[Image]) -> None:
        # two requests may bring the same image
        with self._writing:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                for name, image in self._new(images).items():
                    temporary = self.directory / f".{name}"
                    with temporary.open("wb") as file:
                        file.write(image.data)
                        if self.fsync:
                            file.flush()
                            os.fsync(file.fileno())
                    temporary.replace(self.directory / name)
                    self._stored[name] = replace(image, data=b"")
                    self._total_bytes += len(image.data)
            except OSError as error:
                message = f"the image could not be written: {error}"
                raise GatewayError(message, 500, code="log_failed") from error
