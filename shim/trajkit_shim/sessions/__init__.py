"""Open sessions, their limits, and the log of their turns."""
