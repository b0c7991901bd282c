"""Load a tokenizer. Only this module imports tokenizers and transformers."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from trajkit.analysis.tokenizer import Tokenizer
from trajkit.errors import FormatError
from trajkit.files.sources import Paths, paths_of
from trajkit.importers.transcripts import ChatTokenizer

# transformers would advise to install PyTorch, which is not needed here
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def chosen_tokenizer(path: str | None, turns: Paths) -> Tokenizer | None:
    """The tokenizer of ``--tokenizer``, else that of the run; None if there is none."""
    if path is not None:
        return load_tokenizer(Path(path))
    for source in paths_of(turns) or []:
        folder = source if source.is_dir() else source.parent
        # only in the directory of a run: elsewhere it may be that of another model
        is_run = any(folder.glob("turns-*.arrows")) and find_spec("tokenizers")
        if is_run and (folder / "tokenizer.json").is_file():
            return load_tokenizer(folder / "tokenizer.json")
    return None


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json`` or of a model's directory.

    tokenizers loads a directory with a ``tokenizer.json``, transformers any other.
    Nothing is downloaded.
    """
    if not path.exists():
        raise FormatError(
            f"--tokenizer {path}: there is no such file or folder. Nothing is downloaded: "
            "give the model's local folder, or its tokenizer.json"
        )
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return cast("Tokenizer", _from_directory(path))
    from tokenizers import Tokenizer as Fast

    content = file.read_bytes()
    try:
        return cast("Tokenizer", Fast.from_buffer(content))
    # tokenizers raises bare Exceptions
    except Exception as error:
        raise FormatError(f"{file}: not a tokenizer: {error}") from error


def load_chat_tokenizer(path: Path, template: str | None) -> ChatTokenizer:
    """A tokenizer with a chat template: its own, or the one in a file."""
    if path.is_dir():
        read = _from_directory(path)
    else:
        fast = load_tokenizer(path)
        import transformers

        make: Any = transformers.PreTrainedTokenizerFast
        read = make(tokenizer_object=fast)
    if template is not None:
        read.chat_template = Path(template).read_text("utf-8")
    if getattr(read, "chat_template", None) is None:
        raise FormatError(
            f"{path}: this tokenizer has no chat template: pass --chat-template"
        )
    return cast("ChatTokenizer", read)


def _from_directory(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(f"{path}: not a tokenizer: {error}") from error
