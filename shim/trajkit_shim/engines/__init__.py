"""The inference servers that the gateway can sample from."""
