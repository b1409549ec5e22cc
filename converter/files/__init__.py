"""Bytes: checkpoints as they lie on the disk, read one tensor at a time and written by one rename."""
