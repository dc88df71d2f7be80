"""The local page of `tt view`: what a planner sees, computed by plain functions and drawn with Bokeh."""
