"""Getting values into memory that is there already: which, and how it is filled."""
