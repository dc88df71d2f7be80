"""`tt evaluate`: let a trained model plan in its environment and measure how it does."""

import json
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from trajectory_transformer.cli.console import claim, console, device_of, metrics_table, progress_bar
from trajectory_transformer.cli.train import TRAINING
from trajectory_transformer.config import PresetName, SearchConfig, require
from trajectory_transformer.data.episode import Dataset, Episode, save_npz
from trajectory_transformer.data.scores import references_of
from trajectory_transformer.data.spaces import action_leaf
from trajectory_transformer.evaluate import check_fit, episode_metrics, latency_metrics
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import PlanningPolicy, PlanTrace
from trajectory_transformer.report.traces import save_traces
from trajectory_transformer.report.video import record_video, video_writer
from trajectory_transformer.results import write_result
from trajectory_transformer.rollout import make_envs, map_shape, rollout, space_dims
from trajectory_transformer.search.beam import Objective
from trajectory_transformer.search.objectives import discounted_return

PlanKind = Literal["return", "imitate", "goal"]


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Plan with a trained model in an environment and measure returns, success and what it reports of one."""

    positional: ClassVar[dict[str, str]] = {"run": "The run folder that `tt train` wrote."}

    run: str | None = None
    """The run folder that `tt train` wrote."""
    env: str | None = None
    """Gymnasium id; null: the environment the dataset came from."""
    env_options: dict[str, Any] | None = None
    """Arguments for the environment's constructor; null: those that the dataset's was made with, if it is the same."""
    plan: PlanKind | None = None
    """What to plan for; null: a goal if the model has one, else return if it has rewards, else imitation."""
    episodes: int = 100
    """Episodes to play."""
    num_envs: int = 50
    """Environments planned for at once."""
    seed: int = 1_000_000
    """Episode i is reset with seed + i; the default keeps clear of the seeds that data is collected with."""
    out: Path | None = None
    """The result file to write; must not exist. null: evaluation.json in the run folder."""
    trace: Path | None = None
    """Also store every plan (prompts, kept candidates, predicted states) in this .npz file."""
    video: Path | None = None
    """Also play one more episode, with the first seed, and record it: a .gif, or .mp4 with the video extra."""
    preset: PresetName = "default"
    """Set of defaults for the search; flags override it."""
    device: str = "auto"
    """auto, cpu or cuda."""
    search: SearchConfig = field(default_factory=SearchConfig)

    def execute(self) -> list[Episode]:
        """Play and write the result; the episodes go beside it."""
        require(self.episodes >= 1, "--episodes must be at least 1", self.episodes)
        require(self.num_envs >= 1, "--num_envs must be at least 1", self.num_envs)
        require(self.seed >= 0, "--seed must not be negative", self.seed)
        if self.run is None:
            raise ValueError("name the run folder to evaluate, for example: runs/train")
        device = device_of(self.device)
        model = TrajectoryModel.load(Path(self.run), device)
        env_id = self.env or model.metadata.get("env")
        if not isinstance(env_id, str):
            raise ValueError("the dataset of this run names no environment: give one with --env")
        options = self._env_options(model, env_id)
        kind = self.plan or _default_plan(model)
        traces: list[PlanTrace] = []
        policy = PlanningPolicy(
            model,
            self.search,
            objective_of(kind, model, self.search),
            seed=self.seed,
            on_plan=traces.append if self.trace else None,
        )
        out = self.out or Path(self.run) / "evaluation.json"
        played = out.with_suffix(".npz")
        if self.video is not None:
            video_writer(self.video)  # a missing package is found out before anything is played
        started = time.perf_counter()
        envs = make_envs(env_id, min(self.num_envs, self.episodes), options)
        try:
            check_fit(model, env_id, space_dims(envs), map_shape(envs))
            if any(action_leaf(envs.single_action_space).categories):
                _refuse_medians(self.search, env_id)
            for path in (out, played, self.trace, self.video):
                if path is not None:
                    claim(path)
            with _counting(self.episodes) as count:
                episodes = rollout(envs, policy, num_episodes=self.episodes, seed=self.seed, on_episode=count)
        finally:
            envs.close()
        seconds = time.perf_counter() - started
        metrics = episode_metrics(episodes, references_of(env_id, model.metadata)) | latency_metrics(
            policy.plan_seconds
        )
        origin = {"env": env_id, **({"env_options": json.dumps(options)} if options else {})}
        save_npz(Dataset(tuple(episodes), {**origin, "seed": self.seed, "policy": f"planner, {kind}"}), played)
        write_result(
            out,
            name=f"evaluate {env_id} {kind}",
            command=self._command(env_id, kind, options),
            device=device,
            seeds=[self.seed + index for index in range(self.episodes)],
            seconds=seconds,
            metrics=metrics,
            details={
                "settings": {**origin, "plan": kind, "num_envs": self.num_envs, "search": asdict(self.search)},
                "returns": [episode.total_reward for episode in episodes],
                **_training(Path(self.run)),
            },
        )
        written = [out, played]
        if self.trace is not None:
            save_traces(self.trace, traces, model)
            written.append(self.trace)
        if self.video is not None:
            record_video(self.video, env_id, policy, seed=self.seed, env_options=options)
            written.append(self.video)
        console.print(
            metrics_table(f"{env_id}, planning for {kind}, {self.episodes} episodes in {seconds:.0f} s", metrics)
        )
        console.print(f"wrote {', '.join(map(str, written))}")
        return episodes

    def _env_options(self, model: TrajectoryModel, env_id: str) -> dict[str, Any]:
        if self.env_options is not None:
            return self.env_options
        same = env_id == model.metadata.get("env")
        options: dict[str, Any] = json.loads(str(model.metadata.get("env_options", "{}"))) if same else {}
        if not isinstance(options, dict):
            raise ValueError(f"env_options in the metadata of this run must be a mapping, got {options!r}")
        return options

    def _command(self, env_id: str, kind: str, options: dict[str, Any]) -> str:
        """The words that repeat this evaluation."""
        words = f"tt evaluate {self.run} --env {env_id}"
        words += f" --env_options {shlex.quote(json.dumps(options))}" if options else ""
        words += f" --plan {kind} --episodes {self.episodes} --seed {self.seed}"
        changed = [(key, value) for key, value in asdict(self.search).items() if value != getattr(SearchConfig(), key)]
        return words + "".join(f" --search.{key} {'null' if value is None else value}" for key, value in changed)


def _training(run: Path) -> dict[str, object]:
    """How the run was trained: command, device and time, where they were written down."""
    path = run / TRAINING
    if not path.is_file():
        return {}
    known = json.loads(path.read_text())
    return {"training": {name: known[name] for name in ("command", "commit", "device", "seconds", "metrics")}}


def objective_of(kind: PlanKind, model: TrajectoryModel, config: SearchConfig) -> Objective | None:
    """What candidates are ranked by; None for the most likely continuation."""
    if kind == "goal" and not model.layout.goal_dim:
        raise ValueError("--plan goal needs a model with a goal: train with --tokens.goal_dims")
    if kind != "return":
        return None
    if not model.layout.rewards:
        raise ValueError("--plan return needs a model with rewards: this run was trained with --tokens.rewards false")
    discount = model.tokens.discount if config.discount is None else config.discount
    return discounted_return(discount, value_includes_reward=model.tokens.value_includes_reward)


def _refuse_medians(config: SearchConfig, env_id: str) -> None:
    """Categories have no order, so nothing is in their middle."""
    usual = SearchConfig()
    for name in ("imitate", "action_middle"):
        found, default = getattr(config, name), getattr(usual, name)
        if found != default:
            raise ValueError(
                f"search.{name} {found} is for numbers, the actions of {env_id} are categories: "
                f"leave it at {default or 'null'}"
            )


def _default_plan(model: TrajectoryModel) -> PlanKind:
    if model.layout.goal_dim:
        return "goal"
    return "return" if model.layout.rewards else "imitate"


@contextmanager
def _counting(episodes: int) -> Iterator[Callable[[Episode], None]]:
    """A bar that counts finished episodes and shows their mean return."""
    with progress_bar("mean") as bar:
        task = bar.add_task("evaluating", total=episodes, mean="")
        returns: list[float] = []

        def count(episode: Episode) -> None:
            returns.append(episode.total_reward)
            bar.update(task, advance=1, mean=f"mean return {sum(returns) / len(returns):.4g}")

        yield count
