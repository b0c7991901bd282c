"""mini-swe-agent, unattended."""

from trajkit_shim.agents.harness import Harness, Job, Launch

_VERSION = "2.4.6"


def environment(base_url: str, api_key: str, home: str) -> dict[str, str]:
    """Return its environment: the gateway, no questions, no downloads."""
    return {
        "OPENAI_API_KEY": api_key,
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        # otherwise it asks for a model on its first start, and prices each call
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": home,
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
        "MSWEA_SILENT_STARTUP": "1",
        # litellm downloads its price list when it is imported
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOCAL_BLOG_POSTS": "True",
        "LITELLM_TELEMETRY": "False",
        "HF_HUB_OFFLINE": "1",
    }


def _launch(job: Job) -> Launch:
    return Launch(
        command=(
            *("mini-swe-agent", "--model", f"openai/{job.model}"),
            *("--yolo", "--exit-immediately", "--cost-limit", "0"),
            *("--output", f"{job.home}/trajectory.json", "-c", "mini.yaml"),
            # litellm 1.106 looks for an MCP gateway among the tools, and fails without
            # mcp
            *("-c", "model.model_kwargs._skip_mcp_handler=true", *job.arguments),
            *("--task", job.prompt),
        ),
        env=environment(f"{job.base_url}/v1", job.api_key, job.home),
    )


HARNESS = Harness(
    name="mini-swe-agent",
    protocol="openai_chat",
    version=_VERSION,
    # its --help imports litellm, which takes seconds
    check=("sh", "-c", "command -v mini-swe-agent"),
    install=f"pip install mini-swe-agent=={_VERSION}",
    tried="tasks",
    launch=_launch,
)
