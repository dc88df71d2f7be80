"""A self-contained HTML page of a run, or of two runs side by side: results, losses, routes, forecasts, settings."""

import base64
import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from trajectory_transformer.analysis.forecast import LEVELS, Calibration, calibration
from trajectory_transformer.analysis.held_out import held_out_losses
from trajectory_transformer.config import dotted
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.envs import FOUR_ROOMS_ID, FOUR_ROOMS_RACE_ID
from trajectory_transformer.files import write_atomically
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.report.plots import prediction_figure, routes_figure
from trajectory_transformer.report.rooms import between_rooms, success_by_doors
from trajectory_transformer.report.run import RunRecord, interval, media_type, read_run
from trajectory_transformer.report.run_figures import calibration_figure, losses_figure, returns_figure
from trajectory_transformer.results import counted
from trajectory_transformer.search.predict import predict

PAGE = "report.html"
_HORIZON, _SAMPLES, _STARTS, _DIMS = 15, 32, 6, 4  # of the forecasts: a few seconds for a large model on a CPU
_ROUTES = 12

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 1rem; color: #1c1e21; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
.lead { font-size: 1.1rem; } .quiet, figcaption { color: #5b616a; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
td, th { padding: .25rem 1rem .25rem 0; text-align: left; border-bottom: 1px solid #e3e5e8; vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 1rem 0; } img, video { max-width: 100%; height: auto; }
code { background: #f2f3f5; padding: .1rem .3rem; overflow-wrap: anywhere; }
details { margin: .5rem 0; } summary { cursor: pointer; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem; }
.two > section { min-width: 0; }
"""


@dataclass(frozen=True)
class Forecasts:
    """What a model says about recorded episodes."""

    episodes: str  # which episodes
    losses: dict[str, float]  # on these episodes, by kind of token
    found: Calibration | None  # None if all episodes are too short
    picture: Figure | None


def write_report(
    run: str | Path,
    other: str | Path | None = None,
    *,
    out: str | Path | None = None,
    models: Sequence[TrajectoryModel | None] = (),
    held_out: Dataset | None = None,
) -> Path:
    """Write the page of a run folder, or of two runs side by side, as one file that needs nothing else.

    By default it is `report.html` in the (first) run folder. `models` are the trained models of the runs: with them the
    page shows losses and forecasts on `held_out` episodes, or without these on the episodes that the planner played.
    """
    runs = [read_run(folder) for folder in (run, *([] if other is None else [other]))]
    given = [*models, None, None][: len(runs)]
    forecasts = [_forecasts(record, model, held_out) for record, model in zip(runs, given, strict=True)]
    body = [_heading(runs), _results(runs), _losses(runs, forecasts)]
    body += [_side_by_side(runs, [_routes(each) for each in runs], "Routes")]
    body += [_side_by_side(runs, [_forecast(each) for each in forecasts], "Forecasts")]
    body += [_side_by_side(runs, [_media(each) for each in runs], "Pictures"), _settings(runs)]
    title = html.escape(" and ".join(record.name for record in runs))
    page = "<!doctype html><html lang='en'><meta charset='utf-8'>"
    page += f"<meta name='viewport' content='width=device-width, initial-scale=1'><title>{title}</title>"
    page += f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    path = Path(out) if out is not None else Path(run) / PAGE
    write_atomically(path, page.encode())
    return path


def _heading(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        return f"<h1>{' and '.join(html.escape(run.name) for run in runs)}</h1>"
    run = runs[0]
    env = "" if run.env is None else f" in {html.escape(run.env)}"
    lines = [f"<h1>{html.escape(run.name)}{env}</h1>"]
    if run.evaluations:
        lines.append(
            f"<p class='lead'><strong>{html.escape(summary(next(iter(run.evaluations.values()))))}.</strong></p>"
        )
    elif run.losses and run.total_steps and run.losses[-1].step < run.total_steps:
        lines.append(f"<p class='lead'>In training: step {run.losses[-1].step:,} of {run.total_steps:,}.</p>")
    else:
        lines.append(f"<p class='lead'>Not evaluated yet: <code>tt evaluate {html.escape(str(run.folder))}</code>.</p>")
    return "".join(lines)


def summary(result: Mapping[str, object]) -> str:
    """The main result of an evaluation as one sentence."""
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    if "success_rate" in metrics:
        goals = metrics.get("success_rate_n", 0)
        text = f"{metrics['success_rate'] * goals:.0f} of {goals:.0f} goals reached"
        if metrics.get("path_ratio") is not None:
            text += f", with paths {metrics['path_ratio']:.2f} times as long as the shortest path"
        return text
    name = "normalized_score" if "normalized_score" in metrics else "return"
    found = interval(metrics, name)
    between = "" if found is None else f" (95 % interval {found[0]:.4g} to {found[1]:.4g})"
    count = metrics.get(f"{name}_n", 0)
    return f"{name.replace('_', ' ')} {metrics.get(name, float('nan')):.4g}{between} over {counted(count, 'episode')}"


def _results(runs: Sequence[RunRecord]) -> str:
    """Metrics of all evaluations with intervals, and the returns of their episodes."""
    parts = []
    for run in runs:
        for name, result in run.evaluations.items():
            title = f"{run.name}: {name}" if len(runs) > 1 else name
            policy = f", {result['settings'].get('plan', '')}" if result.get("settings", {}).get("plan") else ""
            note = (
                f"<p class='quiet'>Measured by <code>{html.escape(str(result.get('command')))}</code> in "
                f"{float(result.get('seconds', 0)):.0f} s on {html.escape(str(result.get('device')))}, commit "
                f"<code>{html.escape(str(result.get('commit'))[:12])}</code>.</p>"
            )
            content = f"<h3>{html.escape(title + policy)}</h3>{_metrics(result['metrics'])}{note}"
            parts.append(f"<section>{content}</section>")
        if not run.evaluations and len(runs) > 1:
            parts.append(f"<section><h3>{html.escape(run.name)}</h3><p class='quiet'>Not evaluated yet.</p></section>")
    if not any(run.evaluations for run in runs):
        return ""
    figure = returns_figure(runs)
    picture = "" if figure is None else _figure(figure, "Return of every episode, with the mean and its 95 % interval.")
    return f"<h2>Evaluation</h2><div class='{'two' if len(parts) > 1 else ''}'>{''.join(parts)}</div>{picture}"


def _metrics(metrics: Mapping[str, float]) -> str:
    header = "".join(f"<th class='number'>{name}</th>" for name in ("mean", "std. error", "95 % interval", "n"))
    rows = [f"<tr><th>metric</th>{header}</tr>"]
    for name, value in metrics.items():
        if name.endswith(("_stderr", "_n", "_low", "_high")):
            continue
        found = interval(metrics, name)
        between = "" if found is None else f"{found[0]:.4g} to {found[1]:.4g}"
        stderr, count = metrics.get(f"{name}_stderr"), metrics.get(f"{name}_n")
        cells = [f"{value:.4g}", "" if stderr is None else f"{stderr:.2g}", between]
        cells.append("" if count is None else f"{count:.0f}")
        numbers = "".join(f"<td class='number'>{cell}</td>" for cell in cells)
        rows.append(f"<tr><td>{html.escape(name)}</td>{numbers}</tr>")
    return f"<div class='scroll'><table>{''.join(rows)}</table></div>"


def _losses(runs: Sequence[RunRecord], forecasts: Sequence[Forecasts | None]) -> str:
    """Curves by kind of token, a table of the last training and held-out losses, and evaluations during training."""
    if not any(run.losses for run in runs):
        return "<h2>Losses</h2><p class='quiet'>No training metrics in the run folder.</p>"
    others = [{} if each is None else each.losses for each in forecasts]
    caption = "Cross-entropy of the tokens of training batches, by kind of token"
    if any(run.best for run in runs):
        caption += "; dots: on the episodes held out from training, with a ring at the checkpoint in the run folder"
    caption += f"; crosses: on {next(each.episodes for each in forecasts if each)}." if any(others) else "."
    columns = [
        (f"{run.name}, {what}" if len(runs) > 1 else what, values)
        for run, other in zip(runs, others, strict=True)
        for what, values in (*_last_losses(run), ("held out", other))
        if values
    ]
    kinds = list(dict.fromkeys(kind for _, values in columns for kind in values))
    head = "".join(f"<th class='number'>{html.escape(name)}</th>" for name, _ in columns)
    rows = [f"<tr><th>kind of token</th>{head}</tr>"]
    for kind in kinds:
        numbers = [f"{values[kind]:.3f}" if kind in values else "" for _, values in columns]
        cells = "".join(f"<td class='number'>{number}</td>" for number in numbers)
        rows.append(f"<tr><td>{html.escape(kind)}</td>{cells}</tr>")
    table = f"<div class='scroll'><table>{''.join(rows)}</table></div>"
    played = _side_by_side(runs, [_played_in_training(run) for run in runs], "Evaluations during training")
    return f"<h2>Losses</h2>{_figure(losses_figure(runs, others), caption)}{table}{played}"


def _last_losses(run: RunRecord) -> Iterator[tuple[str, Mapping[str, float]]]:
    """The last training losses, and the validation losses of the best and of the last checkpoint."""
    if run.losses:
        yield "training", run.losses[-1].losses
    if run.best is not None:
        yield f"validation, best (step {run.best.step:,})", run.best.validation
        last = next(record for record in reversed(run.losses) if record.validation)
        yield f"validation, last (step {last.step:,})", last.validation


def _played_in_training(run: RunRecord) -> str:
    """Return and success of the episodes that were played while the model was trained."""
    played = [record for record in run.losses if record.evaluation]
    names = [
        name for name in ("success_rate", "normalized_score", "return") if any(name in r.evaluation for r in played)
    ]
    if not played:
        return ""
    head = "".join(f"<th class='number'>{name}</th>" for name in ("step", *names))
    rows = [f"<tr>{head}</tr>"]
    for record in played:
        numbers = [f"{record.step:,}", *(f"{record.evaluation.get(name, float('nan')):.4g}" for name in names)]
        cells = "".join(f"<td class='number'>{number}</td>" for number in numbers)
        rows.append(f"<tr>{cells}</tr>")
    return f"<div class='scroll'><table>{''.join(rows)}</table></div>"


def _routes(run: RunRecord) -> str:
    """Routes on maps or in the four rooms."""
    if run.played is None or not has_routes(run.played):
        return ""
    caption = "Routes of the planner, coloured from start (dark) to end (bright)."
    episodes: Sequence[Episode] = run.played.episodes[:_ROUTES]
    doors = ""
    if run.played.metadata.get("env") == FOUR_ROOMS_ID:
        episodes = between_rooms(run.played.episodes, _ROUTES)
        doors = f"<p>{success_by_doors(run.played.episodes).capitalize()}.</p>"
    return doors + _figure(routes_figure(episodes), caption)


def has_routes(dataset: Dataset) -> bool:
    """Whether the first two observations are a place: in the four rooms or on a map of walls and doors."""
    shape = dataset.map_shape
    return dataset.metadata.get("env") in (FOUR_ROOMS_ID, FOUR_ROOMS_RACE_ID) or (len(shape) == 3 and shape[0] == 2)


def _forecasts(run: RunRecord, model: TrajectoryModel | None, held_out: Dataset | None) -> Forecasts | None:
    """Losses and forecasts on held-out episodes, or on those that the planner played."""
    dataset = held_out if held_out is not None else run.played
    if model is None or dataset is None:
        return None
    if model.layout.rewards and not dataset.has_rewards:
        return None
    which = "held-out episodes" if held_out is not None else "episodes that the planner played"
    losses = held_out_losses(model, dataset)
    longest = max(dataset.episodes, key=len)
    if len(longest) < 2:
        return Forecasts(which, losses, None, None)
    horizon = min(_HORIZON, len(longest) // 2)
    spread = np.concatenate([episode.observations for episode in dataset]).std(axis=0)
    found = calibration(
        model, longest, horizon=horizon, num_starts=_STARTS, num_samples=_SAMPLES, spread=spread.astype(np.float64)
    )
    return Forecasts(which, losses, found, _prediction(model, longest, horizon))


def _prediction(model: TrajectoryModel, episode: Episode, horizon: int) -> Figure:
    start = (len(episode) - horizon) // 2
    prediction = predict(model, episode, start=start, horizon=horizon, num_samples=_SAMPLES)
    dims = range(min(_DIMS, episode.observations.shape[1]))
    return prediction_figure(prediction, episode, start=start, dims=dims)


def _forecast(forecasts: Forecasts | None) -> str:
    if forecasts is None or forecasts.found is None or forecasts.picture is None:
        return ""
    found = forecasts.found
    if np.isnan(found.share(LEVELS[0])):
        return "<p>There is nothing to forecast: no dimension of the states varies, or every sample ends at once.</p>"
    shares = ", ".join(f"{100 * found.share(level):.0f} % inside the {100 * level:.0f} % band" for level in LEVELS)
    text = f"Recorded values: {shares}. The forecast is useful for {found.trusted_steps} of {len(found.error)} steps: "
    text += "until its error reaches half a standard deviation of the data, or that of a forecast without change."
    caption = f"The longest of the {forecasts.episodes}, forecast with its recorded actions."
    return (
        f"<p>{text}</p>{_figure(forecasts.picture, caption)}"
        f"{_figure(calibration_figure(found), f'Calibration and error over {len(found.starts)} forecasts.')}"
    )


def _media(run: RunRecord) -> str:
    """Pictures and videos in the run folder."""
    parts = []
    for path in run.media:
        kind, name = media_type(path), html.escape(path.name)
        if kind is None:
            parts.append(f"<p class='quiet'>{name} is too large for this page.</p>")
            continue
        data = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
        shown = f"<video controls src='{data}'></video>" if kind.startswith("video") else f"<img alt='' src='{data}'>"
        parts.append(f"<figure>{shown}<figcaption>{name}</figcaption></figure>")
    return "".join(parts)


def _side_by_side(runs: Sequence[RunRecord], parts: Sequence[str], title: str = "") -> str:
    """The same part of all runs, next to each other where there is room."""
    if not any(parts):
        return ""
    heading = f"<h2>{title}</h2>" if title else ""
    if len(runs) == 1:
        return heading + parts[0]
    nothing = "<p class='quiet'>Nothing to show.</p>"
    sections = "".join(
        f"<section><h3>{html.escape(run.name)}</h3>{part or nothing}</section>"
        for run, part in zip(runs, parts, strict=True)
    )
    return f"{heading}<div class='two'>{sections}</div>"


def _settings(runs: Sequence[RunRecord]) -> str:
    """Settings as the command line has them, folded; of two runs those that differ come first."""
    columns = [_all_settings(run) for run in runs]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    differing = [key for key in keys if len({column.get(key) for column in columns}) > 1]
    parts = ["<h2>Settings</h2>"]
    if len(runs) > 1:
        parts.append("<h3>Different</h3>" + _table(runs, columns, differing) if differing else "<p>All are equal.</p>")
    parts.append(f"<details><summary>All settings</summary>{_table(runs, columns, keys)}</details>")
    return "".join(parts)


def _all_settings(run: RunRecord) -> dict[str, str]:
    """Tokens, model, training, search and the origin of the data; null for None."""
    groups: dict[str, object] = {name: run.description[name] for name in ("tokens", "model") if name in run.description}
    groups |= {name: run.settings[name] for name in ("train", "seed", "dataset") if name in run.settings}
    for result in list(run.evaluations.values())[:1]:
        groups |= {"search": result.get("settings", {}).get("search") or {}}
    groups |= {"data": run.description.get("metadata", {})}
    if run.training.get("command"):
        groups["training command"] = run.training["command"]
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in dotted(groups).items()}


def _table(runs: Sequence[RunRecord], columns: Sequence[Mapping[str, str]], keys: Sequence[str]) -> str:
    rows = []
    if len(runs) > 1:
        head = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
        rows.append(f"<tr><th>setting</th>{head}</tr>")
    for key in keys:
        cells = "".join(f"<td>{html.escape(column.get(key, ''))}</td>" for column in columns)
        rows.append(f"<tr><td>{html.escape(key)}</td>{cells}</tr>")
    return f"<div class='scroll'><table>{''.join(rows)}</table></div>"


def _figure(figure: Figure, caption: str) -> str:
    """A figure embedded in the page, so that the page is a single file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    data, text = base64.b64encode(buffer.getvalue()).decode(), html.escape(caption)
    return f"<figure><img alt='{text}' src='data:image/png;base64,{data}'><figcaption>{text}</figcaption></figure>"
