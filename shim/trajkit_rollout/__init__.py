"""``trajkit rollout``: a harness works on tasks in sandboxes, and is graded."""
