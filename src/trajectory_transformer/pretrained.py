"""Trained models to share: a folder with a model card, models of this package by name, and the Hugging Face Hub.

A folder holds the two files of a checkpoint, the search settings that suit the model, the result of its evaluation and
the card. Loading one runs nothing that it names.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml

from trajectory_transformer.checkpoint import DESCRIPTION, WEIGHTS, load_checkpoint, save_checkpoint
from trajectory_transformer.config import SearchConfig
from trajectory_transformer.data.episode import Metadata
from trajectory_transformer.files import settings_from, write_atomically
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.results import counted, two_digits, with_error

SEARCH, CARD, EVALUATION = "search.json", "README.md", "evaluation.json"
DEFAULT_EPISODES = 100
LONG = 200  # steps of an episode; a plan takes a CPU a tenth of a second or more
_SECTIONS = ("layout", "tokens", "model", "dimensions", "metadata")


def shipped_models() -> list[str]:
    """Names of the models that come with this package."""
    folder = files("trajectory_transformer") / "models"
    return sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []


def is_shipped(name: str | Path) -> bool:
    """Whether a name means a model of this package, and not a folder here."""
    return not Path(name).is_dir() and str(name) in shipped_models()


def find_model(name: str | Path) -> Path:
    """The folder of a model: a run folder, or a model of this package by its name."""
    if is_shipped(name):
        return Path(str(files("trajectory_transformer") / "models" / str(name)))
    if not Path(name).is_dir():
        raise ValueError(
            f"{name}: no such checkpoint folder, and not a model of this package, which has "
            f"{', '.join(shipped_models()) or 'none'}"
        )
    return Path(name)


def from_pretrained(name: str | Path, device: str | torch.device = "cpu") -> TrajectoryModel:
    """Load a model: a folder, a model of this package by its name, or one of the Hugging Face Hub as `user/name`.

    Only the files of the format are downloaded from the Hub, and none of them is code.
    """
    if str(name).count("/") == 1 and not Path(name).exists():
        hub, wanted = _hub(), [WEIGHTS, DESCRIPTION, SEARCH, EVALUATION, CARD]
        try:
            folder = hub.snapshot_download(str(name), allow_patterns=wanted)
        except Exception as error:  # unknown names, refused access, no network: each a type of its own
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"{name}: no such folder, and the Hugging Face Hub does not give it ({type(error).__name__}: {reason})"
            ) from error
        return TrajectoryModel.load(folder, device)
    return TrajectoryModel.load(find_model(name), device)


def save_pretrained(
    run: str | Path,
    out: str | Path,
    *,
    name: str | None = None,
    search: SearchConfig | None = None,
    half: bool = False,
) -> None:
    """Write the model of a run folder with its card to another folder, without what only training needs.

    Args:
        run: run folder; its evaluation is part of the card.
        out: folder to write.
        name: name of the model in its card; None: that of the folder.
        search: search settings to use by default; None: those of the evaluation in the run folder.
        half: store weights as bfloat16, which halves the size.
    """
    run = Path(run)
    write_model(run, out, read_details(run), name=name, search=search, half=half)


@dataclass(frozen=True)
class Details:
    """What is known of a model besides its checkpoint, as the contents of JSON files; empty where nothing is."""

    evaluation: Mapping[str, Any] = field(default_factory=dict)  # the result of `tt evaluate`
    training: Mapping[str, Any] = field(default_factory=dict)  # the result of training
    settings: Mapping[str, Any] = field(default_factory=dict)  # what the run was started with
    data: Mapping[str, Any] = field(default_factory=dict)  # scores of the data and of the policies in it


def read_details(run: Path) -> Details:
    """What the files in a run folder say."""
    evaluation, training, settings = (read_facts(run / name) for name in (EVALUATION, "training.json", "run.json"))
    return Details(evaluation, training, settings)


def write_model(
    run: Path,
    out: str | Path,
    details: Details,
    *,
    name: str | None = None,
    search: SearchConfig | None = None,
    half: bool = False,
) -> None:
    """Like `save_pretrained`, with details of the model that may come from other places than its run folder."""
    out, found = Path(out), details.evaluation
    model = TrajectoryModel.load(run)
    if search is None and found:
        search = _search_from(found.get("settings", {}).get("search"), run / EVALUATION)
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)  # in the current format, whatever that of the run
        tensors, description = load_checkpoint(folder)
    if half:
        # Biases and layer norms are small; bins must be exact.
        matrices = {key for key, value in tensors.items() if key.startswith("gpt.") and value.ndim > 1}
        tensors = {key: value.bfloat16() if key in matrices else value for key, value in tensors.items()}
    save_checkpoint(out, tensors, {key: description[key] for key in _SECTIONS})
    if search is not None:
        write_atomically(out / SEARCH, (json.dumps(asdict(search), indent=2) + "\n").encode())
    if found:
        write_atomically(out / EVALUATION, (json.dumps(found, indent=2) + "\n").encode())
    write_atomically(out / CARD, model_card(model, name or out.name, details, half=half).encode())


def push_to_hub(run: str | Path, repository: str, *, private: bool = False, half: bool = False) -> str:
    """Upload the model of a run folder with its card to the Hugging Face Hub as `user/name`; returns its address."""
    if repository.count("/") != 1:
        raise ValueError(f"a model of the Hugging Face Hub is named user/name, got {repository!r}")
    api = _hub().HfApi()
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(run, folder, name=repository.split("/")[1], half=half)
        address = str(api.create_repo(repository, private=private, exist_ok=True))
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Upload a trajectory-transformer model"
        )
    return address


def read_search(folder: Path) -> SearchConfig | None:
    """The search settings that suit a model, if its folder names them."""
    return _search_from(read_facts(folder / SEARCH) or None, folder / SEARCH)


def default_episodes(folder: Path, device: torch.device) -> tuple[int, str | None]:
    """Episodes that show in a few minutes what a model of this package does, and why they are few, if they are."""
    steps = read_facts(folder / EVALUATION).get("metrics", {}).get("steps", 0)
    if device.type != "cpu" or steps <= LONG:
        return DEFAULT_EPISODES, None
    return 1, f"on a CPU its episodes of about {steps:,.0f} steps take minutes"


def quick_search(search: SearchConfig) -> SearchConfig:
    """A search that makes 1,000 plans in about a minute on a CPU."""
    return replace(search, beam_width=min(search.beam_width, 16), horizon=1)


def model_card(model: TrajectoryModel, name: str, details: Details, *, half: bool = False) -> str:
    """The card of a model in Markdown: what it is, how to use it, what it scored, its data and how it was trained."""
    evaluation = details.evaluation
    parts = [
        f"---\n{yaml.safe_dump(_summary(model, name, evaluation), sort_keys=False)}---\n\n# {name}",
        _description(model, half),
        f"## Use\n\n{_USE.format(name=name)}",
        "## Evaluation\n\n" + (_scores(evaluation) if evaluation else "The model has not been evaluated."),
        "## Data\n\n" + "\n\n".join(_data(model.metadata, details.data) or ["The checkpoint does not name its data."]),
        "## Training\n\n" + "\n\n".join(_origin(details) or ["The run folder does not say how it was trained."]),
        _LIMITS,
    ]
    return "\n\n".join(parts) + "\n"


_USE = """```python
from trajectory_transformer import Planner, from_pretrained

planner = Planner(from_pretrained("{name}"))  # or a folder, or user/name on the Hugging Face Hub
```"""
_LIMITS = """## Limits

