"""Checks of rows against the turns they came from."""
