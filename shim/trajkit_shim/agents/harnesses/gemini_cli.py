"""Gemini CLI, without its user interface."""

import json

from trajkit_shim.agents.harness import Harness, Job, Launch

_VERSION = "0.61.0"


def _launch(job: Job) -> Launch:
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
    }
    return Launch(
        command=(
            *("gemini", "--model", job.model, "--approval-mode", "yolo"),
            *("--output-format", "json", *job.arguments, f"--prompt={job.prompt}"),
        ),
        env={
            "GEMINI_API_KEY": job.api_key,
            "GOOGLE_GEMINI_BASE_URL": job.base_url,
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        },
        files={".gemini/settings.json": json.dumps(settings, indent=1)},
    )


HARNESS = Harness(
    name="gemini-cli",
    protocol="gemini",
    version=_VERSION,
    check=("gemini", "--version"),
    install=f"npm install --global @google/gemini-cli@{_VERSION}",
    tried="tasks",
    launch=_launch,
)
