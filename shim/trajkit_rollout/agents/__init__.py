"""Harnesses and the sandboxes that they run in."""