The model knows only what its data shows. The planner reports states outside the range of that data; plans from there
are guesses."""


def _summary(model: TrajectoryModel, name: str, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """What the Hub reads from a card."""
    env = str(model.metadata.get("env", "unknown"))
    known: dict[str, Any] = {
        "library_name": "trajectory-transformer",
        "pipeline_tag": "reinforcement-learning",
        "tags": ["reinforcement-learning", "offline-rl", "trajectory-transformer", env.split("/")[-1]],
    }
    metrics = evaluation.get("metrics", {})
    scores = [{"type": key, "value": round(float(metrics[key]), 4)} for key in _means(metrics)]
    if scores:
        task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
        result = {"task": task, "dataset": {"name": env, "type": env}, "metrics": scores}
        known["model-index"] = [{"name": name, "results": [result]}]
    return known


def _description(model: TrajectoryModel, half: bool) -> str:
    """Environment and sizes."""
    config, layout, tokens = model.gpt.config, model.layout, model.tokenizer.config
    parameters = sum(parameter.numel() for parameter in model.gpt.parameters())
    env = f" for `{model.metadata['env']}`" if "env" in model.metadata else ""
    goal = f", a goal of {layout.goal_dim}" if layout.goal_dim else ""
    rewards = "rewards and returns-to-go" if layout.rewards else "no rewards"
    return (
        f"A Trajectory Transformer ([paper](https://arxiv.org/abs/2106.02039)){env}: a GPT over discretized "
        "trajectories that plans by beam search.\n\n"
        f"- {parameters:,} parameters: {config.num_layers} layers of width {config.width}, windows of {config.window} "
        f"transitions; stored as {'bfloat16' if half else 'float32'}\n"
        f"- {layout.observation_dim} observation and {layout.action_dim} action dimensions{goal}, {tokens.num_bins} "
        f"{tokens.discretizer} bins, {rewards}"
    )


def _means(metrics: Mapping[str, Any]) -> list[str]:
    """The metrics that are means over episodes."""
    return [key for key in metrics if f"{key}_n" in metrics]


def _scores(evaluation: Mapping[str, Any]) -> str:
    """A table of an evaluation, and where it was measured."""
    metrics = evaluation["metrics"]
    rows = [
        f"| {key} | {metrics[key]:.4g} | {two_digits(metrics.get(f'{key}_stderr'))} | {metrics[f'{key}_n']:.0f} |"
        for key in _means(metrics)
    ]
    table = "\n".join(["| metric | mean | std. error over episodes | n |", "|---|---|---|---|", *rows])
    where = f"Measured on {evaluation['device']} at commit {evaluation['commit']}, one trained model."
    return f"```bash\n{evaluation['command']}\n```\n\n{table}\n\n{where}"


def _data(metadata: Metadata, facts: Mapping[str, Any]) -> list[str]:
    """What a model was trained on: the metadata of its dataset, its policies, and what these score."""
    parts = []
    known = {key: value for key, value in metadata.items() if "." not in key}  # without versions and parts
    if known:
        parts.append(", ".join(f"{key} `{value}`" for key, value in known.items()) + ".")
    rows: list[str] = []
    while f"policy.{len(rows)}.policy" in metadata:
        own = [metadata.get(f"policy.{len(rows)}.{name}", "") for name in ("policy", "episodes", "steps", "sha256")]
        rows.append(f"| {own[0]} | {own[1]} | {own[2]} | {str(own[3])[:12]} |")
    if rows:
        head = ["| policy | episodes | steps | SHA-256 of its file |", "|---|---|---|---|"]
        parts.append("\n".join([*head, *rows]))
    if facts:
        scores = {kind: facts[kind] for kind in ("data", "best_policy_noisy", "best_policy_noiseless") if kind in facts}
        rows = [f"- {kind.replace('_', ' ')}: {_score(value)}" for kind, value in scores.items()]
        title = f"Normalised scores of the data and of its best policy, {facts['best_policy']}:"
        parts.append("\n".join([title, "", *rows]))
    return parts


def _score(score: Mapping[str, float]) -> str:
    """A score with its standard error over episodes."""
    return f"{with_error(score, 'score')} over {counted(score['score_n'], 'episode')}"


def _origin(details: Details) -> list[str]:
    """How a model was trained: command, result, and the settings that the command may leave to a preset."""
    training, settings = details.training, details.settings
    parts = []
    command = training.get("command") or settings.get("command")
    if command:
        parts.append(f"```bash\n{command}\n```")
    if training:
        metrics = training["metrics"]
        parts.append(
            f"{metrics['steps']:.0f} steps in {training['seconds']:.0f} s on {training['device']} at commit "
            f"{training['commit']}; final loss {metrics['loss']:.3f}."
        )
    if settings:
        chosen = {"seed": settings.get("seed", 0), **settings.get("train", {})}
        listed = ", ".join(f"{key} {value}" for key, value in chosen.items() if value is not None)
        parts.append(f"Settings: {listed}.")
    return parts


def read_facts(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a mapping, got {type(content).__name__}")
    return content


def _search_from(stored: Any, path: Path) -> SearchConfig | None:
    """Search settings from JSON, checked by the dataclass."""
    if stored is None:
        return None
    try:
        return settings_from(SearchConfig, stored, "search")
    except ValueError as error:
        raise ValueError(f"{path}: not the search settings of a model ({error})") from error


def _hub() -> ModuleType:
    try:
        return import_module("huggingface_hub")
    except ImportError as error:
        raise ImportError("the Hugging Face Hub needs: pip install 'trajectory-transformer[hub]'") from error
