"""The Control tab: an agent on a map, or a body with curves of its states, and the candidates of every plan."""

import gc
from typing import Any

import numpy as np
from bokeh.events import DoubleTap, Tap
from bokeh.models import (
    Button,
    Column,
    ColumnDataSource,
    LayoutDOM,
    RadioButtonGroup,
    Range1d,
    Slider,
)

from trajectory_transformer.analysis.names import slot_names
from trajectory_transformer.data.episode import MapArray
from trajectory_transformer.envs import is_minigrid
from trajectory_transformer.envs.rooms import WALLS
from trajectory_transformer.viewer.bodies import Camera, is_mujoco, stick_figure
from trajectory_transformer.viewer.control import Control, candidate_strengths, make_control_env, with_search
from trajectory_transformer.viewer.session import Session
from trajectory_transformer.viewer.widgets import ACCENT, GOAL, INK, WINNER, note, plot, wrap

_MAX_CURVES = 4  # state dimensions with a curve
_PLAY_MILLISECONDS = 40
_SHOWN_STEPS = 100  # of the past, in the curves


class ControlPage:
    """Controls of an episode and its picture."""

    def __init__(self, session: Session) -> None:
        """Make the environment and the first plan."""
        self.session = session
        content = session.content
        env = make_control_env(content.model, content.env)
        session.at_end.append(env.close)
        planner = content.planner
        self.control = Control(env, planner)
        self.playing = False
        self._due = False
        self._seed = 0
        search = planner.search
        samples = planner.objective is not None
        options = {"min_width": 150, "max_width": 260, "sizing_mode": "stretch_width"}
        self.beam = Slider(title="Beam width", start=1, end=64, step=1, value=search.beam_width, name="beam", **options)
        self.horizon = Slider(title="Horizon", start=1, end=15, step=1, value=search.horizon, name="horizon", **options)
        kind = "nucleus" if search.action.middle is None else "middle"
        share = search.action.middle or search.action.nucleus or 1.0
        self.filter = Slider(
            title=f"Action filter ({kind})" if samples else "Filter (return only)",
            start=0.05, end=1.0, step=0.05, value=share, disabled=not samples, name="filter", **options,
        )  # fmt: skip
        for slider in (self.beam, self.horizon, self.filter):
            slider.on_change("value_throttled", lambda attribute, old, new: self._replan())
        self.play = Button(label="Play", button_type="primary", width=80, name="play")
        self.play.on_click(self._toggle)
        step = Button(label="Step", width=80, name="step")
        step.on_click(self._step)
        again = Button(label="Replan", width=80, name="replan")
        again.on_click(lambda: self._replan(other_noise=True))
        new = Button(label="New episode", width=110, name="new")
        new.on_click(self._new_episode)
        self.status = note("", name="status")
        env_id = str(content.env)
        self.scene: Scene
        if "FourRooms" in env_id or is_minigrid(env_id):
            self.scene = MapScene(self)
        else:
            self.scene = BodyScene(self)
        controls = Column(
            children=[
                *self.scene.controls,
                wrap(self.play, step, again, new),
                wrap(self.beam, self.horizon, self.filter),
                self.status,
            ],
            sizing_mode="stretch_width",
            styles={"flex": "1 1 300px", "min-width": "280px"},
        )
        self.layout: LayoutDOM = Column(
            children=[wrap(self.scene.layout, controls), wrap(*self.scene.below)], sizing_mode="stretch_width"
        )
        self._show(None)

    def place(self, start: tuple[float, float] | None, goal: tuple[float, float] | None) -> None:
        """Move the start or the goal of the episode to a point that was clicked, and plan."""
        moment = self.control.moment
        current = tuple(float(value) for value in moment.observations[-1, :2])
        options: dict[str, Any] = {"start": start or current}
        if moment.goal.size:
            options["goal"] = goal or tuple(float(value) for value in moment.goal[:2])
        if is_minigrid(str(self.session.content.env)):
            options = {name: (round(x), round(y)) for name, (x, y) in options.items()}
        self._work("place", lambda: self.control.restart(seed=self._seed, options=options))

    def _new_episode(self) -> None:
        self._seed += 1
        self._work("new", lambda: self.control.restart(seed=self._seed))

    def _step(self) -> None:
        self._work("step", self.control.step)

    def _replan(self, other_noise: bool = False) -> None:
        changes: dict[str, Any] = {"beam_width": int(self.beam.value), "horizon": int(self.horizon.value)}
        if not self.filter.disabled:
            changes["share"] = float(self.filter.value)
        if other_noise:
            changes["seed"] = self.control.planner.seed + 1

        def replan() -> None:
            self.control.replan(with_search(self.control.planner, **changes))
            # A planner refers to itself: the one that was replaced would stay for minutes of clicking.
            gc.collect()

        self._work("replan", replan)

    def _toggle(self) -> None:
        self.playing = not self.playing and not self.control.moment.over
        self.play.label = "Pause" if self.playing else "Play"
        if self.playing:
            self._step()

    def _work(self, name: str, compute: Any) -> None:
        self.session.work(name, compute, self._show)

    def _show(self, result: object) -> None:
        """Draw the current moment and plan."""
        del result
        self.session.say("")
        moment, plan = self.control.moment, self.control.plan
        self.scene.show()
        if moment.over:
            ending = "the episode is over" if moment.success is None else "arrived" if moment.success else "not reached"
            self.playing, self.play.label = False, "Play"
        else:
            ending = "planning for " + str(self.control.planner.kind)
        reward = f", return {moment.rewards.sum():.4g}" if len(moment.rewards) else ""
        self.status.text = (
            f"Step {moment.step}: {ending}{reward}. {len(plan.scores)} candidates, "
            f"scores {plan.scores[0]:.4g} to {plan.scores[-1]:.4g}."
        )
        if self.playing and not self._due:
            self._due = True  # one step is due, however often the page is drawn until then
            self.session.after(_PLAY_MILLISECONDS, self._play_on)

    def _play_on(self) -> None:
        """Take the step that is due."""
        self._due = False
        if self.playing:
            self._step()


