"""From sampled ids to a parsed reply."""
