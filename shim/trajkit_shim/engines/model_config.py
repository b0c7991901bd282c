"""Numbers from a model's ``config.json``."""

import json
from contextlib import suppress
from pathlib import Path


def vocab_size(model_dir: str | Path) -> int:
    """Return the size of a model's embedding table; raises as `config_number`."""
    return config_number(model_dir, "vocab_size")


def image_token_id(model_dir: str | Path) -> int | None:
    """Return the id of an image's token, or None if the model takes no images."""
    for name in ("image_token_id", "image_token_index"):
        with suppress(ValueError):
            return config_number(model_dir, name)
    return None


def config_number(model_dir: str | Path, name: str) -> int:
    """Return an integer of the configuration, or of its language model section.

    Raises `ValueError` if the file does not have it, `OSError` if there is no file.
    """
    config = json.loads((Path(model_dir) / "config.json").read_text("utf-8"))
    # multimodal models keep the language model's settings in a section of their own
    number = config.get(name, config.get("text_config", {}).get(name))
    if not isinstance(number, int):
        raise ValueError(f"{model_dir}/config.json has no {name}")
    return number
