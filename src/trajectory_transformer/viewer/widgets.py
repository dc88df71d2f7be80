"""Figures and layouts in one style; every text from data goes through here as plain text."""

import html
from typing import Any

from bokeh.models import Div, LayoutDOM, PlainText, Row, Title
from bokeh.plotting import figure

INK, ACCENT, WINNER, GOAL, FAINT = "#1c1e21", "#3b6fb6", "#d1495b", "#2a9d5c", "#9aa3ad"


def plot(title: str = "", **options: Any) -> Any:
    """A figure without toolbar that takes the width it gets."""
    settings = {"height": 260, "sizing_mode": "stretch_width", "toolbar_location": None, "tools": ""}
    made = figure(**{**settings, **options})
    made.title = Title(text=PlainText(text=title), text_font_size="13px", text_color=INK)
    made.outline_line_color = None
    made.grid.grid_line_alpha = 0.4
    made.axis.minor_tick_line_color = None
    return made


def label(axis: Any, text: str) -> None:
    """Label an axis with plain text: names from data may look like formulas."""
    axis.axis_label = PlainText(text=text)
    axis.axis_label_text_font_style = "normal"


def note(text: str, **options: Any) -> Div:
    """A paragraph of plain text."""
    return Div(text=html.escape(text), sizing_mode="stretch_width", **options)


def wrap(*children: LayoutDOM) -> Row:
    """Children next to each other where there is room, else below each other."""
    return Row(children=list(children), sizing_mode="stretch_width", styles={"flex-wrap": "wrap", "gap": "8px 16px"})
