"""Text of files on a terminal: names of columns, paths and ids must not control it.

Only what the standard library offers is imported here, as in `cli`.
"""

import logging
import sys


def printable(text: str) -> str:
    """Text in which control characters are shown as escapes: some of them would clear the screen."""
    return "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)


class LogHandler(logging.Handler):
    """Shows warnings of the library on the standard error stream."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        print(printable(record.getMessage()), file=sys.stderr)


def show_warnings() -> None:
    """Show warnings of the library, unless the user's own program has chosen what to do with them."""
    package = logging.getLogger("trajectory_transformer")
    if not package.handlers:
        handler = LogHandler(logging.WARNING)
        package.addHandler(handler)
