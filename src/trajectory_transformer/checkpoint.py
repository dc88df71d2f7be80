"""Checkpoint folders: `weights.safetensors` and `checkpoint.json`. Loading one never executes code from it.

Files are written atomically (see `files`), so a reader never finds a part of a file. Format 1 was written before
version 0.1; the functions at the end rename its settings.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.files import write_atomically

FORMAT = 2
KIND = "trajectory-transformer"
WEIGHTS = "weights.safetensors"
DESCRIPTION = "checkpoint.json"

Description = dict[str, dict[str, Any]]  # sections by name; the dataclass built from a section checks it


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors and metadata to a safetensors file."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, to_safetensors(on_cpu, dict(metadata or {})))


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing; a checkpoint folder needs {WEIGHTS} and {DESCRIPTION}")
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a complete safetensors file; it may be truncated ({error})") from error


def save_checkpoint(
    folder: str | Path, tensors: Mapping[str, Tensor], description: Mapping[str, object], kind: str = KIND
) -> None:
    """Write both files of a checkpoint; the folder is created if necessary."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, tensors)
    content = {"format": FORMAT, "kind": kind, **description}
    write_atomically(folder / DESCRIPTION, (json.dumps(content, indent=2) + "\n").encode())


def load_checkpoint(folder: str | Path, kind: str = KIND) -> tuple[dict[str, Tensor], Description]:
    """Read both files of a checkpoint; raises a ValueError that names the file if one is missing or invalid."""
    folder = Path(folder)
    description = _read_description(folder)
    if description.get("kind") != kind:
        raise ValueError(f"{folder / DESCRIPTION}: not the description of a {kind} checkpoint")
    version = description.get("format")
    if not isinstance(version, int) or version > FORMAT:
        raise ValueError(
            f"{folder / DESCRIPTION}: checkpoint format {version} is not supported, expected at most {FORMAT}; "
            "upgrade trajectory-transformer"
        )
    tensors = read_tensors(folder / WEIGHTS)[0]
    if version < 2:
        tensors = {name.replace("gpt.context_encoder.", "gpt.map_encoder."): value for name, value in tensors.items()}
    return tensors, description


def checkpoint_kind(folder: str | Path) -> object:
    """The kind of checkpoint in a folder."""
    return _read_description(Path(folder)).get("kind")


def _read_description(folder: Path) -> dict[str, Any]:
    """The JSON file of a checkpoint."""
    path = folder / DESCRIPTION
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such checkpoint folder")
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing; a checkpoint folder needs {WEIGHTS} and {DESCRIPTION}")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON; the file may be truncated ({error})") from error
    if not isinstance(description, dict):
        raise ValueError(f"{path}: not the description of a {KIND} checkpoint")
    return description


def layout_fields(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a stored `TokenLayout`; format 1 called the shape of maps `context_shape`."""
    return {"map_shape" if name == "context_shape" else name: value for name, value in stored.items()}


def token_config_from(stored: Mapping[str, Any]) -> TokenConfig:
    """Token settings from JSON; those of format 1 that only mattered while training become one switch."""
    known = dict(stored)
    loss_mask = known.pop("loss_mask", None)
    if loss_mask is not None:
        for name in ("bin_value", "final_observation", "max_episode_steps"):
            known.pop(name)
        known["authors_conventions"] = loss_mask == "input"
    return TokenConfig(**{**known, "goal_dims": tuple(known["goal_dims"])})


def model_config_from(stored: Mapping[str, Any]) -> ModelConfig:
    """Model settings from JSON; format 1 called `map_channels` `context_channels`."""
    return ModelConfig(**{"map_channels" if name == "context_channels" else name: v for name, v in stored.items()})
