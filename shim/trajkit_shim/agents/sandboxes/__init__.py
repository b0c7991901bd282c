"""The kinds of sandbox that come with trajkit."""

from collections.abc import Mapping

from trajkit_shim.agents.sandbox import Sandbox
from trajkit_shim.agents.sandboxes.containers import ApptainerSandbox, DockerSandbox
from trajkit_shim.agents.sandboxes.e2b import E2BSandbox
from trajkit_shim.agents.sandboxes.local import LocalSandbox

SANDBOXES: Mapping[str, type[Sandbox]] = {
    kind.kind: kind
    for kind in (ApptainerSandbox, DockerSandbox, E2BSandbox, LocalSandbox)
}
"""The kinds of sandbox by name."""
