"""`tt evaluate`: play episodes with a trained model."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from trajectory_transformer.cli.console import claim, console, metrics_table, progress_bar
from trajectory_transformer.cli.parser import command_line
from trajectory_transformer.config import PresetName, SearchConfig
from trajectory_transformer.data.episode import Dataset, Episode, save_npz
from trajectory_transformer.evaluate import FIRST_SEED, environment_of, evaluate
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import PlanKind, Planner, PlanTrace
from trajectory_transformer.report.traces import save_traces
from trajectory_transformer.report.video import check_video, record_video
from trajectory_transformer.results import write_result
from trajectory_transformer.runs import TRAINING


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Play episodes with a trained model and report return, success rate and normalised score."""

    positional: ClassVar[dict[str, str]] = {"run": "Run folder that `tt train` wrote."}
    required: ClassVar[tuple[str, ...]] = ("run",)
    examples: ClassVar[tuple[str, ...]] = (
        "tt evaluate runs/demo --episodes 20",
        "tt evaluate runs/hopper --plan return --search.beam_width 32 --video gait.gif --out hopper.json",
    )

    run: str | None = None
    """Run folder that `tt train` wrote."""
    env: str | None = None
    """Gymnasium id, or module:Id-v0 for one that a module registers, also in this folder; null: that of the dataset."""
    env_options: dict[str, Any] | None = None
    """Arguments of the environment's constructor; null: those of the dataset, in its own environment."""
    plan: PlanKind | None = None
    """What to plan for; null: a goal if the model has one, else return if it has rewards, else imitation."""
    discount: float | None = None
    """Discount of rewards along a plan for return; null: as in training."""
    percentile: float | None = None
    """Rank plans for return by this percentile of predicted rewards and values; null: by their means."""
    episodes: int = 100
    """Episodes to play."""
    num_envs: int = 50
    """Environments to play at the same time."""
    seed: int = FIRST_SEED
    """Episode i is reset with seed + i. The default is far from the seeds that data is collected with."""
    out: Path | None = None
    """Result file to write; must not exist. null: evaluation.json in the run folder."""
    overwrite: bool = False
    """Replace what exists there."""
    trace: Path | None = None
    """Also store every plan (prompts, kept candidates, predicted states) in this .npz file."""
    video: Path | None = None
    """Also play the longest episode again and record it, as a video of at least 3 seconds: a .gif, or .mp4 with the
    video extra."""
    preset: PresetName = "default"
    """Defaults of the search settings; flags override them."""
    device: str = "auto"
    """auto, cpu or cuda."""
    search: SearchConfig = field(default_factory=SearchConfig)

    def execute(self) -> list[Episode]:
        """Play and write the result; the episodes go to a file beside it."""
        if self.run is None:
            raise ValueError("name the run folder to evaluate, for example: runs/train")
        device = find_device(self.device)
        model = TrajectoryModel.load(self.run, device)
        env_id, options = environment_of(model, self.env, self.env_options)
        traces: list[PlanTrace] = []
        planner = Planner(
            model,
            kind=self.plan,
            discount=self.discount,
            percentile=self.percentile,
            search=self.search,
            seed=self.seed,
            on_plan=traces.append if self.trace else None,
        )
        out = self.out or Path(self.run) / "evaluation.json"
        played = out.with_suffix(".npz")
        if self.video is not None:
            check_video(self.video, env_id, options)  # before anything is played
        written = [path for path in (out, played, self.trace, self.video) if path is not None]
        claim(*written, overwrite=self.overwrite)
        with _counting(self.episodes) as count:
            found = evaluate(
                planner,
                env_id,
                episodes=self.episodes,
                num_envs=self.num_envs,
                seed=self.seed,
                env_options=options,
                on_episode=count,
            )
        origin = {"env": env_id, **({"env_options": json.dumps(options)} if options else {})}
        save_npz(Dataset(found.episodes, {**origin, "seed": self.seed, "policy": f"planner, {planner.kind}"}), played)
        write_result(
            out,
            name=f"evaluate {env_id} {planner.kind}",
            command=command_line(
                "evaluate",
                self,
                leave_out=("out", "trace", "video", "preset", "device", "num_envs", "overwrite"),
                env=env_id,
                env_options=options if options or self.env_options is not None else None,
                plan=planner.kind,
            ),
            device=device,
            seeds=[self.seed + index for index in range(self.episodes)],
            seconds=found.seconds,
            metrics=found.metrics,
            details={
                "settings": {**origin, "plan": planner.kind, "num_envs": self.num_envs, "search": asdict(self.search)},
                "returns": [episode.total_reward for episode in found.episodes],
                **_training(Path(self.run)),
            },
        )
        if self.trace is not None:
            save_traces(self.trace, traces, model.tokenizer)
        if self.video is not None:
            lengths = [len(episode) for episode in found.episodes]
            longest = lengths.index(max(lengths))
            with progress_bar() as bar:
                task = bar.add_task(f"recording episode {longest}, the longest", total=max(lengths) + 1)
                record_video(
                    self.video,
                    env_id,
                    planner.policy(),
                    seed=self.seed + longest,
                    env_options=options,
                    on_frame=lambda: bar.advance(task),
                )
        title = f"{env_id}, planning for {planner.kind}, {self.episodes} episodes in {found.seconds:.0f} s"
        console.print(metrics_table(title, found.metrics))
        console.print(f"wrote {', '.join(map(str, written))}")
        return list(found.episodes)


def _training(run: Path) -> dict[str, object]:
    """How the run was trained: command, device and time, if the run folder says so."""
    path = run / TRAINING
    if not path.is_file():
        return {}
    known = json.loads(path.read_text())
    return {"training": {name: known[name] for name in ("command", "commit", "device", "seconds", "metrics")}}


@contextmanager
def _counting(episodes: int) -> Iterator[Callable[[Episode], None]]:
    """A progress bar that counts finished episodes and shows their mean return."""
    with progress_bar("mean") as bar:
        task = bar.add_task("evaluating", total=episodes, mean="")
        returns: list[float] = []

        def count(episode: Episode) -> None:
            returns.append(episode.total_reward)
            bar.update(task, advance=1, mean=f"mean return {sum(returns) / len(returns):.4g}")

        try:
            yield count
        except ValueError:
            if not returns:  # nothing was played: show the error alone
                bar.live.transient = True
                bar.live.stop()
                bar.disable = True
            raise
