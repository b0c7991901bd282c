"""pi, in print mode."""

import json

from trajkit_shim.agents.harness import Harness, Job, Launch

_VERSION = "0.73.1"
_COSTS = ("input", "output", "cacheRead", "cacheWrite")


def _launch(job: Job) -> Launch:
    models = {
        "providers": {
            "gateway": {
                "baseUrl": f"{job.base_url}/v1",
                "api": "openai-completions",
                "apiKey": "OPENAI_API_KEY",
                "models": [
                    {
                        "id": job.model,
                        "name": job.model,
                        "reasoning": False,
                        "input": ["text"],
                        "contextWindow": 32768,
                        "maxTokens": 4096,
                        "cost": dict.fromkeys(_COSTS, 0),
                    }
                ],
            }
        }
    }
    return Launch(
        command=(
            *("pi", "--print", "--mode", "json", "--no-session"),
            *("--provider", "gateway", "--model", job.model),
            *(*job.arguments, job.prompt),
        ),
        env={"OPENAI_API_KEY": job.api_key, "PI_OFFLINE": "1"},
        files={".pi/agent/models.json": json.dumps(models, indent=1)},
    )


HARNESS = Harness(
    name="pi",
    protocol="openai_chat",
    version=_VERSION,
    check=("pi", "--version"),
    install=f"npm install --global @mariozechner/pi-coding-agent@{_VERSION}",
    tried="tasks",
    launch=_launch,
)
