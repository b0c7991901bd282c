"""Files of turns, rows and sessions."""
