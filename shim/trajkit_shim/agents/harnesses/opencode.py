"""OpenCode, without its user interface."""

import json

from trajkit_shim.agents.harness import Harness, Job, Launch

_VERSION = "1.18.33"


def _launch(job: Job) -> Launch:
    config = {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"},
        # a title would be a call of its own
        "agent": {"title": {"disable": True}},
        "model": f"gateway/{job.model}",
        "small_model": f"gateway/{job.model}",
        "provider": {
            "gateway": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "gateway",
                "options": {
                    "baseURL": f"{job.base_url}/v1",
                    "apiKey": "{env:OPENAI_API_KEY}",
                },
                "models": {job.model: {"name": job.model}},
            }
        },
    }
    return Launch(
        command=(
            *("opencode", "run", "--model", f"gateway/{job.model}"),
            *("--format", "json", *job.arguments, "--", job.prompt),
        ),
        env={
            "OPENAI_API_KEY": job.api_key,
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        files={".config/opencode/opencode.json": json.dumps(config, indent=1)},
    )


HARNESS = Harness(
    name="opencode",
    protocol="openai_chat",
    version=_VERSION,
    check=("opencode", "--version"),
    install=f"npm install --global opencode-ai@{_VERSION}",
    tried="tasks",
    launch=_launch,
)
