"""Messages between the processes of a session, and the sockets that carry them."""
