"""A model complete in itself: token layout, discretiser and GPT, in one checkpoint folder."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trajectory_transformer.checkpoint import load_checkpoint, save_checkpoint
from trajectory_transformer.config import ModelConfig, TokenConfig
from trajectory_transformer.data.episode import Dataset, MapArray, Metadata
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.tokens.discretizer import Discretizer, discretizer_from, discretizer_tensors
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.windows import fit_discretizer, layout_of

_DISCRETIZER = "discretizer."


@dataclass(frozen=True)
class TrajectoryModel:
    """Everything needed to turn observations into plans."""

    gpt: GPT
    discretizer: Discretizer
    tokens: TokenConfig
    metadata: Metadata  # of the dataset it was trained on: environment id, where it came from

    @classmethod
    def create(cls, dataset: Dataset, tokens: TokenConfig, model: ModelConfig, *, seed: int) -> "TrajectoryModel":
        """A model for a dataset, with random weights."""
        layout = layout_of(dataset, tokens)
        return cls.build(layout, fit_discretizer(dataset, tokens), tokens, model, dict(dataset.metadata), seed=seed)

    @classmethod
    def build(
        cls,
        layout: TokenLayout,
        discretizer: Discretizer,
        tokens: TokenConfig,
        model: ModelConfig,
        metadata: Metadata,
        *,
        seed: int,
    ) -> "TrajectoryModel":
        """A model for tokens that are made already, with random weights; without map channels it reads none."""
        if not model.map_channels:
            layout = replace(layout, map_shape=())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            gpt = GPT(layout, tokens.num_bins, model)
        return cls(gpt.eval(), discretizer, tokens, metadata)

    @property
    def layout(self) -> TokenLayout:
        """The slots of its sequences."""
        return self.gpt.layout

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.gpt.position_embedding.device

    @torch.no_grad()
    def encode_maps(self, maps: MapArray | None) -> Tensor | None:
        """What is added to the tokens: maps [C, H, W] or [E, C, H, W] -> [E, width]; None if it reads none."""
        shape = self.layout.map_shape
        if not shape:
            return None
        if maps is None or maps.shape[-3:] != shape:
            found = "none" if maps is None else f"one of shape {maps.shape[-3:]}"
            raise ValueError(f"the model reads a map of shape {shape} for every episode, got {found}")
        return self.gpt.encode_map(torch.from_numpy(maps.reshape(-1, *shape)).to(self.device))

    def save(self, folder: Path) -> None:
        """Write the checkpoint folder."""
        tensors: dict[str, Tensor] = {f"gpt.{name}": value for name, value in self.gpt.state_dict().items()}
        tensors |= {_DISCRETIZER + name: value for name, value in discretizer_tensors(self.discretizer).items()}
        description = {
            "layout": asdict(self.layout),
            "tokens": asdict(self.tokens),
            "model": asdict(self.gpt.config),
            "metadata": dict(self.metadata),
        }
        save_checkpoint(folder, tensors, description)

    @classmethod
    def load(cls, folder: Path, device: torch.device | None = None) -> "TrajectoryModel":
        """Read a checkpoint folder; needs neither the dataset nor the environment."""
        tensors, description = load_checkpoint(folder)
        try:
            layout = TokenLayout(**description["layout"])
            goal_dims = tuple(description["tokens"].pop("goal_dims"))
            tokens = TokenConfig(goal_dims=goal_dims, **description["tokens"])
            gpt = GPT(layout, tokens.num_bins, ModelConfig(**description["model"]))
            names = [name for name in tensors if name.startswith(_DISCRETIZER)]
            discretizer = discretizer_from({name.removeprefix(_DISCRETIZER): tensors.pop(name) for name in names})
            gpt.load_state_dict({name.removeprefix("gpt."): value for name, value in tensors.items()})
            metadata = description["metadata"]
            bins = (layout.size, tokens.num_bins)
            if (
                len(goal_dims) != layout.goal_dim
                or discretizer.num_dims != layout.size
                or discretizer.values.shape != bins
            ):
                raise ValueError(f"the layout needs {layout.size} slots of {tokens.num_bins} bins")
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{folder}: weights and description do not fit each other ({reason})") from error
        return cls(gpt.to(device or torch.device("cpu")).eval(), discretizer, tokens, metadata)
