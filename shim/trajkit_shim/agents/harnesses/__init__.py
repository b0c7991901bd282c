"""The harnesses, one module each; a module's ``HARNESS`` is its record."""
