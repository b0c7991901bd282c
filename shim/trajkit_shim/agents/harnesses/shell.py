"""Any program: a shell command that finds the gateway in its environment.

The command is the `Job`'s arguments (``--argument`` on the command line).
"""

from trajkit_shim.agents.harness import Harness, HarnessError, Job, Launch


def _launch(job: Job) -> Launch:
    if not job.arguments:
        raise HarnessError("the shell harness needs a command: give --argument")
    return Launch(
        command=("sh", "-c", " ".join(job.arguments)),
        stdin=job.prompt,
        env={
            "TASK_PROMPT": job.prompt,
            "MODEL": job.model,
            "OPENAI_API_KEY": job.api_key,
            "OPENAI_BASE_URL": f"{job.base_url}/v1",
            "ANTHROPIC_AUTH_TOKEN": job.api_key,
            "ANTHROPIC_BASE_URL": job.base_url,
            "GEMINI_API_KEY": job.api_key,
            "GOOGLE_GEMINI_BASE_URL": job.base_url,
        },
    )


HARNESS = Harness(
    name="shell",
    protocol="any",
    version="",
    check=("sh", "-c", "true"),
    install="",
    tried="tasks",
    launch=_launch,
)
