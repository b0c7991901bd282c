"""The shipped tokenizer: as the engine needs it, and as renderers and transformers do."""

import json
import os
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from trajkit.analysis.tokenizer import entry_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|im_end|>"


class Vocabulary:
    """The bytes of every token of a byte-level BPE model in which each byte is a token.

    ``spelling`` has the bytes of each id, ``added`` the added tokens by their text, and
    ``by_bytes`` the ordinary tokens, of at most ``longest`` bytes.
    """

    def __init__(self, tokenizer_json: str) -> None:
        content = json.loads(tokenizer_json)
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        # the same merges, without added tokens
        self._plain = Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
        self.added: dict[str, int] = {
            token["content"]: token["id"] for token in content["added_tokens"]
        }
        entries = content["model"]["vocab"].items()
        self.by_bytes = {entry_bytes(entry) or b"": token for entry, token in entries}
        self.longest = max(map(len, self.by_bytes))
        spelled = {token: spelling for spelling, token in self.by_bytes.items()}
        spelled |= {token: text.encode() for text, token in self.added.items()}
        self.spelling = [spelled[token] for token in range(len(spelled))]
        self.size = len(spelled)

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids, including control tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def encode_plain(self, text: str) -> list[int]:
        """Return the canonical ids of a text, without recognizing added tokens."""
        return list(self._plain.encode(text).ids)


def _shipped_file(name: str) -> str:
    return files("trajkit_shim.engines.embedded").joinpath(name).read_text("utf-8")


@cache
def shipped() -> Vocabulary:
    """Return the vocabulary of the shipped tokenizer."""
    return Vocabulary(_shipped_file("tokenizer.json"))


def chat_files() -> tuple[Tokenizer, str]:
    """Return the shipped tokenizer and its chat template."""
    tokenizer = Tokenizer.from_str(_shipped_file("tokenizer.json"))
    return tokenizer, _shipped_file("chat_template.jinja")


def load_tokenizer() -> "PreTrainedTokenizerFast":
    """The embedded engine's tokenizer for transformers, with its chat template."""
    # otherwise transformers warns about missing PyTorch, which is not needed
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    tokenizer, template = chat_files()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        chat_template=template,
        eos_token=END,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
