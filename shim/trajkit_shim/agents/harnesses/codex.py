"""Codex, without its user interface."""

import json

from trajkit_shim.agents.harness import Harness, Job, Launch

_VERSION = "0.169.0"


def _launch(job: Job) -> Launch:
    # TOML's basic strings have JSON's syntax
    config = f"""\
model = {json.dumps(job.model)}
model_provider = "gateway"
sandbox_mode = "danger-full-access"
approval_policy = "never"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.gateway]
name = "gateway"
base_url = {json.dumps(f"{job.base_url}/v1")}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    return Launch(
        command=(
            *("codex", "exec", "--skip-git-repo-check", "--json"),
            *("--dangerously-bypass-approvals-and-sandbox", *job.arguments, "-"),
        ),
        stdin=job.prompt,
        env={"OPENAI_API_KEY": job.api_key, "CODEX_HOME": f"{job.home}/.codex"},
        files={".codex/config.toml": config},
    )


HARNESS = Harness(
    name="codex",
    protocol="openai_responses",
    version=_VERSION,
    check=("codex", "--version"),
    install=f"npm install --global @openai/codex@{_VERSION}",
    tried="tasks",
    launch=_launch,
)
