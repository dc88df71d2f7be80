"""What a viewer shows of a run: its model, environment and episodes, and why a tab is missing."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from trajectory_transformer.baselines.model import KIND as BASELINE
from trajectory_transformer.checkpoint import checkpoint_kind
from trajectory_transformer.config import SearchConfig
from trajectory_transformer.data.episode import Dataset, load_npz
from trajectory_transformer.data.sources import load_dataset
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import Planner
from trajectory_transformer.runs.settings import RUN, RunSettings
from trajectory_transformer.viewer.control import make_control_env

TABS = ("Control", "Plan", "Forecast", "Attention", "Data")


@dataclass(frozen=True)
class Content:
    """A run, loaded once and shared by all sessions, which only read it."""

    name: str
    model: TrajectoryModel
    planner: Planner  # with the settings that a session starts with
    env: str | None
    dataset: Dataset | None  # recorded episodes
    missing: dict[str, str] = field(default_factory=dict)  # tab -> why it is missing


def load_content(
    run: str | Path,
    *,
    env: str | None = None,
    dataset: str | None = None,
    search: SearchConfig | None = None,
    device: str | torch.device = "cpu",
    trust: bool = False,
) -> Content:
    """Load a run folder. The episodes are those of `dataset`, else of the training data, else of an evaluation."""
    run = Path(run)
    if not run.is_dir():
        raise ValueError(f"{run}: no such run folder")
    if checkpoint_kind(run) == BASELINE:
        raise ValueError(f"{run} is a baseline, which does not plan; a viewer needs a run of tt train")
    model = TrajectoryModel.load(run, device)
    episodes, reason = _episodes(run, model, dataset)
    missing = {} if episodes is not None else dict.fromkeys(("Forecast", "Attention", "Data"), reason)
    if episodes is not None and model.layout.rewards and not episodes.has_rewards:
        text = "the model reads rewards, and these episodes have none"
        missing |= dict.fromkeys(("Forecast", "Attention"), text)
    env_id = env or model.metadata.get("env")
    try:
        made = make_control_env(model, env, trust=trust)
        made.close()
    except ValueError as error:
        missing["Control"] = str(error)
        env_id = None
    if env_id is None and "Attention" in missing:
        missing["Plan"] = f"there is no state to plan from: {missing['Control']}; {missing['Attention']}"
    planner = Planner(model, search=search or default_search(model))
    return Content(run.resolve().name, model, planner, None if env_id is None else str(env_id), episodes, missing)


def default_search(model: TrajectoryModel) -> SearchConfig:
    """Settings that plan quickly on a CPU."""
    return SearchConfig(beam_width=16, horizon=5, context=min(4, model.gpt.config.window - 1))


def _episodes(run: Path, model: TrajectoryModel, dataset: str | None) -> tuple[Dataset | None, str]:
    """Episodes that fit the model, or why there are none."""
    tried: list[str] = []
    if dataset is not None:
        found = load_dataset(dataset)
        reason = _misfit(model, found)
        if reason:
            raise ValueError(f"{dataset}: {reason}")
        return found, ""
    if (run / RUN).is_file():
        try:
            name = RunSettings.read(run).dataset
            if name is None:
                tried.append("the run was trained on episodes in memory or token shards")
            else:
                found = load_dataset(name)
                reason = _misfit(model, found)
                if not reason:
                    return found, ""
                tried.append(f"{name}: {reason}")
        except (ValueError, OSError, ImportError) as error:
            tried.append(f"its training data cannot be read ({error})")
    if (run / "evaluation.npz").is_file():
        return load_npz(run / "evaluation.npz"), ""
    tried.append("there is no evaluation.npz in the run folder")
    return None, "no recorded episodes: " + "; ".join(tried) + "; name a dataset with --dataset"


def _misfit(model: TrajectoryModel, dataset: Dataset) -> str:
    """Why a dataset does not fit a model; empty if it does."""
    layout = model.layout
    have = (dataset.observation_dim, dataset.action_dim)
    if have != (layout.observation_dim, layout.action_dim):
        return (
            f"it has {have[0]} observation and {have[1]} action dimensions, the model was trained on "
            f"{layout.observation_dim} and {layout.action_dim}"
        )
    if layout.map_shape and dataset.map_shape != layout.map_shape:
        return f"its episodes have {f'maps of shape {dataset.map_shape}' if dataset.map_shape else 'no maps'}"
    return ""
