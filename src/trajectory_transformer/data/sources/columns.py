"""How rows become episodes: which column of a table holds what, where episodes end, what to do with missing values."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import yaml

from trajectory_transformer.files import read_yaml

Missing = Literal["refuse", "drop_episode", "forward_fill"]
Categories = dict[str, int | list[str | int]]


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """Which column of a CSV or Parquet table holds what; all fields are optional."""

    episode: str | None = None
    """Column that identifies the episode, numbers or text; null: all rows are one episode, unless terminal or truncated
    separate them."""
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
    truncated: str | None = None
    """Column that is true where an episode ended for another reason, such as a time limit."""
    split_at_terminal: bool = True
    """Whether every true value of terminal and truncated ends an episode. false: only the episode column separates
    episodes, and a true value of terminal anywhere in an episode says that the task ended it."""
    goals: tuple[str, ...] = ()
    """Columns of the goal, the same in all rows of an episode."""
    categories: Categories = field(default_factory=dict)
    """Discrete columns of actions or observations. Either the number of categories, for values that count from 0, or
    the list of all values, numbers or text."""
    env: str | None = None
    """Gymnasium id of the environment."""


@dataclass(frozen=True, kw_only=True)
class Columns(ColumnNames):
    """How the rows of a file become episodes.

    With observations and actions it describes a table. Without them it adds to the description that the table already
    has. For files that describe themselves, only `missing` and `max_episode_steps` can be set.
    """

    missing: Missing = "refuse"
    """What to do with an episode that has missing values: refuse the file, leave out the episode, or repeat the last
    known value."""
    max_episode_steps: int | None = None
    """Episodes end after this many steps at the latest: a time limit that the file does not mark."""

    def __post_init__(self) -> None:
        """Check what can be checked without the table."""
        unknown = [name for name in self.categories if name not in (*self.observations, *self.actions)]
        if unknown and self.is_complete:
            raise ValueError(f"columns.categories must name columns of actions or observations, got {unknown[0]!r}")
        for name, values in self.categories.items():
            if isinstance(values, int) and values < 1:
                raise ValueError(f"columns.categories.{name} must be at least 1, got {values}")
            if not isinstance(values, int) and (not values or len({str(each) for each in values}) < len(values)):
                raise ValueError(f"columns.categories.{name} must list different values, got {list(values)}")
        if self.max_episode_steps is not None and self.max_episode_steps < 1:
            raise ValueError(f"max_episode_steps must be at least 1, got {self.max_episode_steps}")

    @property
    def is_complete(self) -> bool:
        """Whether observations and actions are named."""
        return bool(self.observations and self.actions)

    @property
    def names_columns(self) -> bool:
        """Whether it says anything about the columns of a table."""
        return any(getattr(self, each.name) != _default(each.name) for each in fields(ColumnNames))

    @property
    def numeric(self) -> tuple[str, ...]:
        """Columns that must hold numbers or categories."""
        single = [name for name in (self.reward, self.terminal, self.truncated) if name is not None]
        return (*self.observations, *self.actions, *self.goals, *single)

    @property
    def labels(self) -> tuple[str, ...]:
        """Columns that may hold numbers or text."""
        return tuple(name for name in (self.episode, self.order) if name is not None)

    def over(self, base: "Columns") -> "Columns":
        """These columns, with those of `base` where nothing is set."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {name: value for name, value in given.items() if value != _default(name)}
        used = (*(self.observations or base.observations), *(self.actions or base.actions))
        kept = {name: value for name, value in base.categories.items() if name in used}
        return replace(base, **{"categories": kept, **changed})

    def to_yaml(self) -> str:
        """The content of a file for `read_columns`, without fields at their defaults."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        kept = {name: value for name, value in values.items() if value != _default(name) and value != []}
        return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)


def _default(name: str) -> object:
    return getattr(Columns(), name)


def columns_path(path: Path) -> Path:
    """The YAML file with the columns of a table: `log.csv.columns.yaml` for `log.csv`."""
    return path.with_name(path.name + ".columns.yaml")


def read_columns(path: str | Path) -> Columns:
    """Read columns from a YAML file."""
    return parse_columns(read_yaml(Path(path)), str(path))


def parse_columns(content: object, place: str, *, complete: bool = True) -> Columns:
    """Build columns from parsed YAML or JSON; `place` names their source in errors."""
    names = [each.name for each in fields(Columns)]
    if not isinstance(content, Mapping) or not set(content) <= set(names):
        wrong = next((key for key in content if key not in names), None) if isinstance(content, Mapping) else content
        raise ValueError(f"{place}: columns must be a mapping with the keys {', '.join(names)}, got {wrong!r}")
    values = dict(content)
    for name in ("observations", "actions", "goals"):
        given = values.get(name, ())
        if not isinstance(given, str | list | tuple):
            raise ValueError(f"{place}: columns.{name} must be a list of names, got {given!r}")
        values[name] = (given,) if isinstance(given, str) else tuple(str(each) for each in given)
        if complete and not values[name] and name != "goals":
            raise ValueError(f"{place}: columns.{name} must name at least one column, got none")
    try:
        return Columns(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from error


_KINDS = {
    "episode": r"(episode|ep|traj|trajectory|run|rollout|demo|session)([ _.]?(id|idx|index|number|no))?",
    "order": r"(time[ _.]?)?(step|steps|t|time|timestamp|frame|tick|index)([ _.]?(id|idx|index))?",
    "reward": r"(reward|rewards|rew|r)",
    "terminal": r"(terminal|terminals|terminated|termination|done|is[ _.]terminal)",
    "truncated": r"(timeout|timeouts|truncated|truncation)",
    "ignored": r"(next[ _.].*|unnamed.*|)",
    "actions": r"(action|actions|act|a|u|control|ctrl|cmd|command|input|torque)([ _.\[\d].*)?",
    "goals": r"(goal|goals|desired[ _.]goal|target)([ _.\[\d].*)?",
}
_STATE = r"(obs|observation|observations|state|states|s|x)([ _.\[\d].*)?"


def guess_columns(names: Sequence[str], given: Columns | None = None) -> Columns | None:
    """Guess columns from common names; without a column named like a state, all remaining columns are observations.

    Columns that `given` names are left to it.
    """
    given = given or Columns()
    found: dict[str, list[str]] = {kind: [] for kind in (*_KINDS, "observations")}
    left = []
    for name in (each for each in names if each not in (*given.numeric, *given.labels)):
        kind = next((kind for kind, pattern in _KINDS.items() if re.fullmatch(pattern, name, re.IGNORECASE)), None)
        if kind is None:
            left.append(name)
        else:
            found[kind].append(name)
    states = [name for name in left if re.fullmatch(_STATE, name, re.IGNORECASE)]
    found["observations"] = list(given.observations) or states or left
    found["actions"] = list(given.actions) or found["actions"]
    if not found["observations"] or not found["actions"]:
        return None
    single = {kind: next(iter(found[kind]), None) for kind in ("episode", "order", "reward", "terminal", "truncated")}
    return Columns(
        episode=single["episode"],
        order=single["order"],
        reward=single["reward"],
        terminal=single["terminal"],
        truncated=single["truncated"],
        observations=tuple(found["observations"]),
        actions=tuple(found["actions"]),
        goals=tuple(found["goals"]),
    )
