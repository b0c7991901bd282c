"""Arrow helpers that know nothing of turns or rows."""
