"""Presets by name, and how their settings are changed."""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches

from trajectory_transformer.baselines import bc, brac, cql, dt, iql, mbop, td3bc
from trajectory_transformer.baselines.algorithm import Preset, Settings

PRESETS: dict[str, Preset] = {
    **bc.PRESETS,
    **td3bc.PRESETS,
    **iql.PRESETS,
    **cql.PRESETS,
    **brac.PRESETS,
    **dt.PRESETS,
    **mbop.PRESETS,
}


def find_preset(name: str) -> Preset:
    """The preset of this name."""
    if name not in PRESETS:
        raise ValueError(f"the algorithm must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def changed(settings: Settings, values: Mapping[str, object]) -> Settings:
    """Settings with some values replaced; refuses names and types that they do not have."""
    names = [field.name for field in fields(settings)]
    checked = {}
    for name, value in values.items():
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"unknown setting {name}; {hint}valid are {', '.join(names)}")
        checked[name] = _converted(name, value, getattr(settings, name))
    return replace(settings, **checked)  # type: ignore[arg-type]


def _converted(name: str, value: object, default: object) -> object:
    """A value from the command line or from JSON in the type of the default."""
    if isinstance(default, tuple) and isinstance(value, list | tuple) and all(type(each) is int for each in value):
        return tuple(value)
    if type(default) is float and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        expected = "a list of sizes" if isinstance(default, tuple) else type(default).__name__
        raise ValueError(f"setting {name} must be {expected}, got {value!r}")
    return value


def settings_dict(settings: Settings) -> dict[str, object]:
    """Settings as JSON stores them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
