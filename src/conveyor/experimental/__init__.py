"""What may still change in its names: Ray has it under the same ones."""
