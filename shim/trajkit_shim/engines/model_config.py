"""Numbers from a model's ``config.json``."""

import json
from pathlib import Path


def config_number(model_dir: str | Path, *names: str) -> int:
    """Return the first named integer of the configuration or its language model section.

    Raises `ValueError` if the file has none, `OSError` if there is no file.
    """
    config = json.loads((Path(model_dir) / "config.json").read_text("utf-8"))
    # multimodal models keep the language model's settings in a section of their own
    for settings in (config, config.get("text_config", {})):
        for name in names:
            if isinstance(settings.get(name), int):
                return int(settings[name])
    raise ValueError(f"{model_dir}/config.json has no {' or '.join(names)}")
