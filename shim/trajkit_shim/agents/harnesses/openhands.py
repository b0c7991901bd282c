"""OpenHands, by its software-agent SDK and a short program."""

from trajkit_shim.agents.harness import Harness, Job, Launch

_VERSION = "1.17.0"

_PROGRAM = """\
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


def _launch(job: Job) -> Launch:
    return Launch(
        command=("python", f"{job.home}/openhands_run.py", *job.arguments),
        stdin=job.prompt,
        env={
            "LLM_MODEL": f"openai/{job.model}",
            "LLM_API_KEY": job.api_key,
            "LLM_BASE_URL": f"{job.base_url}/v1",
            # litellm downloads its price list when it is imported
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files={"openhands_run.py": _PROGRAM},
    )


HARNESS = Harness(
    name="openhands",
    protocol="openai_chat",
    version=_VERSION,
    check=("python", "-c", "import openhands.sdk, openhands.tools"),
    install=f"pip install openhands-sdk=={_VERSION} openhands-tools=={_VERSION}",
    tried="no",
    launch=_launch,
)
