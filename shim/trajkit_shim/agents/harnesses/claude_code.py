"""Claude Code, in print mode."""

import json

from trajkit_shim.agents.harness import Harness, Job, Launch, failed_by_code
from trajkit_shim.agents.sandbox import CommandResult

_VERSION = "2.1.197"
_MODELS = (
    *("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
    *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")),
)


def _launch(job: Job) -> Launch:
    return Launch(
        command=(
            *("claude", "--print", "--output-format", "json", "--model", job.model),
            *("--dangerously-skip-permissions", *job.arguments),
        ),
        stdin=job.prompt,
        env={
            "ANTHROPIC_BASE_URL": job.base_url,
            "ANTHROPIC_AUTH_TOKEN": job.api_key,
            # every model that it would choose by itself
            **dict.fromkeys(_MODELS, job.model),
            # as root it runs without confirmation only in a sandbox
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_TELEMETRY": "1",
        },
    )


def _failed(done: CommandResult) -> str | None:
    """Return the error in its last line, a JSON object, or by its exit code."""
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return failed_by_code(done)
    if isinstance(result, dict) and result.get("is_error"):
        return f"{result.get('subtype')}: {result.get('result')}"[:300]
    return failed_by_code(done)


HARNESS = Harness(
    name="claude-code",
    protocol="anthropic",
    version=_VERSION,
    check=("claude", "--version"),
    install=f"npm install --global @anthropic-ai/claude-code@{_VERSION}",
    tried="tasks",
    launch=_launch,
    failed=_failed,
)
