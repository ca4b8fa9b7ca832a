"""Any value as a pickle, and classes and functions by value."""
