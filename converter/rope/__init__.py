"""RoPE layouts: which rows of a q or k head are rotated together, and how to move between the two conventions."""
