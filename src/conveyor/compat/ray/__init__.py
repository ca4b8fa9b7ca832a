"""Ray's module names, defaults and texts over ours."""
