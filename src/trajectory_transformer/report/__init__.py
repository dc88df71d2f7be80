"""Figures, tables and HTML pages from datasets and results."""
