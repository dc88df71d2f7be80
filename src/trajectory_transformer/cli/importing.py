"""`tt import`: a model trained by the authors' released code, as a run folder of ours."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from trajectory_transformer.cli.console import claim, console
from trajectory_transformer.cli.data import load_dataset
from trajectory_transformer.config import PRESETS, require
from trajectory_transformer.data.episode import Metadata
from trajectory_transformer.model.authors import gpt_from_authors, read_state, sizes_of
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.tokens.windows import fit_discretizer, layout_of


@dataclass(frozen=True, kw_only=True)
class Import:
    """Turn a state_*.pt of the authors' code into a run folder to plan with."""

    positional: ClassVar[dict[str, str]] = {"state": "The state_*.pt file to read."}

    state: str | None = None
    """The state_*.pt file to read."""
    dataset: str | None = None
    """The dataset it was trained on: the state holds no discretiser, so preset reference fits one again."""
    out: Path = Path("runs/import")
    """The run folder to write; must not exist."""
    heads: int = 4
    """Attention heads of each block; the one size that cannot be read from the file."""

    def execute(self) -> Path:
        """Convert and write; returns the run folder."""
        if self.state is None:
            raise ValueError("name the file to import, for example: state_49.pt")
        if self.dataset is None:
            raise ValueError("name the dataset the model was trained on with --dataset: its discretiser is not stored")
        require(self.heads >= 1, "--heads must be at least 1", self.heads)
        claim(self.out)
        state = read_state(Path(self.state))
        dataset = load_dataset(self.dataset)
        try:
            _, num_bins, _ = sizes_of(state, self.heads)
            tokens = replace(PRESETS["reference"].tokens, num_bins=num_bins)
            gpt = gpt_from_authors(state, layout_of(dataset, tokens), self.heads)
        except ValueError as error:
            raise ValueError(f"{self.state}: {error}") from error
        metadata: Metadata = {**dataset.metadata, "imported": Path(self.state).name}
        TrajectoryModel(gpt, fit_discretizer(dataset, tokens), tokens, metadata).save(self.out)
        config = gpt.config
        console.print(
            f"read {config.num_layers} layers of width {config.width}, {config.window} transitions of "
            f"{gpt.layout.size} tokens, {num_bins} bins; taken to have {config.num_heads} heads"
        )
        console.print(f"wrote {self.out}; try: tt evaluate {self.out} --preset reference")
        return self.out
