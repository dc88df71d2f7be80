"""The tabs that look at plans and recorded episodes: Plan, Forecast, Attention, Data."""

from typing import Any

import numpy as np
from bokeh.models import (
    BasicTicker,
    Column,
    ColumnDataSource,
    CustomJSHover,
    DataTable,
    HoverTool,
    LayoutDOM,
    LinearColorMapper,
    NumberFormatter,
    Range1d,
    Select,
    Spinner,
    StringFormatter,
    TableColumn,
)

from trajectory_transformer.analysis.attention import attention_maps, token_labels, window_tokens
from trajectory_transformer.analysis.forecast import LEVELS, Calibration, bands_of, calibration
from trajectory_transformer.analysis.names import slot_names
from trajectory_transformer.results import counted
from trajectory_transformer.search.predict import Prediction, predict, recorded
from trajectory_transformer.viewer.content import Content
from trajectory_transformer.viewer.control import PlanView
from trajectory_transformer.viewer.control_page import ControlPage
from trajectory_transformer.viewer.histograms import action_limits, episode_order, slot_histogram
from trajectory_transformer.viewer.plans import OpenedPlan, open_plan
from trajectory_transformer.viewer.session import Session
from trajectory_transformer.viewer.widgets import ACCENT, FAINT, INK, WINNER, label, note, plot, wrap

_FORECAST_SAMPLES, _FORECAST_STARTS = 48, 6
_MAX_BARS = 2000  # episodes drawn by return
_HALF = {"styles": {"flex": "1 1 340px", "min-width": "280px"}}


class PlanPage:
    """One plan opened: the control tab's, or without an environment one from a recorded state."""

    def __init__(self, session: Session, control: ControlPage | None) -> None:
        """Build the table and the charts."""
        self.session, self.control = session, control
        self.names = slot_names(session.content.model, session.content.dataset)[session.content.model.layout.goal_dim :]
        self.opened: OpenedPlan | None = None
        self.rows = ColumnDataSource(
            {"step": [], "slot": [], "token": [], "value": [], "probability": []}, name="tokens"
        )
        self.rows.selected.on_change("indices", lambda attribute, old, new: self._show_distribution())
        number = NumberFormatter(format="0.[0000]", text_align="right")
        columns = [
            TableColumn(field="step", title="step", width=40),
            TableColumn(field="slot", title="slot", formatter=StringFormatter(), width=130),
            TableColumn(field="value", title="value", formatter=number, width=80),
            TableColumn(field="probability", title="probability", formatter=number, width=80),
        ]
        table = DataTable(
            source=self.rows,
            columns=columns,
            height=420,
            index_position=None,
            reorderable=False,
            sizing_mode="stretch_width",
            **_HALF,
        )
        self.bars = ColumnDataSource({"value": [], "top": [], "color": []}, name="distribution")
        self.chart = plot("distribution of the selected token", height=230)
        self.chart.vbar(x="value", top="top", width=0.9, color="color", source=self.bars)
        self.chart.y_range.start = 0
        label(self.chart.xaxis, "bin; the last one is the end of the episode")
        label(self.chart.yaxis, "probability")
        self.paths = ColumnDataSource({"xs": [], "ys": [], "color": [], "width": [], "alpha": []})
        self.spread = plot("scores relative to the winner (red)", height=230)
        self.spread.multi_line("xs", "ys", color="color", line_width="width", line_alpha="alpha", source=self.paths)
        label(self.spread.xaxis, "transitions planned")
        label(self.spread.yaxis, "score")
        self.spread.xaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
        self.text = note("", name="plan-text")
        charts = Column(children=[self.text, self.chart, self.spread], sizing_mode="stretch_width", **_HALF)
        self.pickers: list[Spinner] = []
        if control is None:
            self.pickers = episode_pickers(session.content, self.refresh)
        self.layout: LayoutDOM = Column(
            children=[wrap(*self.pickers), wrap(table, charts)], sizing_mode="stretch_width"
        )

    def refresh(self) -> None:
        """Open the current plan."""
        self.session.work("plan", self._compute, self._show)

    def _compute(self) -> OpenedPlan:
        if self.control is not None:
            control = self.control.control
            plan = control.plan
            return open_plan(control.planner, plan.prompt, plan.tokens, plan.scores, control.map_embedding)
        planner, plan, embedding = (
            self.session.content.planner,
            *recorded_plan(self.session.content, *picked(self.pickers)),
        )
        return open_plan(planner, plan.prompt, plan.tokens, plan.scores, embedding)

    def _show(self, opened: OpenedPlan) -> None:
        self.opened = opened
        self.rows.data = {
            "step": [row.step for row in opened.rows],
            "slot": [self.names[row.slot] for row in opened.rows],
            "token": [row.token for row in opened.rows],
            "value": [row.value for row in opened.rows],
            "probability": [row.probability for row in opened.rows],
        }
        self.rows.selected.indices = [0]
        count, transitions = opened.score_paths.shape
        winner = np.arange(count)[::-1] == 0
        self.paths.data = {
            "xs": [list(range(1, transitions + 1))] * count,
            "ys": (opened.score_paths - opened.score_paths[:1])[::-1].tolist(),
            "color": [WINNER if best else ACCENT for best in winner],
            "width": [3 if best else 1 for best in winner],
            "alpha": [1.0 if best else 0.5 for best in winner],
        }
        self.text.text = (
            f"The winner of {count} candidates, score {opened.scores[0]:.4g}. Select a row to see the distribution of "
            "its token: blue bins were kept by the filter or the beam, the red one was chosen."
        )
        self._show_distribution()

    def _show_distribution(self) -> None:
        if self.opened is None or not self.rows.selected.indices:
            return
        row = self.opened.rows[self.rows.selected.indices[0]]
        probs, kept = self.opened.distributions[row.index], self.opened.kept[row.index]
        colors = [WINNER if bin == row.token else ACCENT if kept[bin] else FAINT for bin in range(len(probs))]
        self.bars.data = {"value": np.arange(len(probs)), "top": probs, "color": colors}
        self.chart.title.text.text = f"{self.names[row.slot]}, step {row.step}: {int(kept.sum())} of {len(probs)} kept"


