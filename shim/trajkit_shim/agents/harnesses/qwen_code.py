"""Qwen Code, without its user interface."""

import json

from trajkit_shim.agents.harness import Harness, Job, Launch

_VERSION = "0.15.10"


def _launch(job: Job) -> Launch:
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        # a second agent would read the conversation after each task
        "memory": {"enableManagedAutoMemory": False},
    }
    return Launch(
        command=(
            *("qwen", "--model", job.model, "--approval-mode", "yolo"),
            *(*job.arguments, f"--prompt={job.prompt}"),
        ),
        env={
            "OPENAI_API_KEY": job.api_key,
            "OPENAI_BASE_URL": f"{job.base_url}/v1",
            "OPENAI_MODEL": job.model,
        },
        files={".qwen/settings.json": json.dumps(settings, indent=1)},
    )


HARNESS = Harness(
    name="qwen-code",
    protocol="openai_chat",
    version=_VERSION,
    check=("qwen", "--version"),
    install=f"npm install --global @qwen-code/qwen-code@{_VERSION}",
    tried="tasks",
    launch=_launch,
)
