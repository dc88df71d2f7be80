"""`tt evaluate`: let a trained model plan in its environment and measure how it does."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from trajectory_transformer.cli.console import claim, console, device_of, metrics_table, progress_bar
from trajectory_transformer.config import PlanConfig, require
from trajectory_transformer.data.episode import Dataset, Episode, save_npz
from trajectory_transformer.evaluate import check_fit, episode_metrics
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.policies import PlanningPolicy
from trajectory_transformer.results import write_result
from trajectory_transformer.rollout import make_envs, rollout, space_dims


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Plan with a trained model in an environment and measure returns, success and whatever it reports."""

    positional: ClassVar[dict[str, str]] = {"run": "The run folder that `tt train` wrote."}

    run: str | None = None
    """The run folder that `tt train` wrote."""
    env: str | None = None
    """Gymnasium id; null: the environment the dataset came from."""
    episodes: int = 100
    """Episodes to play."""
    num_envs: int = 50
    """Environments planned for at once."""
    seed: int = 1_000_000
    """Episode i is reset with seed + i; the default keeps clear of the seeds that data is collected with."""
    out: Path | None = None
    """The result file to write; must not exist. null: evaluation.json in the run folder."""
    preset: Literal["default", "paper", "reference"] = "default"
    """Set of defaults for the search; flags override it."""
    device: str = "auto"
    """auto, cpu or cuda."""
    search: PlanConfig = field(default_factory=PlanConfig)

    def execute(self) -> list[Episode]:
        """Play and write the result; the episodes go beside it."""
        require(self.episodes >= 1, "--episodes must be at least 1", self.episodes)
        require(self.num_envs >= 1, "--num_envs must be at least 1", self.num_envs)
        if self.run is None:
            raise ValueError("name the run folder to evaluate, for example: runs/train")
        device = device_of(self.device)
        model = TrajectoryModel.load(Path(self.run), device)
        env_id = self.env or model.metadata.get("env")
        if not isinstance(env_id, str):
            raise ValueError("the dataset of this run names no environment: give one with --env")
        out = self.out or Path(self.run) / "evaluation.json"
        routes = out.with_suffix(".npz")
        policy = PlanningPolicy(model, self.search)
        started = time.perf_counter()
        envs = make_envs(env_id, min(self.num_envs, self.episodes))
        try:
            check_fit(model, env_id, space_dims(envs))
            claim(out)
            claim(routes)
            with progress_bar() as bar:
                task = bar.add_task("evaluating", total=self.episodes)

                def count(episode: Episode) -> None:
                    del episode
                    bar.advance(task)

                episodes = rollout(envs, policy, num_episodes=self.episodes, seed=self.seed, on_episode=count)
        finally:
            envs.close()
        seconds = time.perf_counter() - started
        metrics = episode_metrics(episodes)
        save_npz(Dataset(tuple(episodes), {"env": env_id, "seed": self.seed, "policy": "planner"}), routes)
        write_result(
            out,
            name=f"evaluate {env_id}",
            command=self._command(env_id),
            device=device,
            seeds=[self.seed + index for index in range(self.episodes)],
            seconds=seconds,
            metrics=metrics,
            details={"settings": {"env": env_id, "num_envs": self.num_envs, "search": asdict(self.search)}},
        )
        console.print(metrics_table(f"{env_id}, {self.episodes} episodes in {seconds:.0f} s", metrics))
        console.print(f"wrote {out} and {routes}")
        return episodes

    def _command(self, env_id: str) -> str:
        """The words that repeat this evaluation."""
        words = f"tt evaluate {self.run} --env {env_id} --episodes {self.episodes} --seed {self.seed}"
        changed = [(key, value) for key, value in asdict(self.search).items() if value != getattr(PlanConfig(), key)]
        return words + "".join(f" --search.{key} {value}" for key, value in changed)
