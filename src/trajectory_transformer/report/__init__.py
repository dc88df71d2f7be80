"""Figures, tables and pages from results."""
