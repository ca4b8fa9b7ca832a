"""A Plan and a timeline are drawn, as text and as pictures."""
