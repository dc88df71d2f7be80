"""Episodes as tokens."""
