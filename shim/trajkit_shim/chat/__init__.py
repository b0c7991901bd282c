"""The chat request and reply that every protocol is translated to and from."""
