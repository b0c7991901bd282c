"""The images of a run: one file each, named by the SHA-256 of its bytes.

Files are as clients sent them. An image is in memory until the first turn that names it is
recorded. Its file is written just before under a temporary name, and renamed when the turn
is recorded. So a log never names an image that is missing, and only a killed gateway can
leave files of requests that were not recorded.
"""

import asyncio
import io
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock
from uuid import uuid4
from weakref import WeakValueDictionary

from trajkit_shim.chat.fetch_image import fetch_images
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Json, refuse

FORMATS = ("GIF", "JPEG", "PNG", "WEBP")
"""The formats that are accepted, as Pillow names them; media types have these names."""

# the filters of warnings belong to all threads
_FILTERS = Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What a client may send."""

    max_bytes: int = 8 << 20  # of one image
    max_pixels: int = 1 << 26  # of one image, decoded
    max_images: int = 100  # of one prompt
    max_request_bytes: int = 64 << 20  # of all images that one request brings
    max_total_bytes: int | None = None  # of the store
    # whether an image that is given as a URL is fetched, from public hosts only
    fetch: bool = False


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Image:
    """An image."""

    name: str  # SHA-256 of its bytes
    media_type: str
    width: int
    height: int
    data: bytes  # empty if they are in its file


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """An image to be fetched."""

    url: str


def open_image(data: bytes, where: str, limits: ImageLimits) -> Image:
    """Return an image; raises `GatewayError` (400) if it is too large or not an image."""
    from PIL import Image as pillow

    if len(data) > limits.max_bytes:
        rule = f"the image has {len(data)} bytes; the limit is {limits.max_bytes}"
        refuse(where, rule, code="image_too_large")
    try:
        with _FILTERS, warnings.catch_warnings():
            warnings.filterwarnings("error", module="PIL")
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
        self._stored: dict[str, Image] = {}
        self._total_bytes = 0
        # only as long as a request has them
        self._requested: WeakValueDictionary[str, Image] = WeakValueDictionary()

    async def take(self, messages: Sequence[Json]) -> list[Image]:
        """Return the images that messages bring, and put their names in their places.

        The store knows the images as long as the caller keeps them. Raises `GatewayError`:
        there are too many, they are too large together, or one cannot be fetched (400), or
        they cannot be stored later (507).
        """
        contents = [m["content"] for m in messages if isinstance(m["content"], list)]
        parts = [part for content in contents for part in content]
        given = [part for part in parts if isinstance(part, Image)]
        urls = {part.url for part in parts if isinstance(part, ImageUrl)}
        texts = [part for part in parts if isinstance(part, dict) and "text" in part]
        n_images, limits = len(parts) - len(texts), self.limits
        if n_images > limits.max_images:
            message = f"{n_images} images; the limit is {limits.max_images}"
            raise GatewayError(message, code="too_many_images")
        n_bytes = sum({image.name: len(image.data) for image in given}.values())
        if n_bytes > limits.max_request_bytes:
            message = (
                f"the request's images have {n_bytes} bytes together; the limit is "
            )
            message += str(limits.max_request_bytes)
            raise GatewayError(message, code="image_too_large")
        data, left = dict[str, bytes](), limits.max_request_bytes - n_bytes
        if urls:
            data = await fetch_images(
                urls, max_bytes=limits.max_bytes, max_total_bytes=left
            )
        fetched = {
            url: await asyncio.to_thread(open_image, data[url], url[:200], limits)
            for url in urls
        }
        brought: list[Image] = []
        for content in contents:
            for i, part in enumerate(content):
                image = fetched[part.url] if isinstance(part, ImageUrl) else part
                if isinstance(image, Image):
                    # others may have the same image
                    image = self._requested.setdefault(image.name, image)
                    brought.append(image)
                    content[i] = {"type": "image", "sha256": image.name}
        self.check_room(self.new(brought))
        return brought

    def add(self, new: Collection[Image]) -> None:
        """Note that images have their files."""
        self._total_bytes = self.check_room(new)
        self._stored |= {image.name: replace(image, data=b"") for image in new}

    def __getitem__(self, name: str) -> Image:
        """Return an image of a request or of a recorded turn."""
        return self._requested.get(name) or self._stored[name]

    def data(self, name: str) -> bytes:
        """Return the bytes of an image."""
        return self[name].data or (self.directory / name).read_bytes()

    def new(self, images: Collection[Image]) -> list[Image]:
        """Return the images that are not stored, each once."""
        by_name = {image.name: image for image in images}
        return [image for name, image in by_name.items() if name not in self._stored]

    def check_room(self, new: Collection[Image]) -> int:
        """Return the bytes of all images with new ones, or raise a 507 `GatewayError`."""
        total = self._total_bytes + sum(len(image.data) for image in new)
        limit = self.limits.max_total_bytes
        if limit is not None and total > limit:
            message = f"the images would take {total} bytes; the limit is {limit}"
            raise GatewayError(message, 507, code="log_full")
        return total


class NewImages:
    """The files of a request's images, with temporary names until a turn is recorded."""

    def __init__(self, store: ImageStore, images: Collection[Image]) -> None:
        self._store = store
        self._images = images
        # two requests may bring the same image
        self._prefix = f".{uuid4().hex}-"
        self._discarded = False

    async def write(self) -> None:
        """Write the images that are not stored; the caller calls `discard` later."""
        if new := self._store.new(self._images):
            await asyncio.to_thread(self._write, new)

    def _write(self, new: Collection[Image]) -> None:
        try:
            self._store.directory.mkdir(parents=True, exist_ok=True)
            for image in new:
                if self._discarded:
                    break
                with self._temporary(image).open("wb") as file:
                    file.write(image.data)
                    if self._store.fsync:
                        file.flush()
                        os.fsync(file.fileno())
        except OSError as error:
            message = f"the image could not be written: {error}"
            raise GatewayError(message, 500, code="log_failed") from error
        finally:
            # a file may be newer than that call
            if self._discarded:
                self.discard()

    @contextmanager
    def stored(self) -> Iterator[None]:
        """Store the written images with a turn, unless recording it in here fails.

        Raises `GatewayError` (507): there is no room. `OSError`: a file cannot be renamed.
        """
        new = self._store.new(self._images)
        self._store.check_room(new)
        try:
            for image in new:
                self._temporary(image).replace(self._store.directory / image.name)
            yield
        except BaseException:
            for image in new:
                _remove(self._store.directory / image.name)
            raise
        self._store.add(new)

    def discard(self) -> None:
        """Remove files that have temporary names, now or once they are written."""
        self._discarded = True
        for image in self._images:
            _remove(self._temporary(image))

    def _temporary(self, image: Image) -> Path:
        return self._store.directory / (self._prefix + image.name)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
