"""What the tabs of one browser session share: work in threads, messages, and the end of the session."""

import asyncio
import html
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from bokeh.document import Document, without_document_lock
from bokeh.models import Div

from trajectory_transformer.viewer.content import Content

Result = TypeVar("Result")


class Session:
    """One browser tab: its document, and its work, one piece at a time."""

    def __init__(self, document: Document, content: Content, threads: ThreadPoolExecutor) -> None:
        """Bind to a document."""
        self.document = document
        self.content = content
        self.message = Div(text="", sizing_mode="stretch_width", css_classes=["message"], name="message")
        self.closed = False
        self.at_end: list[Callable[[], object]] = []
        self._threads = threads
        self._waiting: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._busy = False
        document.on_session_destroyed(lambda context: self.close())

    def work(self, name: str, compute: Callable[[], Result], show: Callable[[Result], None]) -> None:
        """Compute in a thread, then show the result. Of several waiting requests of one name the last one counts."""
        self._waiting[name] = (compute, show)
        if not self._busy and not self.closed:
            self._busy = True
            self.document.add_next_tick_callback(self._drain)

    def after(self, milliseconds: int, call: Callable[[], None]) -> None:
        """Call later, unless the session has ended by then."""
        if not self.closed:
            self.document.add_timeout_callback(lambda: None if self.closed else call(), milliseconds)

    def say(self, text: str) -> None:
        """Show a message as plain text."""
        self.message.text = html.escape(text)

    def close(self) -> None:
        """End all work."""
        self.closed = True
        self._waiting.clear()
        for end in self.at_end:
            end()
        self.at_end.clear()

    @without_document_lock  # type: ignore[untyped-decorator]
    async def _drain(self) -> None:
        """Compute what waits. Without the lock, so that the page stays responsive."""
        while self._waiting and not self.closed:
            name = next(iter(self._waiting))
            compute, show = self._waiting.pop(name)
            try:
                result = await asyncio.get_running_loop().run_in_executor(self._threads, compute)
            except ValueError as error:
                self._update(lambda text: self.say(text), str(error))
                continue
            self._update(show, result)
        self._busy = False

    def _update(self, show: Callable[[Any], None], result: object) -> None:
        """Change the document, with its lock."""
        if not self.closed:
            self.document.add_next_tick_callback(lambda: show(result))