class Scene:
    """A picture of an episode."""

    layout: LayoutDOM
    controls: list[LayoutDOM]
    below: list[LayoutDOM]  # what needs the whole width

    def show(self) -> None:
        """Draw the current moment and plan."""


class MapScene(Scene):
    """The agent on a map, the candidates as lines from faint to strong, the winner bold."""

    def __init__(self, page: ControlPage) -> None:
        """Draw the walls, and listen to clicks."""
        self.page = page
        grid = is_minigrid(str(page.session.content.env))
        self.plot = plot(
            height=None, aspect_ratio=1, sizing_mode="scale_width", min_width=280, max_width=560,
            x_range=Range1d(-0.02, 1.02), y_range=Range1d(-0.02, 1.02), tools="tap", name="map",
            styles={"flex": "1 1 320px"},
        )  # fmt: skip
        self.plot.axis.visible = False
        self.plot.grid.visible = False
        self.walls = ColumnDataSource({"x": [], "y": []})
        self.doors = ColumnDataSource({"x": [], "y": []})
        self.candidates = ColumnDataSource({"xs": [], "ys": [], "alpha": []}, name="candidates")
        self.winner = ColumnDataSource({"x": [], "y": []})
        self.trail = ColumnDataSource({"x": [], "y": []})
        self.agent = ColumnDataSource({"x": [], "y": []}, name="agent")
        self.goal = ColumnDataSource({"x": [], "y": []}, name="goal")
        if grid:
            self.plot.rect("x", "y", 1, 1, source=self.walls, color="#4a4f57")
            self.plot.rect("x", "y", 0.9, 0.9, source=self.doors, color="#e9b44c")
        else:
            self.plot.segment(*WALLS[:, 0].T, *WALLS[:, 1].T, color=INK, line_width=4, line_cap="round")
        self.plot.line("x", "y", source=self.trail, color=INK, line_width=2, alpha=0.6)
        self.plot.multi_line("xs", "ys", source=self.candidates, color=ACCENT, line_width=2, line_alpha="alpha")
        self.plot.line("x", "y", source=self.winner, color=WINNER, line_width=4)
        self.plot.scatter("x", "y", source=self.goal, marker="star", size=22, color=GOAL, line_color="white")
        self.plot.scatter("x", "y", source=self.agent, size=13, color=INK, line_color="white", line_width=2)
        # The second of two quick clicks arrives as a double tap alone, even if it was somewhere else.
        for event in (Tap, DoubleTap):
            self.plot.on_event(event, self._tapped)
        has_goal = page.control.moment.goal.size > 0 and page.session.content.model.layout.goal_dim > 0
        self.sets = RadioButtonGroup(labels=["goal", "start"] if has_goal else ["start"], active=0, name="sets")
        self.layout = self.plot
        self.below = []
        self.controls = [note("A click on the map sets the"), self.sets]
        self._drawn: MapArray | None = None

    def show(self) -> None:
        """Draw agent, goal, trail and candidates."""
        moment, plan = self.page.control.moment, self.page.control.plan
        if moment.map is not None and moment.map is not self._drawn:
            self._draw_map(moment.map)
        path = moment.observations[:, :2].astype(float)
        self.trail.data = {"x": path[:, 0].tolist(), "y": path[:, 1].tolist()}
        self.agent.data = {"x": [path[-1, 0]], "y": [path[-1, 1]]}
        goal = moment.goal[:2].astype(float).tolist() if moment.goal.size >= 2 else []
        self.goal.data = {"x": goal[:1], "y": goal[1:]}
        if moment.over:
            self.candidates.data = {"xs": [], "ys": [], "alpha": []}
            self.winner.data = {"x": [], "y": []}
            return
        lines = [states[~np.isnan(states).any(axis=1), :2] for states in plan.states]
        strengths = candidate_strengths(plan.scores)
        # The strongest last, on top of the others.
        self.candidates.data = {
            "xs": [line[:, 0].tolist() for line in lines[::-1]],
            "ys": [line[:, 1].tolist() for line in lines[::-1]],
            "alpha": strengths[::-1].tolist(),
        }
        self.winner.data = {"x": lines[0][:, 0].tolist(), "y": lines[0][:, 1].tolist()}

    def _draw_map(self, map: MapArray) -> None:
        """Walls and doors of a grid, cropped to a square around the rooms, y downwards."""
        self._drawn = map
        for source, channel in ((self.walls, 0), (self.doors, 1)):
            rows, columns = np.nonzero(map[channel])
            source.data = {"x": columns.tolist(), "y": rows.tolist()}
        rows, columns = np.nonzero(map[0])
        half = max(np.ptp(rows), np.ptp(columns)) / 2 + 1
        x, y = (columns.min() + columns.max()) / 2, (rows.min() + rows.max()) / 2
        self.plot.x_range.start, self.plot.x_range.end = x - half, x + half
        self.plot.y_range.start, self.plot.y_range.end = y + half, y - half

    def _tapped(self, event: Any) -> None:
        point = (float(event.x), float(event.y))
        sets_goal = self.sets.labels[self.sets.active or 0] == "goal"
        self.page.place(None if sets_goal else point, point if sets_goal else None)


