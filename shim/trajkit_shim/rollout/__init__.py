"""``trajkit rollout``: tasks, worked on by a harness in a sandbox, and graded."""
