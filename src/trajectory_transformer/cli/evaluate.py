"""`tt evaluate`: play episodes with a trained model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trajectory_transformer.cli.console import claim, console, metrics_table, progress_bar
from trajectory_transformer.cli.parser import changed_flags, command_line
from trajectory_transformer.config import FIRST_SEED, PresetName, SearchConfig, require
from trajectory_transformer.data.episode import Dataset, Episode, Metadata, save_npz
from trajectory_transformer.data.scores import references_of
from trajectory_transformer.files import file_sha256, lock_folder, naming, read_json
from trajectory_transformer.results import EPISODES, counted, write_result

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress

    from trajectory_transformer.baselines.model import Baseline
    from trajectory_transformer.evaluate import Evaluation
    from trajectory_transformer.model.trajectory_model import TrajectoryModel
    from trajectory_transformer.planner import Planner, PlanTrace
    from trajectory_transformer.rollout import Policy
    from trajectory_transformer.search.beam import Objective

_PLANNING = ("--plan", "--q", "--discount", "--percentile", "--deadline_ms", "--trace", "--preset")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Play episodes with a trained model or baseline and report return, success rate and normalised score."""

    positional: ClassVar[dict[str, str]] = {
        "run": "Run folder that `tt train` or `tt baseline` wrote, or the name of a model of this package."
    }
    required: ClassVar[tuple[str, ...]] = ("run",)
    examples: ClassVar[tuple[str, ...]] = (
        "tt evaluate four-rooms --episodes 20       # a model that comes with the package",
        "tt evaluate runs/hopper --plan return --search.beam_width 32 --video gait.gif --out hopper.json",
    )

    run: str | None = None
    """Run folder that `tt train` or `tt baseline` wrote, or the name of a model of this package."""
    env: str | None = None
    """Gymnasium id, or module:Id-v0 for one that a module registers, also in this folder; null: that of the dataset."""
    env_options: dict[str, Any] | None = None
    """Arguments of the environment's constructor; null: those of the dataset, in its own environment."""
    plan: Literal["return", "imitate", "goal"] | None = None
    """What to plan for; null: a goal if the model has one, else return if it has rewards, else imitation."""
    q: Path | None = None
    """Run folder of a baseline: plan for return by its Q function instead of the predicted return-to-go."""
    discount: float | None = None
    """Discount of rewards along a plan for return; null: as in training (with --q, as in the training of Q)."""
    percentile: float | None = None
    """Rank plans for return by this percentile of predicted rewards and values; null: by their means."""
    deadline_ms: float | None = None
    """Time limit of a plan in milliseconds: a search that would be late becomes narrower or shorter; null: none."""
    episodes: int | None = None
    """Episodes to play; null: 100, but 1, with a smaller search unless flags say otherwise, on a CPU with a model of
    this package whose episodes are long."""
    num_envs: int = 50
    """Environments to play at the same time."""
    training_seed: int | None = None
    """Which training seed of a baseline to play; null: all of them, each with as many episodes. With --q: which
    training seed of it to plan by; null: the first."""
    seed: int = FIRST_SEED
    """Episode i is reset with seed + i. The default is far from the seeds that data is collected with."""
    out: Path | None = None
    """Result file to write; must not exist. null: evaluation.json in the run folder, or NAME-evaluation.json here
    for a model of this package."""
    overwrite: bool = False
    """Replace what exists there."""
    trace: Path | None = None
    """Also store every plan (prompts, kept candidates, predicted states) in this .npz file."""
    video: Path | None = None
    """Also record the longest episode, by its seed and actions, as a video of at least 3 seconds: a .gif, or .mp4 with
    the video extra."""
    preset: PresetName = "default"
    """Defaults of the search settings; flags override them."""
    device: str = "auto"
    """auto, cpu or cuda."""
    trust: bool = False
    """Import the module of an environment module:Id-v0 that the dataset or a --config file names."""
    search: SearchConfig = field(default_factory=SearchConfig)

    def execute(self) -> list[Episode]:
        """Play and write the result; the episodes go to a file beside it."""
        from trajectory_transformer.baselines.model import KIND as BASELINE
        from trajectory_transformer.baselines.model import Baseline
        from trajectory_transformer.checkpoint import checkpoint_kind
        from trajectory_transformer.gpu.backends import find_device
        from trajectory_transformer.model.trajectory_model import TrajectoryModel
        from trajectory_transformer.pretrained import (
            DEFAULT_EPISODES,
            default_episodes,
            find_model,
            is_shipped,
            quick_search,
            read_search,
        )

        if self.run is None:
            raise ValueError("name the run folder to evaluate, for example: runs/train")
        require(self.episodes is None or self.episodes >= 1, "--episodes must be at least 1", self.episodes)
        require(self.num_envs >= 1, "--num_envs must be at least 1", self.num_envs)
        require(self.seed >= 0, "--seed must not be negative", self.seed)
        folder, device = find_model(self.run), find_device(self.device)
        if self.episodes is None:
            chosen, why = default_episodes(folder, device) if is_shipped(self.run) else (DEFAULT_EPISODES, None)
            search, small = self.search, ""
            if why is not None and search == SearchConfig() and self.deadline_ms is None:
                search = quick_search(read_search(folder) or search)
                small = f" with beam {search.beam_width} over {search.horizon} transition"
            if why is not None:
                console.print(f"playing {chosen} episode{small}: {why}; --episodes and --search flags choose others")
            return replace(self, episodes=chosen, search=search).execute()
        suited = read_search(folder) if is_shipped(self.run) and self.search == SearchConfig() else None
        if suited is not None and suited != self.search:
            suiting = replace(self, search=suited)
            flags = changed_flags(suiting, leave_out=[each.name for each in fields(self) if each.name != "search"])
            console.print(f"search settings that come with {self.run}: {' '.join(flags)}")
            return suiting.execute()
        if checkpoint_kind(folder) == BASELINE:
            return self._play_baseline(Baseline.load(folder, device))
        return self._play_planner(TrajectoryModel.load(folder, device))

    @property
    def _num_episodes(self) -> int:
        assert self.episodes is not None, "chosen by execute"
        return self.episodes

    def _written(self) -> list[Path]:
        """The files that the command writes: result, episodes, traces and video."""
        from trajectory_transformer.pretrained import is_shipped

        name = Path(str(self.run))
        default = Path(f"{name}-evaluation.json") if is_shipped(name) else name / "evaluation.json"
        out = self.out or default
        return [path for path in (out, out.with_suffix(".npz"), self.trace, self.video) if path is not None]

    @contextmanager
    def _claimed(self, env_id: str, options: dict[str, Any]) -> Iterator[None]:
        """Refuse outputs that cannot be written, before anything is played; a lock is held until all are written."""
        from trajectory_transformer.report.video import check_video

        if self.video is not None:
            check_video(self.video, env_id, options)
        _training(Path(str(self.run)))  # a damaged file is refused before anything is played
        out, written = self._written()[0], self._written()
        marker = out.with_name(f"{out.name}.unfinished")
        # What an evaluation that was killed has left may be replaced, nothing else.
        left = marker.read_text(errors="replace").splitlines()[1:] if marker.is_file() else []
        claim(*(path for path in written if str(path.absolute()) not in left), overwrite=self.overwrite)
        out.parent.mkdir(parents=True, exist_ok=True)
        existed = [path for path in written if path.exists()]
        lock = lock_folder(out.parent, marker.name, "\n".join(str(path.absolute()) for path in written))
        try:
            yield
        except BaseException:
            if [path for path in written if path.exists()] == existed:
                lock.release()  # nothing is left that another evaluation may replace
            raise
        lock.release()

    def _environment(self, metadata: Metadata) -> tuple[str, dict[str, Any]]:
        """The environment to play in."""
        from trajectory_transformer.evaluate import environment_of

        with naming(Path(str(self.run)), "no environment to play in"):
            return environment_of(metadata, self.env, self.env_options, trust=self.trust)

    def _play_planner(self, model: "TrajectoryModel") -> list[Episode]:
        """Plan with a model."""
        from trajectory_transformer.planner import Planner
        from trajectory_transformer.report.traces import save_traces

        if self.training_seed is not None and self.q is None:
            raise ValueError(f"--training_seed is for baselines, and {self.run} is not one")
        objective = None if self.q is None else self._objective(model, self.q)
        env_id, options = self._environment(model.metadata)
        traces: list[PlanTrace] = []
        planner = Planner(
            model,
            kind=None if objective else self.plan,
            objective=objective,
            discount=None if objective else self.discount,
            percentile=self.percentile,
            search=self.search,
            seed=self.seed,
            on_plan=traces.append if self.trace else None,
            deadline_ms=self.deadline_ms,
        )
        with self._claimed(env_id, options):
            with _counting(self._num_episodes) as counter:
                found = self._evaluate(planner, env_id, options, counter)
            kind = planner.kind or "return"
            guide = {} if self.q is None else {"q": str(self.q), **_training(self.q, "q_training")}
            self._write(
                found,
                what=kind,
                policy=f"planner, {kind}" + (f" by the Q function of {self.q}" if self.q else ""),
                device=model.device,
                settings={"plan": kind, "num_envs": self.num_envs, "search": asdict(planner.search), **guide},
            )
            if self.trace is not None:
                save_traces(self.trace, traces, model.tokenizer)
            self._film(found)
        self._show(found, f"planning for {kind}" + (f" by {self.q}" if self.q else ""))
        self._update_page(model)
        return list(found.episodes)

    def _objective(self, model: "TrajectoryModel", run: Path) -> "Objective":
        """Plan by the Q function of a baseline."""
        from trajectory_transformer.baselines.model import KIND as BASELINE
        from trajectory_transformer.baselines.model import Baseline
        from trajectory_transformer.checkpoint import checkpoint_kind

        if self.plan not in (None, "return"):
            raise ValueError(f"--q is for planning for return, not for {self.plan}")
        if checkpoint_kind(str(run)) != BASELINE:
            raise ValueError(f"--q {run}: not a run of tt baseline; train one with: tt baseline DATA --algorithm iql")
        try:
            baseline = Baseline.load(run, model.device)
            return baseline.objective(model, seed=self.training_seed, discount=self.discount)
        except ValueError as error:
            raise ValueError(f"--q {run}: {error}") from error

    def _play_baseline(self, baseline: "Baseline") -> list[Episode]:
        """Play the policies of a baseline, one training seed after the other."""
        from trajectory_transformer.baselines.presets import settings_dict
        from trajectory_transformer.evaluate import Evaluation, episode_metrics, latency_metrics

        given = [flag for flag in changed_flags(self) if flag.startswith(("--search.", *_PLANNING))]
        if given:
            raise ValueError(f"{self.run} is a baseline, which does not plan: leave out {given[0]}")
        seeds = baseline.seeds if self.training_seed is None else (self.training_seed,)
        policies = [baseline.policy(seed) for seed in seeds]
        env_id, options = self._environment(baseline.metadata)
        with self._claimed(env_id, options):
            with _counting(self._num_episodes * len(seeds)) as counter:
                parts = [self._evaluate(policy, env_id, options, counter) for policy in policies]
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
            self._film(found)
        self._show(found, f"{baseline.name}, {counted(len(seeds), 'training seed')}")
        self._update_page(None)
        return list(episodes)

    def _evaluate(
        self, planner: "Planner | Policy", env_id: str, options: dict[str, Any], counter: "_Counter"
    ) -> "Evaluation":
        from trajectory_transformer.evaluate import evaluate

        # What the metadata of a run names may not exist.
        with nullcontext() if self.env is not None else naming(str(self.run), f"{env_id} cannot be played"):
            return evaluate(
                planner,
                env_id,
                episodes=self._num_episodes,
                num_envs=self.num_envs,
                seed=self.seed,
                env_options=options,
                on_episode=counter.episode,
                on_step=counter.step,
            )

    def _write(
        self,
        found: "Evaluation",
        *,
        what: str,
        policy: str,
        device: "torch.device",
        settings: dict[str, object],
        by_seed: dict[str, dict[str, float]] | None = None,
    ) -> None:
        """Write the result and the episodes."""
        from trajectory_transformer.pretrained import find_model

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
                leave_out=("out", "trace", "video", "preset", "device", "num_envs", "overwrite", "trust"),
                env=found.env,
                env_options=options if options or self.env_options is not None else None,
                **({"plan": what} if by_seed is None else {}),
            ),
            device=device,
            seeds=[self.seed + index for index in range(self._num_episodes)],
            seconds=found.seconds,
            metrics=found.metrics,
            details={
                "settings": {**origin, **settings},
                "returns": [episode.total_reward for episode in found.episodes],
                EPISODES: file_sha256(played),
                **({} if by_seed is None else {"by_training_seed": by_seed}),
                **_training(find_model(str(self.run))),
            },
        )

    def _film(self, found: "Evaluation") -> None:
        """Record the longest episode."""
        from trajectory_transformer.report.video import record_video

        if self.video is None:
            return
        lengths = [len(episode) for episode in found.episodes[: self._num_episodes]]
        longest = lengths.index(max(lengths))
        with progress_bar() as bar:
            task = bar.add_task(f"recording episode {longest}, the longest", total=max(lengths))
            record_video(
                self.video,
                found.env,
                found.episodes[longest],
                seed=self.seed + longest,
                env_options=found.env_options,
                on_step=lambda: bar.advance(task),
            )

    def _show(self, found: "Evaluation", what: str) -> None:
        title = f"{found.env}, {what}, {counted(len(found.episodes), 'episode')} in {found.seconds:.0f} s"
        console.print(metrics_table(title, found.metrics))
        console.print(f"wrote {', '.join(map(str, self._written()))}")

    def _update_page(self, model: "TrajectoryModel | None") -> None:
        """Write the page of the run again, if its folder got the result."""
        from trajectory_transformer.report.page import write_report

        run = Path(str(self.run))
        if self._written()[0].resolve().parent == run.resolve():
            console.print(f"wrote {write_report(run, models=[model])}")


