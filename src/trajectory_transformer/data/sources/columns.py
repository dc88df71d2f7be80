"""Which column of a table holds what: read from a small YAML file, or guessed from the columns' names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import yaml


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """Which column of a CSV or Parquet table holds what, as far as it was said."""

    episode: str | None = None
    """Column that tells episodes apart, numbers or names; null: all rows are one episode."""
    order: str | None = None
    """Column that the rows of an episode are sorted by; null: they stand in order."""
    observations: tuple[str, ...] = ()
    """Columns of the state."""
    actions: tuple[str, ...] = ()
    """Columns of the action taken in that state; empty in a last row that only holds the final state."""
    reward: str | None = None
    """Column of the reward of that action; null: none was recorded."""
    terminal: str | None = None
    """Column that is true where the task itself ended the episode; null: it never did."""
    goals: tuple[str, ...] = ()
    """Columns of what the agent was asked to reach, the same in all rows of an episode."""
    categories: dict[str, int] = field(default_factory=dict)
    """Columns of actions or states that hold category numbers from 0, and how many categories each has."""
    env: str | None = None
    """Gymnasium id of the environment, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Columns(ColumnNames):
    """Which column of a CSV or Parquet table holds what."""

    def __post_init__(self) -> None:
        """A state and an action are the least a table must have."""
        for name in ("observations", "actions"):
            if not getattr(self, name):
                raise ValueError(f"columns.{name} must name at least one column, got none")
        strange = [name for name in self.categories if name not in (*self.observations, *self.actions)]
        if strange:
            raise ValueError(f"columns.categories must name columns of actions or observations, got {strange[0]!r}")

    @property
    def numeric(self) -> tuple[str, ...]:
        """Columns that must hold numbers."""
        single = [name for name in (self.reward, self.terminal) if name is not None]
        return (*self.observations, *self.actions, *self.goals, *single)

    @property
    def labels(self) -> tuple[str, ...]:
        """Columns that may hold anything that can be told apart and sorted."""
        return tuple(name for name in (self.episode, self.order) if name is not None)

    def to_yaml(self) -> str:
        """The file that `read_columns` reads, without what is left at its default."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return yaml.safe_dump({name: value for name, value in values.items() if value}, sort_keys=False)


def beside(path: Path) -> Path:
    """Where the columns of a table are looked for: `log.csv.columns.yaml` for `log.csv`."""
    return path.with_name(path.name + ".columns.yaml")


def read_columns(path: Path) -> Columns:
    """Read a YAML file of columns."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    return parse_columns(content, str(path))


def parse_columns(content: object, place: str) -> Columns:
    """Columns from plain values."""
    names = [each.name for each in fields(Columns)]
    if not isinstance(content, Mapping) or not set(content) <= set(names):
        strange = next((key for key in content if key not in names), None) if isinstance(content, Mapping) else content
        raise ValueError(f"{place}: columns must be a mapping with the keys {', '.join(names)}, got {strange!r}")
    values = dict(content)
    for name in ("observations", "actions", "goals"):
        given = values.get(name, ())
        values[name] = (given,) if isinstance(given, str) else tuple(str(each) for each in given)
    try:
        return Columns(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from error


_KINDS = {
    "episode": r"(episode|ep|traj|trajectory|run|rollout|demo|session)([ _.]?(id|idx|index|number|no))?",
    "order": r"(time[ _.]?)?(step|steps|t|time|timestamp|frame|tick|index)([ _.]?(id|idx|index))?",
    "reward": r"(reward|rewards|rew|r)",
    "terminal": r"(terminal|terminals|terminated|termination|done|is[ _.]terminal)",
    "ignored": r"(timeout|timeouts|truncated|truncation|next[ _.].*|unnamed.*|)",
    "actions": r"(action|actions|act|a|u|control|ctrl|cmd|command|input|torque)([ _.\[\d].*)?",
    "goals": r"(goal|goals|desired[ _.]goal|target)([ _.\[\d].*)?",
}
_STATE = r"(obs|observation|observations|state|states|s|x)([ _.\[\d].*)?"


def guess_columns(names: Sequence[str], categories: Mapping[str, int]) -> Columns | None:
    """Columns by the names people give them; where nothing is called a state, every column left is one."""
    found: dict[str, list[str]] = {kind: [] for kind in (*_KINDS, "observations")}
    left = []
    for name in names:
        kind = next((kind for kind, pattern in _KINDS.items() if re.fullmatch(pattern, name, re.IGNORECASE)), None)
        if kind is None:
            left.append(name)
        else:
            found[kind].append(name)
    states = [name for name in left if re.fullmatch(_STATE, name, re.IGNORECASE)]
    found["observations"] = states or left
    if not found["observations"] or not found["actions"]:
        return None
    single = {kind: next(iter(found[kind]), None) for kind in ("episode", "order", "reward", "terminal")}
    several = {kind: tuple(found[kind]) for kind in ("observations", "actions", "goals")}
    chosen = {name: count for name, count in categories.items() if name in found["actions"]}
    return Columns(
        episode=single["episode"],
        order=single["order"],
        reward=single["reward"],
        terminal=single["terminal"],
        observations=several["observations"],
        actions=several["actions"],
        goals=several["goals"],
        categories=chosen,
    )
