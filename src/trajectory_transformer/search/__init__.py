"""Search over a model: expand, score, keep."""
