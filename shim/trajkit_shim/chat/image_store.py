"""The images of a run: one file each, named by the SHA-256 of its bytes.

Files are as clients sent them. They are written when a request is read, before the turn
that names them, so a log never names an image that is missing.
"""

import io
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock

from trajkit_shim.chat.fetch_image import fetch_image
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import refuse

FORMATS = {
    "GIF": "image/gif",
    "JPEG": "image/jpeg",
    "PNG": "image/png",
    "WEBP": "image/webp",
}
"""The formats that are accepted, as Pillow names them, and their media types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What a client may send."""

    max_bytes: int = 8 << 20  # of one image
    max_pixels: int = 1 << 26  # of one image, decoded
    max_images: int = 100  # of one prompt
    max_total_bytes: int | None = None  # of the store
    # whether an image that is given as a URL is fetched, from public hosts only
    fetch: bool = False


@dataclass(frozen=True, slots=True)
class StoredImage:
    """What is known of an image."""

    media_type: str
    width: int
    height: int


class ImageStore:
    """The folder of a run's images. Safe to use from several threads.

    Parameters
    ----------
    directory : Path
        Made with the first image.
    limits : ImageLimits
    fsync : bool
        Also write each image to disk, as the turn log does.
    """

    def __init__(
        self, directory: Path, limits: ImageLimits | None = None, *, fsync: bool = False
    ) -> None:
        self.directory = directory
        self.limits = limits or ImageLimits()
        self._fsync = fsync
        self._known: dict[str, StoredImage] = {}
        self._total_bytes = 0
        self._lock = Lock()

    def add(self, data: bytes, where: str) -> str:
        """Store an image and return its name, unless it is known.

        Raises `GatewayError`: it is too large, cannot be read (400), or cannot be stored
        (500, 507). ``where`` is its place in the request.
        """
        name = sha256(data).hexdigest()
        if name in self._known:
            return name
        image = self._read_head(data, where)
        with self._lock:
            if name not in self._known:
                self._write(name, data)
                self._known[name] = image
        return name

    def fetch(self, url: str, where: str) -> str:
        """Fetch an image, store it and return its name; raises `GatewayError`."""
        if not self.limits.fetch:
            rule = (
                "images at URLs are not fetched here: send the image itself, as base64"
            )
            refuse(where, rule, code="image_not_fetched")
        data = fetch_image(url, where, max_bytes=self.limits.max_bytes)
        return self.add(data, where)

    def __getitem__(self, name: str) -> StoredImage:
        """Return what is known of a stored image."""
        return self._known[name]

    def data(self, name: str) -> bytes:
        """Return the bytes of a stored image."""
        return (self.directory / name).read_bytes()

    def _read_head(self, data: bytes, where: str) -> StoredImage:
        from PIL import Image

        limits = self.limits
        if len(data) > limits.max_bytes:
            rule = f"the image has {len(data)} bytes; the limit is {limits.max_bytes}"
            refuse(where, rule, code="image_too_large")
        try:
            # reads the header only
            with Image.open(io.BytesIO(data), formats=list(FORMATS)) as image:
                (width, height), kind = image.size, str(image.format)
        except (
            OSError,
            ValueError,
            SyntaxError,
            Image.DecompressionBombError,
        ) as error:
            rule = f"not an image of {', '.join(FORMATS)}: {error}"
            refuse(where, rule, code="invalid_image")
        if width * height > limits.max_pixels:
            rule = f"{width} x {height} pixels; the limit is {limits.max_pixels}"
            refuse(where, rule, code="image_too_large")
        return StoredImage(FORMATS[kind], width, height)

    def _write(self, name: str, data: bytes) -> None:
        total, limit = self._total_bytes + len(data), self.limits.max_total_bytes
        if limit is not None and total > limit:
            message = f"the images would take {total} bytes; the limit is {limit}"
            raise GatewayError(message, 507, code="log_full")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            partial = self.directory / f".{name}"
            with partial.open("wb") as file:
                file.write(data)
                if self._fsync:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(self.directory / name)
        except OSError as error:
            message = f"the image could not be written: {error}"
            raise GatewayError(message, 500, code="log_failed") from error
        self._total_bytes = total
