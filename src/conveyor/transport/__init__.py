"""How a tensor gets from one actor to others."""
