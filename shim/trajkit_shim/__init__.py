"""The serving side of trajkit: a gateway that records an agent's model calls."""
