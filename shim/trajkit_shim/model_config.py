"""What a model's ``config.json`` tells of it."""

import json
from pathlib import Path


def config_number(model_dir: str | Path, name: str) -> int | None:
    """An integer of the configuration, or of its part on the language model; else None.

    Raises
    ------
    OSError
        There is no such file.
    """
    config = json.loads((Path(model_dir) / "config.json").read_text("utf-8"))
    # models of several modalities keep the language model's part apart
    number = config.get(name, config.get("text_config", {}).get(name))
    return number if isinstance(number, int) else None
