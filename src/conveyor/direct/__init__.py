"""Objects that stay on the actor that made them."""
