"""The page of a run: one tab per view, built when it is opened."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bokeh.document import Document
from bokeh.models import Column, LayoutDOM, TabPanel, Tabs

from trajectory_transformer.viewer.content import TABS, Content
from trajectory_transformer.viewer.control_page import ControlPage
from trajectory_transformer.viewer.record_pages import AttentionPage, DataPage, ForecastPage, PlanPage
from trajectory_transformer.viewer.session import Session
from trajectory_transformer.viewer.widgets import note

_TEMPLATE = """
{% block preamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<style>body { margin: 0; padding: 8px; font-family: system-ui, sans-serif; }</style>
{% endblock %}
"""


class App:
    """The tabs of one session."""

    def __init__(self, document: Document, content: Content, threads: ThreadPoolExecutor) -> None:
        """Build the first tab; the others follow when they are opened."""
        self.session = Session(document, content, threads)
        self.control: ControlPage | None = None
        self.pages: dict[str, Any] = {}
        self.panels = [
            Column(children=[note("")], sizing_mode="stretch_width", styles={"padding": "8px 0"}) for _ in TABS
        ]
        self.tabs = Tabs(
            tabs=[TabPanel(child=panel, title=name) for panel, name in zip(self.panels, TABS, strict=True)],
            sizing_mode="stretch_width",
            name="tabs",
        )
        self.tabs.on_change("active", lambda attribute, old, new: self.open(TABS[new]))
        shown = next((name for name in TABS if name not in content.missing), TABS[0])
        self.tabs.active = TABS.index(shown)
        self.open(shown)
        document.title = f"tt view {content.name}"
        document.template = _TEMPLATE
        document.add_root(Column(children=[self.tabs, self.session.message], sizing_mode="stretch_width"))

    def open(self, name: str) -> None:
        """Build a tab if it is new, and bring it up to date."""
        content, panel = self.session.content, self.panels[TABS.index(name)]
        if name in content.missing:
            panel.children = [note(f"{name} is missing: {content.missing[name]}.", name="missing")]
            return
        if name in ("Control", "Plan") and self.control is None and "Control" not in content.missing:
            self.control = ControlPage(self.session)
            self.pages["Control"] = self.control
            self.panels[TABS.index("Control")].children = [self.control.layout]
        if name not in self.pages:
            builders: dict[str, Callable[[], Any]] = {
                "Plan": lambda: PlanPage(self.session, self.control),
                "Forecast": lambda: ForecastPage(self.session),
                "Attention": lambda: AttentionPage(self.session),
                "Data": lambda: DataPage(self.session),
            }
            self.pages[name] = builders[name]()
            layout: LayoutDOM = self.pages[name].layout
            panel.children = [layout]
        if name != "Control":
            self.pages[name].refresh()
