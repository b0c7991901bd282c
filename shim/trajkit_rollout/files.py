"""Files of a task, from several sources."""

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from trajkit.errors import FormatError
from trajkit_rollout.agents.sandbox import pack


@dataclass(frozen=True, slots=True)
class Texts:
    """Files given in the record itself, by path."""

    texts: Mapping[str, str]

    def archive(self) -> bytes:
        return pack({name: text.encode() for name, text in self.texts.items()})


@dataclass(frozen=True, slots=True)
class Archive:
    """Files that were read before, as a tar archive."""

    content: bytes

    def archive(self) -> bytes:
        return self.content


@dataclass(frozen=True, slots=True)
class Folder:
    """Files and folders below a directory, with their permissions and links.

    ``copies``: each path below ``path``, and its path in the archive. Default: everything.
    """

    path: Path
    copies: tuple[tuple[str, str], ...] = ((".", "."),)

    def archive(self) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for source, target in self.copies:
                # tarfile sorts the entries of a directory
                tar.add(self.path / source, target, filter=_plain)
        return buffer.getvalue()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """An entry without what differs from machine to machine."""
    if "__pycache__" in Path(entry.name).parts:
        return None
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


@dataclass(frozen=True, slots=True)
class Checkout:
    """The files of one commit of a git repository on this machine."""

    repository: Path
    revision: str

    def archive(self) -> bytes:
        asked = ("-C", self.repository, "rev-parse", "--path-format=absolute")
        revision = self._git(*asked, "--verify", self.revision)
        # the repository itself may be above the path, or elsewhere
        source = self._git(*asked, "--git-common-dir")
        # A repository's attributes may exclude or change files of an archive. Only those
        # in a repository's own directory override them.
        with tempfile.TemporaryDirectory() as bare:
            self._git("clone", "-q", "--bare", "--shared", "--", source, bare)
            # git shares nothing of a shallow repository
            alternates = Path(bare) / "objects/info/alternates"
            alternates.write_bytes(source + b"/objects\n")
            attributes = Path(bare) / "info/attributes"
            attributes.parent.mkdir(exist_ok=True)
            attributes.write_text("* -export-ignore -export-subst\n")
            where = f"--git-dir={bare}"
            return self._git(where, "archive", "--format=tar", revision)

    def _git(self, *arguments: str | bytes | Path) -> bytes:
        done = subprocess.run(["git", *arguments], capture_output=True, check=False)
        if done.returncode:
            message = done.stderr.decode(errors="replace").strip()
            raise FormatError(f"{self.repository} at {self.revision!r}: {message}")
        # an archive ends with null bytes
        return done.stdout.removesuffix(b"\n")


Files: TypeAlias = Texts | Archive | Folder | Checkout
"""Some files of a task. ``archive`` returns them as a tar archive, always with the same
bytes; it raises `FormatError` if they cannot be read."""
