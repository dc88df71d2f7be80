"""Which column of a table holds what: read from a YAML file, or guessed from the column names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import yaml


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """Which column of a CSV or Parquet table holds what; all fields are optional."""

    episode: str | None = None
    """Column that identifies the episode, numbers or text; null: all rows are one episode."""
    order: str | None = None
    """Column by which the rows of an episode are sorted; null: they are in order."""
    observations: tuple[str, ...] = ()
    """Columns of the observation."""
    actions: tuple[str, ...] = ()
    """Columns of the action taken after that observation; empty in a last row that holds only the final state."""
    reward: str | None = None
    """Column of the reward of that action; null: no rewards."""
    terminal: str | None = None
    """Column that is true where the task ended the episode; null: every episode was truncated."""
    goals: tuple[str, ...] = ()
    """Columns of the goal, the same in all rows of an episode."""
    categories: dict[str, int] = field(default_factory=dict)
    """Discrete columns of actions or observations, with their number of categories; values count from 0."""
    env: str | None = None
    """Gymnasium id of the environment."""


@dataclass(frozen=True, kw_only=True)
class Columns(ColumnNames):
    """Which column of a CSV or Parquet table holds what."""

    def __post_init__(self) -> None:
        """Check that observations and actions are named."""
        for name in ("observations", "actions"):
            if not getattr(self, name):
                raise ValueError(f"columns.{name} must name at least one column, got none")
        unknown = [name for name in self.categories if name not in (*self.observations, *self.actions)]
        if unknown:
            raise ValueError(f"columns.categories must name columns of actions or observations, got {unknown[0]!r}")

    @property
    def numeric(self) -> tuple[str, ...]:
        """Columns that must hold numbers."""
        single = [name for name in (self.reward, self.terminal) if name is not None]
        return (*self.observations, *self.actions, *self.goals, *single)

    @property
    def labels(self) -> tuple[str, ...]:
        """Columns that may hold numbers or text."""
        return tuple(name for name in (self.episode, self.order) if name is not None)

    def to_yaml(self) -> str:
        """The content of a file for `read_columns`, without fields at their defaults."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return yaml.safe_dump({name: value for name, value in values.items() if value}, sort_keys=False)


def columns_path(path: Path) -> Path:
    """The YAML file with the columns of a table: `log.csv.columns.yaml` for `log.csv`."""
    return path.with_name(path.name + ".columns.yaml")


def read_columns(path: str | Path) -> Columns:
    """Read columns from a YAML file."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    return parse_columns(content, str(path))


def parse_columns(content: object, place: str) -> Columns:
    """Build columns from parsed YAML or JSON; `place` names their source in errors."""
    names = [each.name for each in fields(Columns)]
    if not isinstance(content, Mapping) or not set(content) <= set(names):
        wrong = next((key for key in content if key not in names), None) if isinstance(content, Mapping) else content
        raise ValueError(f"{place}: columns must be a mapping with the keys {', '.join(names)}, got {wrong!r}")
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
    """Guess columns from common names; without a column named like a state, all remaining columns are observations."""
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
