"""Who hosts the processes of actors: this machine's, and others."""
