"""A complete model: tokenizer and GPT, in one checkpoint folder."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trajectory_transformer.checkpoint import (
    layout_fields,
    load_checkpoint,
    model_config_from,
    save_checkpoint,
    token_config_from,
)
from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, MapArray, Metadata, dimension_fields, dimensions_from
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
        tensors, description = load_checkpoint(Path(folder))
        try:
            layout = TokenLayout(**layout_fields(description["layout"]))
            tokens = token_config_from(description["tokens"])
            gpt = GPT(layout, tokens.num_bins, model_config_from(description["model"]))
            names = [name for name in tensors if name.startswith(_DISCRETIZER)]
            discretizer = discretizer_from({name.removeprefix(_DISCRETIZER): tensors.pop(name) for name in names})
            gpt.load_state_dict({name.removeprefix("gpt."): value for name, value in tensors.items()})
            metadata = description["metadata"]
            # Checkpoints of earlier versions do not name the dimensions.
            named = [dimensions_from(kind, description.get("dimensions", {})) for kind in ("observation", "action")]
            if (
                len(tokens.goal_dims) != layout.goal_dim
                or discretizer.num_dims != layout.size
                or discretizer.values.shape != (layout.size, tokens.num_bins)
            ):
                raise ValueError(f"the layout needs {layout.size} slots of {tokens.num_bins} bins")
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{folder}: weights and description do not match ({reason})") from error
        broken = next((name for name, value in gpt.state_dict().items() if not value.isfinite().all()), None)
        if broken is not None:
            raise ValueError(
                f"{folder}: the weights are not finite ({broken} has NaN or infinite values), so it cannot plan; train "
                "again with a lower --train.learning_rate"
            )
        return cls(gpt.to(device).eval(), Tokenizer(layout, discretizer, tokens, *named), metadata)
