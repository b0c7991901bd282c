"""The shipped tokenizer and chat template as a transformers tokenizer."""

import os
from importlib.resources import files
from typing import TYPE_CHECKING

from trajkit_shim.engines.embedded.vocabulary import END, tokenizer_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer() -> "PreTrainedTokenizerFast":
    """The embedded engine's tokenizer, with its chat template. Imports transformers."""
    # otherwise transformers warns about missing PyTorch, which is not needed
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    template = files("trajkit_shim.engines.embedded").joinpath("chat_template.jinja")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(tokenizer_json()),
        chat_template=template.read_text("utf-8"),
        eos_token=END,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
