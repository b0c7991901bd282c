"""Random sessions under random policies, and damaged files: `python -m tests.fuzz`."""
