"""The kinds of sandbox, one module each; a module's ``SANDBOX`` is the kind."""
