"""What the processes of a session say to each other, and the sockets over which they do."""
