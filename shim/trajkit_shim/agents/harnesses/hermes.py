"""Hermes Agent, with a single query."""

import json

from trajkit_shim.agents.harness import Harness, Job, Launch

_VERSION = "0.15.1"


def _launch(job: Job) -> Launch:
    # YAML accepts JSON strings
    config = f"""\
model:
  default: {json.dumps(job.model)}
  provider: custom
  base_url: {json.dumps(f"{job.base_url}/v1")}
  api_key: {json.dumps(job.api_key)}
memory:
  memory_enabled: false
  user_profile_enabled: false
checkpoints:
  enabled: false
"""
    return Launch(
        command=(
            *("hermes", "--yolo", "chat", "-Q"),
            *(*job.arguments, f"-q{job.prompt}"),
        ),
        env={"HERMES_HOME": f"{job.home}/.hermes"},
        files={".hermes/config.yaml": config},
    )


HARNESS = Harness(
    name="hermes",
    protocol="openai_chat",
    version=_VERSION,
    check=("hermes", "--version"),
    install=f"pip install hermes-agent=={_VERSION}",
    tried="no",
    launch=_launch,
)
