"""Recorded episodes and where they come from."""
