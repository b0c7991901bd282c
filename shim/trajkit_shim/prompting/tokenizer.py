"""A model directory's tokenizer, chat template and special tokens, without transformers.

`load_tokenizer` reads the files that every fast tokenizer has. A directory without
``tokenizer.json``, or with Python code of its own, needs transformers.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer

NAMED = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())
"""The special tokens that have a name, which templates use."""


class ChatTokenizer(Protocol):
    """What a renderer needs of a tokenizer; also one of transformers."""

    @property
    def backend_tokenizer(self) -> Tokenizer: ...
    @property
    def chat_template(self) -> "str | dict[str, str] | None": ...
    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...
    def __len__(self) -> int: ...


@dataclass(slots=True)
class ModelTokenizer:
    """A fast tokenizer, with the texts of its named special tokens."""

    backend_tokenizer: Tokenizer
    chat_template: "str | dict[str, str] | None"
    special_tokens_map: dict[str, str] = field(default_factory=dict)

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text, if there is one."""
        text = self.special_tokens_map.get("eos_token")
        return None if text is None else self.backend_tokenizer.token_to_id(text)

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """The added tokens, by id."""
        found: Mapping[int, AddedToken]
        found = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self.backend_tokenizer.get_vocab_size())


def load_tokenizer(folder: Path) -> ModelTokenizer:
    """Read the tokenizer of a model directory, which has a ``tokenizer.json``.

    Raises `ValueError`: a file cannot be read.
    """
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            config |= json.loads((folder / name).read_text("utf-8"))
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # tokenizers has no errors of its own
    except Exception as error:
        raise ValueError(f"tokenizer.json: {error}") from error
    named = {name: _text(config.get(name)) for name in NAMED}
    texts = {name: text for name, text in named.items() if text is not None}
    missing = [t for t in texts.values() if backend.token_to_id(t) is None]
    backend.add_special_tokens([AddedToken(text, special=True) for text in missing])
    return ModelTokenizer(backend, _template(folder, config), texts)


def _text(token: object) -> str | None:
    """The text of a token, which a configuration may have as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template(folder: Path, config: Mapping[str, Any]) -> "str | dict[str, str] | None":
    """The chat template; several, if they have names."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if (folder / "chat_template.json").exists():
        text = (folder / "chat_template.json").read_text("utf-8")
        template = json.loads(text).get("chat_template")
    if isinstance(template, Iterable) and not isinstance(template, str):
        return {each["name"]: each["template"] for each in template}
    return template
