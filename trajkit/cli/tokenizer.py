"""Load a tokenizer. Only this module imports tokenizers and transformers."""

import argparse
import os
from pathlib import Path
from typing import cast

from trajkit.analysis.tokenizer import Tokenizer
from trajkit.errors import ArgumentError, FormatError
from trajkit.importers.findings import ChatTokenizer


def chosen_tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer of ``--tokenizer``; None without it."""
    path: Path | None = arguments.tokenizer
    return None if path is None else load_tokenizer(path)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json`` or of a model's directory.

    tokenizers loads a directory with a ``tokenizer.json``, transformers any other.
    Nothing is downloaded.

    Raises
    ------
    FileNotFoundError
        The path does not exist.
    FormatError
        The file or directory is not a tokenizer.
    ArgumentError
        The library that loads it is not installed.
    """
    if not path.exists():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return _from_directory(path)
    try:
        from tokenizers import Tokenizer as Fast
    except ModuleNotFoundError as error:
        raise _missing("tokenizers") from error
    try:
        fast: Tokenizer = Fast.from_str(file.read_text("utf-8"))
    # tokenizers raises bare Exceptions
    except Exception as error:
        raise FormatError(f"{file}: not a tokenizer: {error}") from error
    return fast


def load_chat_tokenizer(path: Path, template: Path | None) -> ChatTokenizer:
    """A tokenizer with a chat template: its own, or the one in a file.

    Raises
    ------
    FileNotFoundError, FormatError, ArgumentError
        As for `load_tokenizer`; also a FormatError if it has no template.
    """
    if not path.exists():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    if path.is_dir():
        read = cast("ChatTokenizer", _from_directory(path))
    else:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            from transformers import PreTrainedTokenizerFast
        except ModuleNotFoundError as error:
            raise _missing("transformers") from error
        fast = load_tokenizer(path)
        made = PreTrainedTokenizerFast(tokenizer_object=fast)  # type: ignore[no-untyped-call]
        read = cast("ChatTokenizer", made)
    if template is not None:
        read.chat_template = template.read_text("utf-8")  # type: ignore[attr-defined]
    if getattr(read, "chat_template", None) is None:
        raise FormatError(
            f"{path}: this tokenizer has no chat template: pass --chat-template"
        )
    return read


def _from_directory(path: Path) -> Tokenizer:
    # transformers would advise to install PyTorch, which is not needed here
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise _missing("transformers") from error
    try:
        read = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(f"{path}: not a tokenizer: {error}") from error
    return cast("Tokenizer", read)


def _missing(library: str) -> ArgumentError:
    return ArgumentError(f"--tokenizer needs {library}: pip install {library}")
