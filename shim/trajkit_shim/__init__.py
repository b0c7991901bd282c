"""The serving side of trajkit: a gateway that records what an agent's model calls were."""