def _training(run: Path, name: str = "training") -> dict[str, object]:
    """How the run was trained: command, device and time, if the run folder says so."""
    from trajectory_transformer.runs import TRAINING

    path = run / TRAINING
    if not path.is_file():
        return {}
    with naming(path, "not the result of a training run", KeyError, TypeError):
        known = read_json(path)
        return {name: {key: known[key] for key in ("command", "commit", "device", "seconds", "metrics")}}


class _Counter:
    """Shows steps, finished episodes and their mean return on a progress bar."""

    def __init__(self, bar: "Progress", episodes: int) -> None:
        self._bar, self._task = bar, bar.add_task("evaluating", total=episodes, steps="", mean="")
        self.steps = 0
        self._returns: list[float] = []

    def step(self, count: int) -> None:
        self.steps += count
        self._bar.update(self._task, steps=f"{self.steps:,} steps")

    def episode(self, episode: Episode) -> None:
        self._returns.append(episode.total_reward)
        mean = sum(self._returns) / len(self._returns)
        self._bar.update(self._task, advance=1, mean=f"mean return {mean:.4g}")


@contextmanager
def _counting(episodes: int) -> Iterator[_Counter]:
    """A progress bar of steps and episodes."""
    with progress_bar("steps", "mean") as bar:
        counter = _Counter(bar, episodes)
        try:
            yield counter
        except ValueError:
            if not counter.steps:  # nothing was played: show the error alone
                bar.live.transient = True
                bar.live.stop()
                bar.disable = True
            raise
