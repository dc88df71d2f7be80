"""The local server: one page under a secret path, for this machine only."""

import gc
import secrets
from concurrent.futures import ThreadPoolExecutor

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.server import Server
from bokeh.settings import settings

from trajectory_transformer.viewer.app import App
from trajectory_transformer.viewer.content import Content

HOST = "127.0.0.1"
_SESSION_MILLISECONDS = 2000  # how long a session outlives its browser
_THREADS = 2


class Viewer:
    """A server of one run. `url` holds the secret."""

    def __init__(self, content: Content, port: int = 0) -> None:
        """Listen on this machine; port 0 takes a free one."""
        settings.resources.set_value("inline")  # whatever the user's settings say: nothing from outside
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tt-view")
        self.content = content
        self.token = secrets.token_urlsafe(24)
        try:
            self.server = Server(
                {f"/{self.token}": Application(FunctionHandler(self._open))},
                address=HOST,
                port=port,
                use_index=False,  # the index would tell the path
                unused_session_lifetime_milliseconds=_SESSION_MILLISECONDS,
                check_unused_sessions_milliseconds=1000,
                keep_alive_milliseconds=5000,
            )
        except OSError as error:
            raise ValueError(
                f"port {port} cannot be used ({error.strerror}); leave out --port for a free one"
            ) from error
        self.server.start()
        gc.freeze()  # what is there now stays: collections then look only at what comes and goes

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://localhost:{self.server.port}/{self.token}"

    def run(self) -> None:
        """Serve until Ctrl-C."""
        self.server.io_loop.start()

    def stop(self) -> None:
        """Stop listening and end all work."""
        self.server.stop()
        self.server.io_loop.add_callback(self.server.io_loop.stop)
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _open(self, document: Document) -> None:
        App(document, self.content, self.threads)
