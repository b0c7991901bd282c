"""The JSON files of a model's directory."""

import json
from pathlib import Path
from typing import Any


def read_config(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file, empty if there is none; raises `ValueError`."""
    try:
        return {**json.loads(file.read_text("utf-8"))} if file.exists() else {}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file.name}: not a JSON object: {error}") from error


def config_number(model_dir: str | Path, *names: str) -> int:
    """Return the first named integer of ``config.json`` or its language model section.

    Raises `ValueError` if there is none.
    """
    config = read_config(Path(model_dir) / "config.json")
    # multimodal models keep the language model's settings in a section of their own
    for settings in (config, config.get("text_config") or {}):
        for name in names:
            if isinstance(settings.get(name), int):
                return int(settings[name])
    raise ValueError(f"{model_dir}/config.json has no {' or '.join(names)}")
