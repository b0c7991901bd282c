"""What is done of a job whose output is a directory of parts."""

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trajkit.errors import FormatError

NAME = "_manifest.json"
"""Its file; readers of directories pass over names with this first letter."""

_VERSION = 1


@dataclass(slots=True)
class Manifest:
    """Parts that are written, as the directory remembers them.

    Attributes
    ----------
    folder : Path
    job : dict
        All that the parts depend on, in JSON's types.
    ends : list of int
        For each part, how many turns of the source it and those before it took.
    totals : Counter
        What the parts count, by name.
    finished : bool
        The last part is the end of the source.
    """

    folder: Path
    job: dict[str, Any]
    ends: list[int] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    finished: bool = False

    @classmethod
    def open(
        cls, folder: Path, job: dict[str, Any], beside: Iterable[Path] = ()
    ) -> "Manifest":
        """What the directory holds of the job; it is made where it is not there.

        Parameters
        ----------
        folder : Path
        job : dict
        beside : iterable of Path
            Further directories that the job's files go to.

        Raises
        ------
        FormatError
            It holds parts of another job; or it, or at the job's begin one beside it,
            holds files that no job wrote.
        """
        folder.mkdir(exist_ok=True)
        path = folder / NAME
        # as it is read again: tuples are lists there
        job = json.loads(json.dumps(job))
        if not path.exists():
            for one in (folder, *beside):
                _check_empty(one)
            fresh = cls(folder, job)
            # a part that is written before it is remembered is then known for its own
            fresh._save()
            return fresh
        try:
            said = json.loads(path.read_text("utf-8"))
            same = said["version"] == _VERSION and said["job"] == job
            if same:
                return cls(
                    folder, job, said["ends"], Counter(said["totals"]), said["finished"]
                )
            if not said["ends"] and os.listdir(folder) == [NAME]:
                # of another job, which ended before its first part
                path.unlink()
                return cls.open(folder, job, beside)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"{path} is no manifest: {error!r}") from None
        raise FormatError(
            f"{folder} holds parts of another job (other files, or other options): "
            "give an empty directory"
        )

    @property
    def done(self) -> int:
        """Turns of the source that the parts took."""
        return self.ends[-1] if self.ends else 0

    def part(self) -> str:
        """The name of the next part's files."""
        return f"part-{len(self.ends):05d}.parquet"

    def add(self, n_turns: int, totals: Counter[str]) -> None:
        """Remember a part whose files are written."""
        self.ends.append(self.done + n_turns)
        self.totals.update(totals)
        self._save()

    def finish(self) -> None:
        """Remember that there are no more."""
        self.finished = True
        self._save()

    def _save(self) -> None:
        said = {
            "version": _VERSION,
            "job": self.job,
            "ends": self.ends,
            "totals": self.totals,
            "finished": self.finished,
        }
        text = json.dumps(said, indent=1)
        fresh = self.folder / f".{NAME}.tmp"
        fresh.write_text(text + "\n", "utf-8")
        os.replace(fresh, self.folder / NAME)


def _check_empty(folder: Path) -> None:
    """Raise FormatError where a directory holds files that no job is known to have made.

    One that is not there is empty.
    """
    if folder.is_dir() and any(not n.startswith(".") for n in os.listdir(folder)):
        raise FormatError(
            f"{folder} holds files, and no {NAME} that says of which job they are: "
            "give an empty directory"
        )


def fingerprint(
    source: str | os.PathLike[str], files: Iterable[Path]
) -> list[list[object]]:
    """The files of a source: their paths below it, sizes and times of change."""
    root = Path(source)
    return [
        [str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns]
        for path in files
    ]
