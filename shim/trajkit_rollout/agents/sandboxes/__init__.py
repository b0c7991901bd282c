"""The kinds of sandbox that come with trajkit."""

from collections.abc import Mapping

from trajkit_rollout.agents.sandbox import Sandbox
from trajkit_rollout.agents.sandboxes.containers import ApptainerSandbox, DockerSandbox
from trajkit_rollout.agents.sandboxes.e2b import E2BSandbox
from trajkit_rollout.agents.sandboxes.local import LocalSandbox

SANDBOXES: Mapping[str, type[Sandbox]] = {
    kind.kind: kind
    for kind in (ApptainerSandbox, DockerSandbox, E2BSandbox, LocalSandbox)
}
"""The kinds of sandbox by name."""
