"""Measured parity: the same recorded rollouts replayed in two layouts, and the largest differences of what came out."""
