"""`tt import`: turn a model trained by the authors' code into a run folder."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from trajectory_transformer.cli.console import claim, console
from trajectory_transformer.cli.data import DataFlags, load_dataset
from trajectory_transformer.config import PRESETS, require
from trajectory_transformer.data.episode import Metadata
from trajectory_transformer.files import replacing


@dataclass(frozen=True, kw_only=True)
class Import(DataFlags):
    """Convert a state_*.pt file of the authors' code to a run folder that can plan."""

    positional: ClassVar[dict[str, str]] = {"state": "state_*.pt file to read."}
    required: ClassVar[tuple[str, ...]] = ("state", "dataset")
    examples: ClassVar[tuple[str, ...]] = (
        "tt import state_49.pt --dataset hopper_medium-v2.hdf5 --out runs/authors",
        "tt import state_49.pt --dataset hopper-medium --heads 4",
    )

    state: str | None = None
    """state_*.pt file to read."""
    dataset: str | None = None
    """Dataset that the model was trained on; the file holds no discretizer, so it is fitted again."""
    out: Path = Path("runs/import")
    """Run folder to write; must not exist."""
    overwrite: bool = False
    """Replace what exists there."""
    heads: int = 4
    """Attention heads per block, the one size that cannot be read from the file."""

    def execute(self) -> Path:
        """Convert and write; returns the run folder."""
        from trajectory_transformer.model.authors import gpt_from_authors, read_state, sizes_of
        from trajectory_transformer.model.trajectory_model import TrajectoryModel
        from trajectory_transformer.tokens.tokenizer import Tokenizer

        if self.state is None:
            raise ValueError("name the file to import, for example: state_49.pt")
        if self.dataset is None:
            raise ValueError("name the dataset the model was trained on with --dataset: its discretizer is not stored")
        require(self.heads >= 1, "--heads must be at least 1", self.heads)
        claim(self.out, overwrite=self.overwrite)
        state = read_state(Path(self.state))
        dataset = load_dataset(self.dataset, self.reading)
        try:
            _, num_bins, _ = sizes_of(state, self.heads)
            tokens = replace(PRESETS["reference"].tokens, num_bins=num_bins)
            tokenizer = Tokenizer.fit(dataset, tokens)
            gpt = gpt_from_authors(state, tokenizer.layout, self.heads)
        except ValueError as error:
            raise ValueError(f"{self.state}: {error}") from error
        metadata: Metadata = {**dataset.metadata, "imported": Path(self.state).name}
        with replacing(self.out) as temporary:
            TrajectoryModel(gpt, tokenizer, metadata).save(temporary)
        config = gpt.config
        console.print(
            f"read {config.num_layers} layers of width {config.width}, {config.window} transitions of "
            f"{gpt.layout.size} tokens, {num_bins} bins; assuming {config.num_heads} heads"
        )
        console.print(f"wrote {self.out}; try: tt evaluate {self.out} --preset reference")
        return self.out