def episode_pickers(content: Content, changed: Any) -> list[Spinner]:
    """Inputs for an episode and one of its steps."""
    assert content.dataset is not None
    last = len(content.dataset) - 1
    episode = Spinner(title=f"Episode (0 to {last})", low=0, high=last, value=0, width=150, name="episode")
    step = Spinner(title="Step", low=0, value=0, width=100, name="start")
    for spinner in (episode, step):
        spinner.on_change("value", lambda attribute, old, new: changed())
    return [episode, step]


def picked(pickers: list[Spinner]) -> tuple[int, int]:
    """The episode and the step of two inputs."""
    return int(pickers[0].value or 0), int(pickers[1].value or 0)


def recorded_plan(content: Content, index: int, step: int) -> tuple[PlanView, Any]:
    """A plan from a state of a recorded episode, and the embedding of its map."""
    assert content.dataset is not None
    planner, tokenizer, episode = content.planner, content.model.tokenizer, content.dataset.episodes[index]
    step = min(step, len(episode) - 1)
    rows = tokenizer.encode(episode)
    first = max(step - min(planner.search.context, content.model.gpt.config.window - 1), 0)
    state = rows[step, tokenizer.layout.observation]
    prompt = tokenizer.prompt(tokenizer.goals_of([episode])[0], list(rows[first:step]), state)
    embedding = content.model.encode_maps(episode.map)
    plan = planner.plan(prompt[None], np.array([step]), embedding)
    tokens = plan.tokens[0].cpu().numpy()
    decoded = tokenizer.decode(np.broadcast_to(state, (len(tokens), len(state))), tokens)
    return PlanView(step, prompt, tokens, plan.scores[0].cpu().numpy(), decoded.states, decoded.actions), embedding


