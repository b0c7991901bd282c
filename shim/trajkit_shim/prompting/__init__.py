"""From a chat request to prompt ids."""
