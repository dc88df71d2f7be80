"""The documentation site: the Markdown of this folder and an API reference, built by Sphinx (`make docs`).

The pages are written to be read in the repository too. What only a site needs is added here while it is built.
"""

import io
import os
import re
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import trajectory_transformer
from trajectory_transformer.cli import COMMANDS, main

os.environ["COLUMNS"] = "88"  # width of the help of commands

project = "trajectory-transformer"
author = "the trajectory-transformer authors"
copyright = author
version = release = trajectory_transformer.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
myst_heading_anchors = 3  # links such as planning.md#latency
default_role = "code"  # what docstrings put in backquotes
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
exclude_patterns = ["_build"]

# The table of contents beside every page.
CONTENTS = {
    "Use": ["quickstart", "concepts", "data", "training", "planning", "models", "grids", "viewer"],
    "Methods": ["baselines", "antmaze", "prediction", "minigrid"],
    "Reference": ["site/api", "site/commands", "checkpoint-format", "safety", "renamed-settings"],
    "Project": ["reproduce", "architecture", "decisions/index", "site/contributing", "site/changelog"],
}
# Pages made from files outside this folder, and how their links lead to pages of the site.
OUTSIDE = {"site/changelog": "CHANGELOG.md", "site/contributing": "CONTRIBUTING.md"}
LINKS = (("(docs/", "(../"), ("(CHANGELOG.md)", "(changelog.md)"))
ROOT = Path(__file__).parents[1]


def toctree(*entries: str, caption: str = "") -> str:
    """A hidden table of contents in MyST."""
    options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *entries, "```", ""])


def complete(app: Sphinx, docname: str, content: list[str]) -> None:
    """Add tables of contents, pages from outside and the help of the commands; point links at pages of the site."""
    if docname in OUTSIDE:
        content[0] = (ROOT / OUTSIDE[docname]).read_text()
        for before, after in LINKS:
            content[0] = content[0].replace(before, after)
    for page, path in OUTSIDE.items():
        content[0] = content[0].replace(f"(../{path})", f"({page}.md)")
    content[0] = re.sub(r"\[([^]]*)\]\(\.\./(results|src/[^)]*)\)", r"\1", content[0])  # without a page
    if docname == "index":
        content[0] += "".join(toctree(*entries, caption=caption) for caption, entries in CONTENTS.items())
    elif docname == "decisions/index":
        content[0] += toctree("0*")
    elif docname == "site/commands":
        content[0] += command_help()


def shorten(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Arrays by the name of their numbers instead of the whole type."""
    array = re.compile(r"~numpy\.ndarray\[tuple\[[\w~.]+, \.\.\.\], ~numpy\.dtype\[~(?:\w+\.)+(\w+)\]\]")
    # Sphinx cannot read a signature with <factory>, the default of a field that every instance makes for itself.
    texts = [
        text and array.sub(r"~numpy.ndarray[\1]", text).replace("<factory>", "...") for text in (signature, returns)
    ]
    return texts[0], texts[1]


def command_help() -> str:
    """The help of every command."""
    parts = []
    for name in COMMANDS:
        text = io.StringIO()
        with redirect_stdout(text), suppress(SystemExit):
            main([*name.split(), "--help"])
        # The parser library marks a flag with a character that fonts lack.
        shown = re.sub(r"[^\n -~]", "", text.getvalue()).rstrip()
        parts += ["", f"## tt {name}", "", "```text", shown, "```", ""]
    return "\n".join(parts)


def setup(app: Sphinx) -> None:
    """Connect the additions."""
    app.connect("source-read", complete)
    app.connect("autodoc-process-signature", shorten)