class ForecastPage:
    """Bands against a recorded episode, calibration, and how far ahead to trust the forecast."""

    def __init__(self, session: Session) -> None:
        """Build inputs and charts."""
        self.session, content = session, session.content
        self.pickers = episode_pickers(content, self.refresh)
        self.ahead = Spinner(title="Steps ahead", low=1, high=60, value=10, width=100, name="ahead")
        self.ahead.on_change("value", lambda attribute, old, new: self.refresh())
        names = slot_names(content.model, content.dataset)[content.model.layout.goal_dim :]
        dims = [(str(dim), names[dim]) for dim in range(content.model.layout.observation_dim)]
        self.dim = Select(title="Dimension", options=dims, value="0", width=180)
        self.dim.on_change("value", lambda attribute, old, new: self._draw())
        self.chart = plot("recorded (black), median, 50 % and 90 % bands", height=300)
        self.bands = ColumnDataSource({name: [] for name in ("x", "low", "lower", "middle", "upper", "high")})
        self.truth = ColumnDataSource({"x": [], "y": []}, name="truth")
        self.chart.varea("x", "low", "high", source=self.bands, color=ACCENT, alpha=0.18)
        self.chart.varea("x", "lower", "upper", source=self.bands, color=ACCENT, alpha=0.3)
        self.chart.line("x", "middle", source=self.bands, color=ACCENT, line_width=2)
        self.chart.line("x", "y", source=self.truth, color=INK, line_width=2)
        label(self.chart.xaxis, "step of the episode")
        self.shares = plot("share of the truth inside the bands", height=220, y_range=(0, 1.02), **_HALF)
        self.errors = plot("error: median (blue), no change (grey)", height=220, **_HALF)
        self.errors.y_range.start = 0
        empty: dict[str, list[float]] = {"x": [], "inside": [], "wide": [], "error": [], "unchanged": []}
        self.found = ColumnDataSource(empty, name="calibration")
        for field, level, color in (("inside", LEVELS[0], "#e07b39"), ("wide", LEVELS[1], ACCENT)):
            name = f"{100 * level:.0f} % band"
            self.shares.line("x", field, source=self.found, color=color, line_width=2, legend_label=name)
            self.shares.line([0, 60], [level, level], color=color, line_dash="dotted")
        self.shares.legend.location = "bottom_left"
        self.shares.legend.background_fill_alpha = 0.6
        self.shares.x_range.start, self.shares.x_range.end = 0, 10
        self.errors.line("x", "error", source=self.found, color=ACCENT, line_width=2)
        self.errors.line("x", "unchanged", source=self.found, color=FAINT, line_width=2, line_dash="dashed")
        for each in (self.shares, self.errors):
            label(each.xaxis, "steps ahead")
        label(self.errors.yaxis, "standard deviations")
        self.text = note("", name="forecast-text")
        self._start, self._shown = 0, 10
        self.prediction: Prediction | None = None
        self.layout: LayoutDOM = Column(
            children=[wrap(*self.pickers, self.ahead, self.dim), self.text, self.chart, wrap(self.shares, self.errors)],
            sizing_mode="stretch_width",
        )

    def refresh(self) -> None:
        """Forecast again."""
        self.session.work("forecast", self._compute, self._show)

    def _compute(self) -> tuple[int, int, int, Prediction, Calibration]:
        content = self.session.content
        assert content.dataset is not None
        index, start = picked(self.pickers)
        episode = content.dataset.episodes[index]
        horizon = min(int(self.ahead.value or 1), len(episode))
        start = min(start, len(episode) - horizon)
        spread = np.concatenate([each.observations for each in content.dataset.episodes[:500]]).std(axis=0)
        prediction = predict(content.model, episode, start=start, horizon=horizon, num_samples=_FORECAST_SAMPLES)
        found = calibration(
            content.model, episode, horizon=horizon, num_starts=_FORECAST_STARTS, num_samples=_FORECAST_SAMPLES,
            spread=spread.astype(np.float64),
        )  # fmt: skip
        return index, start, horizon, prediction, found

    def _show(self, result: tuple[int, int, int, Prediction, Calibration]) -> None:
        self._episode, self._start, self._shown, self.prediction, found = result
        shares = ", ".join(f"{100 * found.share(level):.0f} % inside the {100 * level:.0f} % band" for level in LEVELS)
        self.text.text = (
            f"Over {len(found.starts)} forecasts of this episode with its recorded actions, of the truth {shares}. "
            f"Trust it for {found.trusted_steps} of {len(found.error)} steps: until its error reaches half a standard "
            "deviation of the data, or that of a forecast without change."
        )
        self.found.data = {
            "x": np.arange(1, self._shown + 1),
            "inside": found.inside[LEVELS[0]],
            "wide": found.inside[LEVELS[1]],
            "error": found.error,
            "unchanged": found.unchanged,
        }
        self.shares.x_range.end = self._shown
        self._draw()

    def _draw(self) -> None:
        content, prediction = self.session.content, self.prediction
        if prediction is None or content.dataset is None:
            return
        dim = int(self.dim.value)
        bands = {name: part[:, dim] for name, part in vars(bands_of(prediction.observations)).items()}
        self.bands.data = {"x": self._start + 1 + np.arange(self._shown), **bands}
        episode = content.dataset.episodes[self._episode]
        first = max(self._start - self._shown // 2, 0)
        before = episode.observations[first : self._start + 1, dim]
        values = np.concatenate([before, recorded(episode, self._start, self._shown)[:, dim]])
        self.truth.data = {"x": first + np.arange(len(values)), "y": values}


class AttentionPage:
    """All heads over a window of a recorded episode; hovering names the two slots."""

    def __init__(self, session: Session) -> None:
        """Build one small image per head."""
        self.session, content = session, session.content
        self.pickers = episode_pickers(content, self.refresh)
        self.names = slot_names(content.model, content.dataset)
        config = content.model.gpt.config
        mapper = LinearColorMapper(palette=_PALETTE, low=0.0, high=1.0)
        self.hover = CustomJSHover(args={"labels": []}, code="return labels[Math.floor(value)] || ''")
        self.images: list[ColumnDataSource] = []
        self.plots = []
        for layer in range(config.num_layers):
            for head in range(config.num_heads):
                ranges = {"x_range": Range1d(0, 1), "y_range": Range1d(1, 0)}
                title = f"layer {layer}, head {head}"
                made = plot(title, height=200, width=200, sizing_mode="fixed", **ranges)
                made.axis.visible = False
                made.grid.visible = False
                source = ColumnDataSource({"image": [], "x": [], "y": [], "dw": [], "dh": []}, name="head")
                made.image("image", "x", "y", "dw", "dh", source=source, color_mapper=mapper)
                tip = "<div>$y{custom}<br>reads $x{custom}<br>weight @image{0.000}</div>"
                made.add_tools(HoverTool(tooltips=tip, formatters={"$x": self.hover, "$y": self.hover}))
                self.images.append(source)
                self.plots.append(made)
        self.text = note("", name="attention-text")
        self.layout: LayoutDOM = Column(
            children=[wrap(*self.pickers), self.text, wrap(*self.plots)], sizing_mode="stretch_width"
        )

    def refresh(self) -> None:
        """Compute the maps of a window."""
        self.session.work("attention", self._compute, self._show)

    def _compute(self) -> Any:
        content = self.session.content
        assert content.dataset is not None
        index, start = picked(self.pickers)
        episode = content.dataset.episodes[index]
        tokens = window_tokens(content.model, episode, min(start, len(episode) - 1))
        return attention_maps(content.model, tokens, episode.map)

    def _show(self, maps: Any) -> None:
        length = maps.shape[-1]
        self.hover.args = {"labels": token_labels(self.session.content.model.layout, self.names, length)}
        for source, made, weights in zip(self.images, self.plots, maps.reshape(-1, length, length), strict=True):
            made.x_range.end = made.y_range.start = length
            source.data = {"image": [weights], "x": [0], "y": [0], "dw": [length], "dh": [length]}
        self.text.text = f"{length} tokens. Each row is a token, dark columns are what it reads. Hover for the slots."


class DataPage:
    """Histograms in the bins of the tokenizer, episodes by return, actions at their limits."""

    def __init__(self, session: Session) -> None:
        """Build the charts."""
        self.session, content = session, session.content
        assert content.dataset is not None
        dataset = content.dataset
        names = slot_names(content.model, dataset)[content.model.layout.goal_dim :]
        count = len(names) if dataset.has_rewards else content.model.layout.action.stop
        options = [(str(slot), name) for slot, name in enumerate(names[:count])]
        self.slot = Select(title="Slot", options=options, value="0", width=220, name="slot")
        self.slot.on_change("value", lambda attribute, old, new: self.refresh())
        self.bins = ColumnDataSource({"left": [], "right": [], "top": [], "count": []}, name="bins")
        self.chart = plot("", height=300)
        quad = {"left": "left", "right": "right", "top": "top", "bottom": 0, "color": ACCENT}
        self.chart.quad(source=self.bins, line_color="white", line_width=0.5, **quad)
        self.chart.y_range.start = 0
        label(self.chart.yaxis, "density")
        self.chart.add_tools(HoverTool(tooltips=[("bin", "@left to @right"), ("values", "@count")]))
        order = episode_order(dataset)
        shown = order[np.linspace(0, len(order) - 1, min(len(order), _MAX_BARS)).astype(int)]
        chosen = [dataset.episodes[index] for index in shown]
        values = [each.total_reward if dataset.has_rewards else float(len(each)) for each in chosen]
        what = "return" if dataset.has_rewards else "steps"
        returns = plot(f"episodes by {what}", height=220, **_HALF)
        steps = [len(each) for each in chosen]
        bars = ColumnDataSource({"x": np.arange(len(values)), "top": values, "episode": shown, "steps": steps})
        returns.vbar(x="x", top="top", width=1.0, source=bars, color="#7a9cc6")
        returns.add_tools(HoverTool(tooltips=[("episode", "@episode"), (what, "@top"), ("steps", "@steps")]))
        returns.xaxis.visible = False
        label(returns.yaxis, what)
        limits = action_limits(dataset)
        actions = names[content.model.layout.action]
        limit_plot = plot("share of actions at their limits", height=220, y_range=(0, 1), **_HALF)
        limit_plot.vbar(x=np.arange(len(limits)), top=limits, width=0.7, color="#e07b39")
        limit_plot.xaxis.ticker = list(range(len(actions)))
        limit_plot.xaxis.major_label_overrides = dict(enumerate(actions))
        lengths = [len(each) for each in dataset]
        range_text = f"{min(lengths)} to {max(lengths)} per episode"
        summary = f"{counted(len(dataset), 'episode')}, {dataset.num_steps} steps ({range_text})"
        self.text = note("", name="data-text")
        self.layout: LayoutDOM = Column(
            children=[note(summary), self.slot, self.chart, self.text, wrap(returns, limit_plot)],
            sizing_mode="stretch_width",
        )

    def refresh(self) -> None:
        """Count the values of the chosen slot."""
        content, slot = self.session.content, int(self.slot.value)
        assert content.dataset is not None
        dataset = content.dataset
        self.session.work("data", lambda: slot_histogram(dataset, content.model.tokenizer, slot), self._show)

    def _show(self, found: Any) -> None:
        left, right = found.edges[:-1], found.edges[1:]
        narrow = right <= left
        sides = {"left": left - 0.5 * narrow, "right": right + 0.5 * narrow}
        self.bins.data = {**sides, "top": found.density, "count": found.counts}
        name = dict(self.slot.options)[self.slot.value]
        self.chart.title.text.text = f"{name}: {len(found.counts)} bins"
        self.text.text = f"{100 * found.at_limits:.1f} % of the values are the smallest or the largest one."


def _blend(low: tuple[int, int, int], high: tuple[int, int, int], count: int) -> list[str]:
    """Colours from one to another, as #rrggbb."""
    shares = np.linspace(0.0, 1.0, count) ** 0.6
    return [
        "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True)) for share in shares
    ]


_PALETTE = _blend((247, 249, 252), (23, 54, 110), 256)
