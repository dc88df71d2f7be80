"""`tt view`: look at a run in the browser."""

import webbrowser
from dataclasses import dataclass, field
from typing import ClassVar

from trajectory_transformer.cli.console import console
from trajectory_transformer.cli.parser import changed_flags
from trajectory_transformer.config import PresetName, SearchConfig, require


@dataclass(frozen=True, kw_only=True)
class View:
    """Open a local page with the plans, forecasts, attention and data of a run."""

    positional: ClassVar[dict[str, str]] = {
        "run": "Run folder that `tt train` wrote, or the name of a model of this package."
    }
    required: ClassVar[tuple[str, ...]] = ("run",)
    examples: ClassVar[tuple[str, ...]] = (
        "tt view runs/demo",
        "tt view runs/hopper --dataset data/hopper.npz --browser false",
    )

    run: str | None = None
    """Run folder that `tt train` wrote, or the name of a model of this package."""
    env: str | None = None
    """Gymnasium id; null: the environment that the dataset came from."""
    dataset: str | None = None
    """Recorded episodes to look at; null: the training data, or else those that `tt evaluate` played."""
    port: int = 0
    """Port on this machine; 0 takes a free one."""
    browser: bool = True
    """Open the page in the default browser; false only prints its address."""
    preset: PresetName = "default"
    """Defaults of the search settings; flags override them."""
    device: str = "auto"
    """auto, cpu or cuda."""
    trust: bool = False
    """Import the module of an environment module:Id-v0 that the dataset or a --config file names."""
    search: SearchConfig = field(default_factory=SearchConfig)

    def execute(self) -> None:
        """Serve until Ctrl-C."""
        from trajectory_transformer.gpu.backends import find_device
        from trajectory_transformer.pretrained import find_model

        if self.run is None:
            raise ValueError("name the run folder to look at, for example: runs/train")
        require(0 <= self.port <= 65535, "--port must lie in [0, 65535]", self.port)
        try:
            from trajectory_transformer.viewer.server import Viewer
        except ImportError as error:
            raise ImportError("tt view needs: pip install 'trajectory-transformer[view]'") from error
        from trajectory_transformer.viewer.content import load_content

        given = any(flag.startswith(("--search.", "--preset")) for flag in changed_flags(self))
        content = load_content(
            find_model(self.run),
            env=self.env,
            dataset=self.dataset,
            search=self.search if given else None,
            device=find_device(self.device),
            trust=self.trust,
        )
        viewer = Viewer(content, self.port)
        for tab, reason in content.missing.items():
            console.print(f"no {tab}: {reason}", markup=False)
        console.print(f"open {viewer.url} (only this machine can; Ctrl-C ends it)", markup=False)
        if self.browser:
            webbrowser.open(viewer.url)
        try:
            viewer.run()
        finally:
            viewer.stop()
