"""What actors ask the driver for while they run."""
