"""A complete model: tokenizer and GPT, in one checkpoint folder."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trajectory_transformer.checkpoint import (
    check_finite,
    layout_fields,
    model_config_from,
    opened_checkpoint,
    save_checkpoint,
    token_config_from,
)
from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, MapArray, Metadata, dimension_fields, dimensions_from
from trajectory_transformer.limits import check_memory
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.tokens.discretizer import discretizer_from, discretizer_tensors
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.tokenizer import Tokenizer

_DISCRETIZER = "discretizer."


@dataclass(frozen=True)
class TrajectoryModel:
    """Everything needed to turn observations into plans."""

    gpt: GPT
    tokenizer: Tokenizer
    metadata: Metadata  # of the dataset it was trained on: environment id, origin

    @classmethod
    def create(cls, dataset: Dataset, tokens: TokenConfig, config: ModelConfig, *, seed: int) -> "TrajectoryModel":
        """A model with random weights and a tokenizer fitted on a dataset."""
        return cls.build(Tokenizer.fit(dataset, tokens), config, dataset.metadata, seed=seed)

    @classmethod
    def build(cls, tokenizer: Tokenizer, config: ModelConfig, metadata: Metadata, *, seed: int) -> "TrajectoryModel":
        """A model with random weights for a tokenizer. With `map_channels` 0 it ignores the maps of episodes."""
        if not config.map_channels:
            tokenizer = replace(tokenizer, layout=replace(tokenizer.layout, map_shape=()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            gpt = GPT(tokenizer.layout, tokenizer.config.num_bins, config)
        return cls(gpt.eval(), tokenizer, dict(metadata))

    @property
    def layout(self) -> TokenLayout:
        """The slots of its sequences."""
        return self.tokenizer.layout

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.gpt.position_embedding.device

    def bin_values(self) -> Tensor:
        """What the bins of each slot decode to [D, V], as float32 on the model's device."""
        return torch.from_numpy(self.tokenizer.discretizer.values).float().to(self.device)

    @torch.no_grad()
    def encode_maps(self, maps: MapArray | None) -> Tensor | None:
        """Embeddings of maps: [C, H, W] or [E, C, H, W] -> [E, width]; None for a model without maps."""
        shape = self.layout.map_shape
        if not shape:
            return None
        if maps is None or maps.shape[-3:] != shape:
            found = "none" if maps is None else f"one of shape {maps.shape[-3:]}"
            raise ValueError(f"the model reads a map of shape {shape} for every episode, got {found}")
        return self.gpt.encode_map(torch.from_numpy(maps.reshape(-1, *shape)).to(self.device))

    def save(self, folder: str | Path) -> None:
        """Write the checkpoint folder."""
        tensors: dict[str, Tensor] = {f"gpt.{name}": value for name, value in self.gpt.state_dict().items()}
        bins = discretizer_tensors(self.tokenizer.discretizer)
        tensors |= {_DISCRETIZER + name: value for name, value in bins.items()}
        description = {
            "layout": asdict(self.layout),
            "tokens": asdict(self.tokenizer.config),
            "model": asdict(self.gpt.config),
            "dimensions": dimension_fields(self.tokenizer.observation_dimensions, self.tokenizer.action_dimensions),
            "metadata": dict(self.metadata),
        }
        save_checkpoint(Path(folder), tensors, description)

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> "TrajectoryModel":
        """Read a checkpoint folder; needs neither the dataset nor the environment."""
        with opened_checkpoint(Path(folder)) as (tensors, description):
            try:
                model = cls._from_stored(tensors, description)
            except (KeyError, TypeError, AttributeError, RuntimeError, ValueError, OverflowError) as error:
                reason = str(error).splitlines()[0]
                raise ValueError(f"{folder}: weights and description do not match ({reason})") from error
        try:
            check_finite(model.gpt.state_dict())
        except ValueError as error:
            raise ValueError(
                f"{folder}: the weights are not finite ({error}), so it cannot plan; train again with a lower "
                "--train.learning_rate"
            ) from error
        model.gpt.to(device)
        return model

    @classmethod
    def _from_stored(cls, tensors: dict[str, Tensor], description: Mapping[str, Any]) -> "TrajectoryModel":
        """Build from the parts of a checkpoint; every size is compared with the tensors before anything is built."""
        layout = TokenLayout(**layout_fields(description["layout"]))
        tokens, config = token_config_from(description["tokens"]), model_config_from(description["model"])
        names = [name for name in tensors if name.startswith(_DISCRETIZER)]
        discretizer = discretizer_from({name.removeprefix(_DISCRETIZER): tensors.pop(name) for name in names})
        # Checkpoints of earlier versions do not name the dimensions.
        named = [dimensions_from(kind, description.get("dimensions", {})) for kind in ("observation", "action")]
        if (
            len(tokens.goal_dims) != layout.goal_dim
            or discretizer.num_dims != layout.size
            or discretizer.values.shape != (layout.size, tokens.num_bins)
        ):
            raise ValueError(f"the layout needs {layout.size} slots of {tokens.num_bins} bins")
        if not all(0 <= dim < layout.observation_dim for dim in tokens.goal_dims):
            raise ValueError(f"goal_dims must name observation dimensions, got {list(tokens.goal_dims)}")
        if any(
            dimensions and len(dimensions) != count
            for dimensions, count in zip(named, (layout.observation_dim, layout.action_dim), strict=True)
        ):
            raise ValueError("dimensions must describe every entry of observation and action")
        if not isinstance(description["metadata"], dict):
            raise ValueError(f"metadata must be a mapping, got {description['metadata']!r}")
        _check_sizes(layout, tokens, config, tensors)
        gpt = GPT(layout, tokens.num_bins, config)
        gpt.load_state_dict({name.removeprefix("gpt."): value for name, value in tensors.items()})
        return cls(gpt.eval(), Tokenizer(layout, discretizer, tokens, *named), description["metadata"])


def _check_sizes(layout: TokenLayout, tokens: TokenConfig, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Refuse sizes that the stored tensors do not have."""
    stored = len({name.split(".")[2] for name in tensors if name.startswith("gpt.blocks.")})
    if config.num_layers != stored:
        raise ValueError(f"the description has {config.num_layers} layers, the weights hold {stored}")
    length, width, num_bins = layout.length(config.window) - 1, config.width, tokens.num_bins
    expected: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": ((layout.goal_dim + layout.size) * num_bins + 1, width),
        "position_embedding": (length, width),
        "heads": (layout.size, num_bins + 1, width),
    }
    if layout.map_shape:
        if len(layout.map_shape) != 3 or min(layout.map_shape) < 1 or config.map_channels < 1:
            raise ValueError(f"a map needs a shape [channels, height, width], got {list(layout.map_shape)}")
        planes, height, breadth = layout.map_shape
        places = -(-height // 4) * -(-breadth // 4)
        expected["map_encoder.stem.weight"] = (config.map_channels, planes, 3, 3)
        expected["map_encoder.gather.weight"] = (4 * width, 2 * config.map_channels * places)
    for name, shape in expected.items():
        found = tuple(tensors[f"gpt.{name}"].shape)
        if found != shape:
            raise ValueError(f"{name} must have shape {shape}, got {found}")
    check_memory(length**2, f"the attention mask of {length:,} tokens")  # the one large tensor that is not stored
