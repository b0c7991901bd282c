"""Our harnesses, each a record of `agents.harness.Harness`.

docs/serving.md lists their protocols, and how the version that each installs was tested.
"""

import json
from collections.abc import Mapping

from trajkit_shim.agents.harness import Harness, failed_by_code
from trajkit_shim.agents.sandbox import CommandResult

_OPENAI = {"OPENAI_API_KEY": "{api_key}"}
# litellm downloads its price list when it is imported
_LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def _claude_failed(done: CommandResult) -> str | None:
    """Return the error in its last line, a JSON object, or by its exit code."""
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return failed_by_code(done)
    if isinstance(result, dict) and result.get("is_error"):
        return f"{result.get('subtype')}: {result.get('result')}"[:300]
    return failed_by_code(done)


CLAUDE_CODE = Harness(
    name="claude-code",
    install="npm install --global @anthropic-ai/claude-code@2.1.197",
    command="claude --print --output-format json --model {model} "
    "--dangerously-skip-permissions {arguments}",
    stdin="{prompt}",
    env={
        "ANTHROPIC_BASE_URL": "{base_url}",
        "ANTHROPIC_AUTH_TOKEN": "{api_key}",
        # every other model that it would choose by itself
        "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
        # as root it runs without confirmation only in a sandbox
        "IS_SANDBOX": "1",
        # updates, telemetry and error reports too
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
    failed=_claude_failed,
)
_CODEX_CONFIG = """\
model = "{model}"
model_provider = "gateway"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.gateway]
name = "gateway"
base_url = "{base_url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
CODEX = Harness(
    name="codex",
    install="npm install --global @openai/codex@0.169.0",
    command="codex exec --skip-git-repo-check --json "
    "--dangerously-bypass-approvals-and-sandbox {arguments} -",
    stdin="{prompt}",
    env={**_OPENAI, "CODEX_HOME": "{home}/.codex"},
    files={".codex/config.toml": _CODEX_CONFIG},
)
_GEMINI_CLI_CONFIG = """\
{
  "security": {"auth": {"selectedType": "gemini-api-key"}},
  "privacy": {"usageStatisticsEnabled": false},
  "general": {"disableAutoUpdate": true, "disableUpdateNag": true}
}
"""
GEMINI_CLI = Harness(
    name="gemini-cli",
    install="npm install --global @google/gemini-cli@0.61.0",
    command="gemini --model {model} --approval-mode yolo --output-format json "
    "{arguments} --prompt={prompt}",
    env={
        "GEMINI_API_KEY": "{api_key}",
        "GOOGLE_GEMINI_BASE_URL": "{base_url}",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    },
    files={".gemini/settings.json": _GEMINI_CLI_CONFIG},
)
_HERMES_CONFIG = """\
model:
  default: "{model}"
  provider: custom
  base_url: "{base_url}/v1"
  api_key: "{api_key}"
memory:
  memory_enabled: false
  user_profile_enabled: false
checkpoints:
  enabled: false
"""
HERMES = Harness(
    name="hermes",
    install="pip install hermes-agent==0.15.1",
    command="hermes --yolo chat -Q {arguments} -q{prompt}",
    env={"HERMES_HOME": "{home}/.hermes"},
    files={".hermes/config.yaml": _HERMES_CONFIG},
)
MINI_SWE_AGENT = Harness(
    name="mini-swe-agent",
    install="pip install mini-swe-agent==2.4.6",
    # its --help imports litellm, which takes seconds
    check="command -v mini-swe-agent",
    # litellm 1.106 looks for an MCP gateway among the tools, and fails without mcp
    command="mini-swe-agent --model openai/{model} --yolo --exit-immediately "
    "--cost-limit 0 --output {home}/trajectory.json -c mini.yaml "
    "-c model.model_kwargs._skip_mcp_handler=true {arguments} --task {prompt}",
    env={
        **_OPENAI,
        "OPENAI_BASE_URL": "{base_url}/v1",
        # otherwise it asks for a model on its first start, and prices each call
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": "{home}",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
        "MSWEA_SILENT_STARTUP": "1",
        **_LITELLM,
        "HF_HUB_OFFLINE": "1",
    },
)
_OPENCLAW_CONFIG = """\
{
  "agents": {"defaults": {
    "model": {"primary": "gateway/{model}"},
    "workspace": "{workspace}",
    "skipBootstrap": true
  }},
  "models": {"mode": "replace", "providers": {"gateway": {
    "baseUrl": "{base_url}/v1",
    "apiKey": "{api_key}",
    "api": "openai-completions",
    "models": [{"id": "{model}", "name": "{model}"}]
  }}}
}
"""
OPENCLAW = Harness(
    name="openclaw",
    install="npm install --global openclaw@2026.5.27",
    command="openclaw agent --local --json --agent main {arguments} --message={prompt}",
    files={".openclaw/openclaw.json": _OPENCLAW_CONFIG},
)
# a title would be a call of its own
_OPENCODE_CONFIG = """\
{
  "share": "disabled",
  "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"},
  "agent": {"title": {"disable": true}},
  "model": "gateway/{model}",
  "small_model": "gateway/{model}",
  "provider": {"gateway": {
    "npm": "@ai-sdk/openai-compatible",
    "name": "gateway",
    "options": {"baseURL": "{base_url}/v1", "apiKey": "{env:OPENAI_API_KEY}"},
    "models": {"{model}": {"name": "{model}"}}
  }}
}
"""
OPENCODE = Harness(
    name="opencode",
    install="npm install --global opencode-ai@1.18.33",
    command="opencode run --model gateway/{model} --format json {arguments} "
    "-- {prompt}",
    env={
        **_OPENAI,
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    },
    files={".config/opencode/opencode.json": _OPENCODE_CONFIG},
)
_OPENHANDS_PROGRAM = """\
import os
import sys