class BodyScene(Scene):
    """A picture of the body where there is one, and curves: what was predicted and what happened."""

    def __init__(self, page: ControlPage) -> None:
        """Prepare the picture and the curves."""
        self.page = page
        content = page.session.content
        self.controls = []
        self.camera: Camera | None = None
        self.sticks = ColumnDataSource({"x0": [], "y0": [], "x1": [], "y1": []}, name="sticks")
        self.picture = plot(
            height=None, aspect_ratio=4 / 3, sizing_mode="scale_width", min_width=280, max_width=560,
            x_range=Range1d(-1.6, 1.6), y_range=Range1d(-0.4, 2.0), name="body", styles={"flex": "1 1 320px"},
        )  # fmt: skip
        self.picture.axis.visible = False
        self.frame: ColumnDataSource | None = None
        if is_mujoco(page.control.env):
            self.camera = Camera(page.control.env)
            page.session.at_end.append(self.camera.close)
            if self.camera.reason:
                self.controls.append(note("A stick figure: " + self.camera.reason))
                self.picture.segment(
                    "x0", "y0", "x1", "y1", source=self.sticks, color=ACCENT, line_width=9, line_cap="round"
                )
            else:
                self.frame = ColumnDataSource({"image": [], "x": [], "y": [], "dw": [], "dh": []}, name="frame")
                self.picture.image_rgba("image", "x", "y", "dw", "dh", source=self.frame)
        else:
            self.picture.visible = False
            self.controls.append(note("This environment has no picture; the curves show its states."))
        names = slot_names(content.model, content.dataset)[content.model.layout.goal_dim :]
        self.curves = []
        for dim in range(min(_MAX_CURVES, content.model.layout.observation_dim)):
            curve = plot(names[dim], height=150, styles={"flex": "1 1 45%", "min-width": "280px"})
            lines = ColumnDataSource({"xs": [], "ys": [], "alpha": []})
            winner = ColumnDataSource({"x": [], "y": []})
            actual = ColumnDataSource({"x": [], "y": []})
            curve.multi_line("xs", "ys", source=lines, color=ACCENT, line_alpha="alpha")
            curve.line("x", "y", source=actual, color=INK, line_width=2)
            curve.line("x", "y", source=winner, color=WINNER, line_width=3)
            self.curves.append((dim, curve, lines, winner, actual))
        self.layout = self.picture
        legend = note("By step: what happened (black), candidates (blue), winner (red).", styles={"flex": "1 0 100%"})
        self.below = [legend, *(curve for _, curve, *_ in self.curves)]

    def show(self) -> None:
        """Draw the body and the curves."""
        moment, plan = self.page.control.moment, self.page.control.plan
        self._show_body()
        first = max(moment.step - _SHOWN_STEPS, 0)
        strengths = candidate_strengths(plan.scores)
        steps = plan.step + np.arange(plan.states.shape[1])
        for dim, _, lines, winner, actual in self.curves:
            values = moment.observations[first:, dim]
            actual.data = {"x": np.arange(first, moment.step + 1), "y": values}
            if moment.over:
                continue
            lines.data = {
                "xs": [steps.tolist()] * len(strengths),
                "ys": np.nan_to_num(plan.states[::-1, :, dim], nan=np.nan).tolist(),
                "alpha": strengths[::-1].tolist(),
            }
            winner.data = {"x": steps, "y": plan.states[0, :, dim]}

    def _show_body(self) -> None:
        if self.camera is None:
            return
        frame = self.camera.frame()
        if frame is not None and self.frame is not None:
            rgba = np.dstack([frame[::-1], np.full(frame.shape[:2], 255, np.uint8)]).copy().view(np.uint32)[..., 0]
            x, y = self.picture.x_range, self.picture.y_range
            box = {"x": [x.start], "y": [y.start], "dw": [x.end - x.start], "dh": [y.end - y.start]}
            self.frame.data = {"image": [rgba], **box}
            return
        segments = stick_figure(self.page.control.env)
        middle = segments[..., 0].mean() if len(segments) else 0.0
        self.sticks.data = {
            "x0": segments[:, 0, 0] - middle, "y0": segments[:, 0, 2],
            "x1": segments[:, 1, 0] - middle, "y1": segments[:, 1, 2],
        }  # fmt: skip
