"""OpenClaw's agent, without its own gateway."""

import json

from trajkit_shim.agents.harness import Harness, Job, Launch

_VERSION = "2026.5.27"


def _launch(job: Job) -> Launch:
    config = {
        "agents": {
            "defaults": {
                "model": {"primary": f"gateway/{job.model}"},
                "workspace": job.workspace,
                "skipBootstrap": True,
            }
        },
        "models": {
            "mode": "replace",
            "providers": {
                "gateway": {
                    "baseUrl": f"{job.base_url}/v1",
                    "apiKey": job.api_key,
                    "api": "openai-completions",
                    "models": [{"id": job.model, "name": job.model}],
                }
            },
        },
    }
    return Launch(
        command=(
            *("openclaw", "agent", "--local", "--json", "--agent", "main"),
            *(*job.arguments, f"--message={job.prompt}"),
        ),
        files={".openclaw/openclaw.json": json.dumps(config, indent=1)},
    )


HARNESS = Harness(
    name="openclaw",
    protocol="openai_chat",
    version=_VERSION,
    check=("openclaw", "--version"),
    install=f"npm install --global openclaw@{_VERSION}",
    tried="no",
    launch=_launch,
)
