"""From raw files to checked arrays: one module per raw layout, and what they have in common."""
