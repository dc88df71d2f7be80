"""Commands and imports in the documentation exist: every `tt` command parses, every imported name is there."""

import ast
import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import trajectory_transformer
from trajectory_transformer.cli import COMMANDS
from trajectory_transformer.cli.parser import parse

ROOT = Path(__file__).parent.parent
# Records of decisions may quote what was there before.
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]


def blocks(page: str, language: str) -> list[str]:
    """Code blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def commands(page: str) -> Iterator[list[str]]:
    """The words of every `tt` command in the shell blocks of a page."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "trajectory_transformer" in words:  # torchrun ... -m trajectory_transformer train ...
                words = ["tt", *words[words.index("trajectory_transformer") + 1 :]]
            if words[:1] == ["tt"]:
                yield words[1:]


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_documentation_parse(page: str) -> None:
    for words in commands(page):
        name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        parse(name, COMMANDS[name], words[len(name.split()) :])


@pytest.mark.parametrize("page", PAGES)
def test_names_imported_in_the_documentation_exist(page: str) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trajectory_transformer"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_the_documentation_shows_commands_and_python() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 10
    assert sum(len(blocks(page, "python")) for page in PAGES) > 5


def test_links_between_documents_lead_somewhere() -> None:
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_the_readme_lists_every_extra_that_users_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "README.md").read_text().split("| extra | for |")[1].split("\n\n")[0]
    listed = set(re.findall(r"`([a-z0-9]+)`", "".join(line.split("|")[1] for line in table.splitlines()[2:])))
    assert listed == set(extras) - {"all", "d3rlpy", "dev", "docs"}
    everything = re.fullmatch(r"trajectory-transformer\[(.*)\]", extras["all"][0])
    assert everything is not None and set(everything.group(1).split(",")) == listed - {"ray"}


def test_the_api_reference_has_every_public_name() -> None:
    page = (ROOT / "docs/site/api.md").read_text()
    listed = set(re.findall(r"\.\. (?:auto\w+|py:data):: (\w+)", page))
    assert listed == set(trajectory_transformer.__all__) - {"__version__"}


def test_every_decision_is_listed() -> None:
    listed = re.findall(r"\]\((0\d+-[\w-]+\.md)\)", (ROOT / "docs/decisions/index.md").read_text())
    assert listed == sorted(path.name for path in (ROOT / "docs/decisions").glob("0*.md"))


def test_the_citation_names_this_version_and_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == trajectory_transformer.__version__
    paper = cited["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Janner", "Li", "Levine"]
    assert paper["year"] == 2021


def test_notebooks_are_stored_without_outputs() -> None:
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert len(paths) == 2
    for path in paths:
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None, path.name
