"""What an actor's process asks the driver for."""
