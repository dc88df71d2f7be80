"""`tt evaluate`: play episodes with a trained model."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from trajectory_transformer.baselines.model import KIND as BASELINE
from trajectory_transformer.baselines.model import Baseline
from trajectory_transformer.baselines.presets import settings_dict
from trajectory_transformer.checkpoint import checkpoint_kind
from trajectory_transformer.cli.console import claim, console, metrics_table, progress_bar
from trajectory_transformer.cli.parser import changed_flags, command_line
from trajectory_transformer.config import PresetName, SearchConfig
from trajectory_transformer.data.episode import Dataset, Episode, save_npz
from trajectory_transformer.data.scores import references_of
from trajectory_transformer.evaluate import (
    FIRST_SEED,
    Evaluation,
    environment_of,
    episode_metrics,
    evaluate,
    latency_metrics,
)
from trajectory_transformer.gpu.backends import find_device
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import PlanKind, Planner, PlanTrace
from trajectory_transformer.report.page import write_report
from trajectory_transformer.report.traces import save_traces
from trajectory_transformer.report.video import record_video, video_writer
from trajectory_transformer.results import write_result
from trajectory_transformer.rollout import Policy
from trajectory_transformer.runs import TRAINING

_PLANNING = ("--plan", "--discount", "--percentile", "--trace", "--preset")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Play episodes with a trained model or baseline and report return, success rate and normalised score."""

    positional: ClassVar[dict[str, str]] = {"run": "Run folder that `tt train` or `tt baseline` wrote."}

    run: str | None = None
    """Run folder that `tt train` or `tt baseline` wrote."""
    env: str | None = None
    """Gymnasium id; null: the environment that the dataset came from."""
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
    training_seed: int | None = None
    """Which training seed of a baseline to play; null: all of them, each with as many episodes."""
    seed: int = FIRST_SEED
    """Episode i is reset with seed + i. The default is far from the seeds that data is collected with."""
    out: Path | None = None
    """Result file to write; must not exist. null: evaluation.json in the run folder."""
    trace: Path | None = None
    """Also store every plan (prompts, kept candidates, predicted states) in this .npz file."""
    video: Path | None = None
    """Also record one more episode with the first seed: a .gif, or .mp4 with the video extra."""
    preset: PresetName = "default"
    """Defaults of the search settings; flags override them."""
    device: str = "auto"
    """auto, cpu or cuda."""
    search: SearchConfig = field(default_factory=SearchConfig)

    def execute(self) -> list[Episode]:
        """Play and write the result; the episodes go to a file beside it."""
        if self.run is None:
            raise ValueError("name the run folder to evaluate, for example: runs/train")
        if self.video is not None:
            video_writer(self.video)  # a missing package is reported before anything is played
        for path in self._written():
            claim(path)
        device = find_device(self.device)
        if checkpoint_kind(self.run) == BASELINE:
            return self._play_baseline(Baseline.load(self.run, device))
        return self._play_planner(TrajectoryModel.load(self.run, device))

    def _written(self) -> list[Path]:
        """The files that the command writes: result, episodes, traces and video."""
        out = self.out or Path(str(self.run)) / "evaluation.json"
        return [path for path in (out, out.with_suffix(".npz"), self.trace, self.video) if path is not None]

    def _play_planner(self, model: TrajectoryModel) -> list[Episode]:
        """Plan with a model."""
        if self.training_seed is not None:
            raise ValueError(f"--training_seed is for baselines, and {self.run} is not one")
        env_id, options = environment_of(model.metadata, self.env, self.env_options)
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
        with _counting(self.episodes) as count:
            found = self._evaluate(planner, env_id, options, count)
        self._write(
            found,
            what=str(planner.kind),
            policy=f"planner, {planner.kind}",
            device=model.device,
            settings={"plan": planner.kind, "num_envs": self.num_envs, "search": asdict(self.search)},
        )
        if self.trace is not None:
            save_traces(self.trace, traces, model.tokenizer)
        if self.video is not None:
            record_video(self.video, env_id, planner.policy(), seed=self.seed, env_options=options)
        self._show(found, f"planning for {planner.kind}")
        self._update_page(model)
        return list(found.episodes)

    def _play_baseline(self, baseline: Baseline) -> list[Episode]:
        """Play the policies of a baseline, one training seed after the other."""
        given = [flag for flag in changed_flags(self) if flag.startswith(("--search.", *_PLANNING))]
        if given:
            raise ValueError(f"{self.run} is a baseline, which does not plan: leave out {given[0]}")
        seeds = baseline.seeds if self.training_seed is None else (self.training_seed,)
        policies = [baseline.policy(seed) for seed in seeds]
        env_id, options = environment_of(baseline.metadata, self.env, self.env_options)
        with _counting(self.episodes * len(seeds)) as count:
            parts = [self._evaluate(policy, env_id, options, count) for policy in policies]
        episodes = tuple(episode for part in parts for episode in part.episodes)
        metrics = episode_metrics(episodes, references_of(env_id, baseline.metadata))
        metrics |= latency_metrics([seconds for policy in policies for seconds in policy.plan_seconds])
        found = Evaluation(env_id, options, episodes, metrics, sum(part.seconds for part in parts))
        self._write(
            found,
            what=baseline.name,
            policy=f"{baseline.name}, training seeds {', '.join(map(str, seeds))}",
            device=baseline.device,
            settings={
                "algorithm": baseline.name,
                "training_seeds": list(seeds),
                "num_envs": self.num_envs,
                "settings": settings_dict(baseline.algorithm.settings),
            },
            by_seed={str(seed): part.metrics for seed, part in zip(seeds, parts, strict=True)},
        )
        if self.video is not None:
            record_video(self.video, env_id, policies[0], seed=self.seed, env_options=options)
        seeds_text = f"{len(seeds)} training seed{'' if len(seeds) == 1 else 's'}"
        self._show(found, f"{baseline.name}, {seeds_text}")
        self._update_page(None)
        return list(episodes)

    def _evaluate(
        self, planner: Planner | Policy, env_id: str, options: dict[str, Any], count: Callable[[Episode], None]
    ) -> Evaluation:
        return evaluate(
            planner,
            env_id,
            episodes=self.episodes,
            num_envs=self.num_envs,
            seed=self.seed,
            env_options=options,
            on_episode=count,
        )

    def _write(
        self,
        found: Evaluation,
        *,
        what: str,
        policy: str,
        device: torch.device,
        settings: dict[str, object],
        by_seed: dict[str, dict[str, float]] | None = None,
    ) -> None:
        """Write the result and the episodes."""
        out, played = self._written()[:2]
        options = dict(found.env_options)
        origin = {"env": found.env, **({"env_options": json.dumps(options)} if options else {})}
        save_npz(Dataset(found.episodes, {**origin, "seed": self.seed, "policy": policy}), played)
        write_result(
            out,
            name=f"evaluate {found.env} {what}",
            command=command_line(
                "evaluate",
                self,
                leave_out=("out", "trace", "video", "preset", "device", "num_envs"),
                env=found.env,
                env_options=options if options or self.env_options is not None else None,
                **({"plan": what} if by_seed is None else {}),
            ),
            device=device,
            seeds=[self.seed + index for index in range(self.episodes)],
            seconds=found.seconds,
            metrics=found.metrics,
            details={
                "settings": {**origin, **settings},
                "returns": [episode.total_reward for episode in found.episodes],
                **({} if by_seed is None else {"by_training_seed": by_seed}),
                **_training(Path(str(self.run))),
            },
        )

    def _show(self, found: Evaluation, what: str) -> None:
        title = f"{found.env}, {what}, {len(found.episodes)} episodes in {found.seconds:.0f} s"
        console.print(metrics_table(title, found.metrics))
        console.print(f"wrote {', '.join(map(str, self._written()))}")

    def _update_page(self, model: TrajectoryModel | None) -> None:
        """Write the page of the run again, if its folder got the result."""
        run = Path(str(self.run))
        if self._written()[0].resolve().parent == run.resolve():
            console.print(f"wrote {write_report(run, models=[model])}")


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