from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent

llm = LLM(
    model=os.environ["LLM_MODEL"],
    api_key=os.environ["LLM_API_KEY"],
    base_url=os.environ["LLM_BASE_URL"],
)
agent = get_default_agent(llm=llm, cli_mode=True)
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.stdin.read())
conversation.run()
"""
OPENHANDS = Harness(
    name="openhands",
    install="pip install openhands-sdk==1.17.0 openhands-tools==1.17.0",
    check="python -c 'import openhands.sdk, openhands.tools'",
    command="python {home}/openhands_run.py {arguments}",
    stdin="{prompt}",
    env={
        "LLM_MODEL": "openai/{model}",
        "LLM_API_KEY": "{api_key}",
        "LLM_BASE_URL": "{base_url}/v1",
        **_LITELLM,
    },
    files={"openhands_run.py": _OPENHANDS_PROGRAM},
)
_PI_CONFIG = """\
{"providers": {"gateway": {
  "baseUrl": "{base_url}/v1",
  "api": "openai-completions",
  "apiKey": "OPENAI_API_KEY",
  "models": [{"id": "{model}", "contextWindow": 32768, "maxTokens": 4096}]
}}}
"""
PI = Harness(
    name="pi",
    install="npm install --global @mariozechner/pi-coding-agent@0.73.1",
    command="pi --print --mode json --no-session --provider gateway "
    "--model {model} {arguments} {prompt}",
    env={**_OPENAI, "PI_OFFLINE": "1"},
    files={".pi/agent/models.json": _PI_CONFIG},
)
# managed memory: a second agent would read the conversation after each task
_QWEN_CODE_CONFIG = """\
{
  "security": {"auth": {"selectedType": "openai"}},
  "privacy": {"usageStatisticsEnabled": false},
  "telemetry": {"enabled": false},
  "general": {"enableAutoUpdate": false},
  "memory": {"enableManagedAutoMemory": false}
}
"""
QWEN_CODE = Harness(
    name="qwen-code",
    install="npm install --global @qwen-code/qwen-code@0.15.10",
    command="qwen --model {model} --approval-mode yolo {arguments} --prompt={prompt}",
    env={
        **_OPENAI,
        "OPENAI_BASE_URL": "{base_url}/v1",
        "OPENAI_MODEL": "{model}",
    },
    files={".qwen/settings.json": _QWEN_CODE_CONFIG},
)
SHELL = Harness(
    name="shell",
    check="true",
    # any program that finds the gateway in its environment
    command="""sh -c 'test $# -gt 0 || { echo "$0" >&2; exit 2; }; eval "$*"' """
    "'the shell harness needs a command: give --argument' {arguments}",
    stdin="{prompt}",
    env={
        "TASK_PROMPT": "{prompt}",
        "MODEL": "{model}",
        **_OPENAI,
        "OPENAI_BASE_URL": "{base_url}/v1",
        "ANTHROPIC_AUTH_TOKEN": "{api_key}",
        "ANTHROPIC_BASE_URL": "{base_url}",
        "GEMINI_API_KEY": "{api_key}",
        "GOOGLE_GEMINI_BASE_URL": "{base_url}",
    },
)

_ALL = (
    *(CLAUDE_CODE, CODEX, GEMINI_CLI, HERMES, MINI_SWE_AGENT, OPENCLAW, OPENCODE),
    *(OPENHANDS, PI, QWEN_CODE, SHELL),
)
HARNESSES: Mapping[str, Harness] = {harness.name: harness for harness in _ALL}
"""The harnesses by name."""
