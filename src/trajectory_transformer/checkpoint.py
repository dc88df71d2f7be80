"""Checkpoint folders: `weights.safetensors` and `checkpoint.json`. Loading one never executes code from it.

Files are written atomically (see `files`), so a reader never finds a part of a file. Format 1 was written before
version 0.1; the functions at the end rename its settings.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.files import file_sha256, naming, read_json, settings_from, write_atomically

log = logging.getLogger(__name__)

FORMAT = 2
KIND = "trajectory-transformer"
WEIGHTS = "weights.safetensors"
DESCRIPTION = "checkpoint.json"
DIGEST = "weights_sha256"
_CONTENT = "sha256"
_BROKEN = "not a complete safetensors file; it may be truncated"

Description = dict[str, dict[str, Any]]  # sections by name; the dataclass built from a section checks it


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors and metadata to a safetensors file, with a digest of both."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    known = dict(metadata or {})
    write_atomically(path, to_safetensors(on_cpu, known | {_CONTENT: _content_digest(on_cpu, known)}))


def _content_digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of tensors and metadata, whatever their order in a file."""
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file."""
    path = Path(path)
    _check_exists(path)
    with naming(path, _BROKEN, SafetensorError, TypeError, OSError), safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata() or {})
    stored = metadata.pop(_CONTENT, None)
    # Older files store no digest. One under a name of the same length is a digest whose name was damaged.
    renamed = any(len(name) == len(_CONTENT) and len(value) == 64 for name, value in metadata.items())
    if renamed or (stored is not None and stored != _content_digest(tensors, metadata)):
        raise ValueError(f"{path}: the file is damaged: its contents do not have the SHA-256 that it stores")
    return tensors, metadata


def save_checkpoint(
    folder: str | Path, tensors: Mapping[str, Tensor], description: Mapping[str, object], kind: str = KIND
) -> None:
    """Write both files of a checkpoint; the folder is created if necessary.

    The description comes first, with the digests of the weights to come and of those before: whenever a kill comes,
    the folder holds weights that its description knows.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    weights: bytes = to_safetensors(on_cpu)
    digests = [hashlib.sha256(weights).hexdigest()]
    if (folder / WEIGHTS).is_file():
        digests += [before for before in [file_sha256(folder / WEIGHTS)] if before not in digests]
    content = {"format": FORMAT, "kind": kind, DIGEST: digests, **description}
    write_atomically(folder / DESCRIPTION, (json.dumps(content, indent=2) + "\n").encode())
    write_atomically(folder / WEIGHTS, weights)


def load_checkpoint(folder: str | Path, kind: str = KIND) -> tuple[dict[str, Tensor], Description]:
    """Read both files of a checkpoint; raises a ValueError that names the file if one is missing or invalid."""
    with opened_checkpoint(folder, kind) as content:
        return content


@contextmanager
def opened_checkpoint(folder: str | Path, kind: str = KIND) -> Iterator[tuple[dict[str, Tensor], Description]]:
    """Read both files of a checkpoint. The digest of the weights is computed during the block and checked at its end.

    Building a model takes longer than hashing its weights in another thread, so the check takes hardly any time where a
    core is free. The file is read once: what is hashed is what is used.
    """
    folder = Path(folder)
    description = _read_description(folder)
    found = description.get("kind")
    if not isinstance(found, str) or not found.startswith(KIND):
        raise ValueError(f"{folder / DESCRIPTION}: not the description of a {KIND} checkpoint")
    if found != kind:
        names = [each.removeprefix(KIND).strip() or "model" for each in (found, kind)]
        raise ValueError(f"{folder}: a checkpoint of kind {names[0]!r}, but kind {names[1]!r} is needed")
    version = description.get("format")
    if not isinstance(version, int) or version > FORMAT:
        raise ValueError(
            f"{folder / DESCRIPTION}: checkpoint format {version} is not supported, expected at most {FORMAT}; "
            "upgrade trajectory-transformer"
        )
    _check_exists(folder / WEIGHTS)
    content = (folder / WEIGHTS).read_bytes()
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(lambda: hashlib.sha256(content).hexdigest())
        with naming(folder / WEIGHTS, _BROKEN, SafetensorError, TypeError, KeyError, RuntimeError):
            tensors = from_safetensors(content)
        if version < 2:
            old, new = "gpt.context_encoder.", "gpt.map_encoder."
            tensors = {name.replace(old, new): value for name, value in tensors.items()}
        yield tensors, description
        _check_digest(folder, description, digest.result())


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing; a checkpoint folder needs {WEIGHTS} and {DESCRIPTION}")


def _check_digest(folder: Path, description: Mapping[str, Any], found: str) -> None:
    """Refuse weights that are not those that the description belongs to."""
    if DIGEST not in description:
        log.warning("%s: no SHA-256 of the weights is stored, so they cannot be checked for damage", folder)
        return
    # Training may have written both files between our two reads.
    if not _is_known(found, description) and not _is_known(found, _read_description(folder)):
        raise ValueError(
            f"{folder / WEIGHTS}: the file is damaged or belongs to another checkpoint: its SHA-256 {found[:16]}... is "
            f"not the one in {folder / DESCRIPTION}"
        )


def _is_known(digest: str, description: Mapping[str, Any]) -> bool:
    known = description.get(DIGEST)
    return isinstance(known, list) and digest in known


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not finite."""
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    # One number of the whole model in place of one per weight: a sum is finite only if all its terms are.
    sums = [value.sum(dtype=torch.float32) for value in floats.values()]
    if not sums or bool(torch.stack(sums).isfinite().all()):
        return
    for name, value in floats.items():  # the sum of finite weights may be infinite
        if not value.isfinite().all():
            raise ValueError(f"{name} has NaN or infinite values")


def check_stored(tensors: Mapping[str, Tensor], *, layers: int, numbers: int) -> None:
    """Refuse a description of more layers, or of more weights, than were stored: sizes are checked before building."""
    stored = sum(prod(tensor.shape) for tensor in tensors.values())
    if layers > len(tensors) or numbers > stored:
        raise ValueError(
            f"the description has {layers} layers of {numbers:,} numbers, the weights hold {len(tensors)} tensors of "
            f"{stored:,} numbers"
        )


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
    description = read_json(path)
    if not isinstance(description, dict):
        raise ValueError(f"{path}: not the description of a {KIND} checkpoint")
    return description


def layout_fields(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a stored `TokenLayout`; format 1 called the shape of maps `context_shape`."""
    return {"map_shape" if name == "context_shape" else name: value for name, value in stored.items()}


def token_config_from(stored: Mapping[str, Any]) -> TokenConfig:
    """Token settings from JSON; those of format 1 that only mattered while training become one switch."""
    known = stored
    if isinstance(stored, dict) and stored.get("loss_mask") is not None:
        old = ("loss_mask", "bin_value", "final_observation", "max_episode_steps")
        known = {name: value for name, value in stored.items() if name not in old}
        known["authors_conventions"] = stored["loss_mask"] == "input"
    if isinstance(known, dict):
        known = {"truncated": "stop"} | known  # the default of earlier versions
    return settings_from(TokenConfig, known, "tokens")


def model_config_from(stored: Mapping[str, Any]) -> ModelConfig:
    """Model settings from JSON; format 1 called `map_channels` `context_channels`."""
    if isinstance(stored, dict):
        stored = {"map_channels" if name == "context_channels" else name: value for name, value in stored.items()}
    return settings_from(ModelConfig, stored, "model")
