"""The graphs of a session, as the driver lays and serves them."""
