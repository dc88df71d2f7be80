"""The scripts of the humanoid experiment: their jobs, the tables of settings, references that branch, the summary."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.humanoid_data import branch_of, drawn_from_bins, play_from_bins, play_visits
from benchmarks.humanoid_jobs import spent
from trajectory_transformer.analysis.predictors import Past
from trajectory_transformer.analysis.study import find_starts
from trajectory_transformer.cli import main as tt
from trajectory_transformer.data.episode import Dataset, Episode, load_npz, save_npz

HUMANOID = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "humanoid.py"))
CEILING = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "humanoid_ceiling.py"))
TUNING = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "humanoid_tuning.py"))

RESULTS = Path(__file__).parents[1] / "results" / "prediction"


def parsed(tmp_path: Path, *words: object) -> tuple[Any, Any, list[str]]:
    required = ["--policies", "p", "--work", tmp_path / "work", "--out", tmp_path / "out", "--device", "cpu"]
    options, flags = HUMANOID["parse"]([str(word) for word in (*required, *words)])
    return options, HUMANOID["Places"](options.work), flags


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_every_seed_has_all_predictors_on_both_kinds_of_data(tmp_path: Path) -> None:
    jobs = HUMANOID["jobs"](*parsed(tmp_path, "--train.steps", 9, "--model.window", 6))
    counts = {kind: sum(job.kind == kind for job in jobs) for kind in ("collect", "train", "fit", "play")}
    assert counts == {"collect": 2, "train": 2 * 2 * 3, "fit": 2 * 3, "play": 2 * 3 + 1}
    assert len({job.out for job in jobs}) == len(jobs)
    made = {job.out for job in jobs}
    assert all(set(job.needs) <= made for job in jobs)
    assert all(jobs[0].out in job.needs for job in jobs if job.kind in ("train", "fit")), "data comes first"
    for job in jobs:
        words = list(job.command)
        if job.kind == "train":
            name, masked = job.out.parent.name, "masked" in job.out.parent.name
            windows = [words[place + 1] for place, word in enumerate(words) if word == "--model.window"]
            assert windows[-1] == ("2" if name.startswith("markov") else "6")
            assert words[words.index("--tokens.num_bins") + 1] == ("101" if masked else "100")
            steps = [words[place + 1] for place, word in enumerate(words) if word == "--train.steps"]
            assert steps == [str(HUMANOID["MODEL"]["train.steps"]), "9"], "flags of the user come last"
            assert words[words.index("--train.action_weight") + 1] == "1"
            assert Path(words[4]).stem == ("train_masked" if masked else "train")
        if job.kind == "play" and job.out.suffix == ".json":
            kinds = json.loads(words[words.index("--actions") + 1])
            assert kinds == (["policy", "recorded"] if job.out.stem.endswith("_0") else ["policy"])
            assert words[words.index("--hidden") + 1] == ("0.5" if "masked" in job.out.stem else "0.0")
            assert words[words.index("--samples") + 1] == ("2000" if "masked" in job.out.stem else "1000")


def tuning(tmp_path: Path, *words: object) -> Any:
    required = ["--policies", "p", "--work", tmp_path / "work", "--out", tmp_path / "out", "--device", "cpu"]
    return TUNING["parse"]([str(word) for word in (*required, *words)])


def test_every_row_of_settings_is_trained_and_scored_on_the_same_starts(tmp_path: Path) -> None:
    options = tuning(tmp_path, "--models", 0, 4)
    jobs = TUNING["jobs"](options, HUMANOID["Places"](options.work))
    assert [job.kind for job in jobs] == ["collect", *["fit"] * len(TUNING["ENSEMBLES"]), *["train", "study"] * 2]
    assert all(set(job.needs) <= {other.out for other in jobs} for job in jobs)
    assert all(jobs[0].out in job.needs for job in jobs if job.kind in ("train", "fit")), "data comes first"
    commands = [dict(zip(job.command[5::2], job.command[6::2], strict=False)) for job in jobs]
    trained = commands[-2]
    assert trained["--model.width"] == "256" and trained["--train.optimizer"] == "adam"
    assert trained["--train.steps"] == "24305" and trained["--tokens.num_bins"] == "100"
    for words in (commands[-1], commands[-3]):
        assert words["--starts"] == "16" and words["--seed"] == "1000" and words["--context"] == "9"


def test_the_experiment_uses_the_ensemble_with_the_best_likelihood() -> None:
    result = json.loads((RESULTS / "humanoid_tuning.json").read_text())
    best = max(result["ensembles"], key=lambda each: each["metrics"]["mean_logp_policy"])
    settings = HUMANOID["ENSEMBLE"]
    assert {key: best["ensemble"][key] for key in settings} == settings
    assert len(result["ensembles"]) == len(TUNING["ENSEMBLES"])
    assert [each["model"] for each in result["models"]] == list(TUNING["MODELS"])


def test_the_table_of_settings_has_the_mean_over_all_steps(tmp_path: Path) -> None:
    options = tuning(tmp_path, "--models", 1)
    folder = options.work / "tuning"
    write_json(folder / "ensemble_2.json", {"ensemble": {}, "metrics": {"mean_logp_policy": -3.0}})
    write_json(folder / "tt_1" / "training.json", {"metrics": {"loss": 1.25}})
    curve = {"log_prob": [4.0, 1.0, None]}
    write_json(folder / "model_1.json", {"metrics": {"tt_logp_1": 4.0}, "curves": {"policy": {"tt": curve}}})
    TUNING["write_table"](options, 1.0)
    result = json.loads((tmp_path / "out" / "humanoid_tuning.json").read_text())
    assert result["metrics"] == {"ensemble_2_mean_logp": -3.0, "model_1_mean_logp": 2.5}
    assert result["models"][0]["loss"] == 1.25 and result["models"][0]["metrics"]["tt_logp_1"] == 4.0


def test_errors_of_one_step_are_those_of_known_models() -> None:
    rng = np.random.default_rng(0)
    matrix = np.array([[0.9, 0.2, 0.5], [0.0, 0.8, -0.3]])

    def play(steps: int) -> Episode:
        actions, states = rng.normal(size=(steps, 1)), np.zeros((steps + 1, 2))
        for step in range(steps):
            states[step + 1] = matrix @ np.concatenate([states[step], actions[step]]) + 0.7
        return Episode(states.astype(np.float32), actions.astype(np.float32), None, False)

    train, held_out = (Dataset((play(steps), play(steps))) for steps in (200, 50))
    errors = TUNING["one_step_errors"](lambda states, actions: states + 0.0 * actions, train, held_out)
    assert errors["one_step_mse"] == pytest.approx(errors["one_step_mse_no_change"])
    assert errors["one_step_mse_linear"] == pytest.approx(0.0, abs=1e-8)
    states = np.concatenate([episode.observations[:-1] for episode in train]).astype(np.float64)
    changes = np.concatenate([np.diff(episode.observations, axis=0) for episode in held_out])
    assert errors["one_step_mse_no_change"] == pytest.approx(float((changes**2 / states.var(axis=0)).mean()), rel=1e-5)


def study(shift: float, kinds: tuple[str, ...], suffix: str) -> dict[str, Any]:
    def curve(value: float) -> dict[str, list[float]]:
        keys = ("log_prob", "log_prob_stderr", "squared_error", "squared_error_stderr")
        return {key: [value] * 10 + [value - 1.0, value + 1.0] for key in keys}

    names = {"tt": 3.0 + shift, "markov": 2.0, "pets": 2.5}
    metrics = {f"{name}_logp_12{suffix}": value + 1.0 for name, value in names.items()} | {f"oracle_logp{suffix}": 9.0}
    curves = {kind: {name: curve(value) for name, value in names.items()} for kind in kinds}
    return {"metrics": metrics, "curves": curves, "settings": {}, "starts": [], "ranges": [], "num_bins": []}


def test_the_summary_is_the_mean_over_seeds(tmp_path: Path) -> None:
    options, places, _ = parsed(tmp_path, "--seeds", 2, "--horizon", 12)
    for seed, kinds in ((0, ("policy", "recorded")), (1, ("policy",))):
        write_json(places.study("observed", seed), study(2.0 * seed, kinds, ""))
    HUMANOID["write_summary"](options, places, 1.0)
    result = json.loads((tmp_path / "out" / "humanoid.json").read_text())
    metrics = result["metrics"]
    assert metrics["seconds_total"] == 1.0
    assert metrics["tt_logp_12"] == 5.0 and metrics["tt_logp_12_stderr"] == pytest.approx(1.0)
    assert metrics["oracle_logp"] == 9.0 and metrics["tt_below_oracle_12"] == 4.0
    assert metrics["steps_tt_above_pets"] == 1.0
    assert result["observed"]["curves"]["policy"]["tt"]["log_prob"][-1] == 5.0
    recorded = result["observed"]["curves"]["recorded"]["tt"]
    assert recorded["log_prob"][-1] == 4.0
    assert recorded["log_prob_stderr"] == [None] * 12, "one training seed says nothing about others"
    assert "masked" not in result, "its studies are missing"
    assert (tmp_path / "out" / "humanoid.png").is_file()


def test_the_time_of_interrupted_commands_adds_up(tmp_path: Path) -> None:
    assert spent(tmp_path / "seconds.json", 10.0) == 10.0
    assert spent(tmp_path / "seconds.json", 5.5) == 15.5


def test_the_time_of_a_command_that_fails_counts(tmp_path: Path) -> None:
    work = tmp_path / "work"
    with pytest.raises(SystemExit, match="failed"):  # there are no policies
        HUMANOID["main"](["--policies", str(tmp_path / "none"), "--work", str(work), "--device", "cpu"])
    assert json.loads((work / "seconds.json").read_text()) > 0.0


def test_references_of_a_start_are_equal_up_to_a_step_and_differ_after_it(tmp_path: Path, policies: Path) -> None:
    pytest.importorskip("mujoco")
    options, places, _ = parsed(tmp_path, "--policies", policies, "--starts", 2, "--visits", 2, "--horizon", 5)
    episode = Episode(np.zeros((2, 45), dtype=np.float32), np.zeros((1, 17), dtype=np.float32), None, False)
    rewarded = Episode(episode.observations, episode.actions, np.zeros(1, dtype=np.float32), False)
    save_npz(Dataset((rewarded,)), places.data("held_out"))
    HUMANOID["collect_references"](options, places)
    dataset = load_npz(places.data("references"))
    assert len(dataset) == 4 and dataset.observation_dim == 45
    starts = find_starts(dataset.episodes, count=4, horizon=5, context=9, seed=0)
    assert len(starts) == 2
    for start in starts:
        assert start.visited.shape == (2, 5, 45) and len(start.past_states) == 9
        assert (start.visited[0] != start.visited[1]).any(axis=1).all()
        assert start.step + 5 == len(dataset.episodes[start.episode])


def test_futures_that_were_played_are_likely_where_they_went(tmp_path: Path, policies: Path) -> None:
    pytest.importorskip("mujoco")
    words = ["--policies", policies, "--out", tmp_path, "--workers", 1, "--starts", 1, "--visits", 3, "--horizon", 4]
    stored = json.loads((RESULTS / "humanoid_eight_starts_seed0.json").read_text())
    write_json(tmp_path / "study.json", {key: stored[key] for key in ("ranges", "num_bins")})
    words += ["--samples", 60, "--reference_seed", 3, "--study", tmp_path / "study.json"]
    assert CEILING["main"]([str(word) for word in words]) == 0
    result = json.loads((tmp_path / "humanoid_ceiling.json").read_text())
    assert result["metrics"]["oracle_logp"] == pytest.approx(stored["metrics"]["oracle_logp"])
    assert result["starts"][0]["visits"] == 3
    assert result["metrics"]["simulator_binned_logp_1"] < result["metrics"]["simulator_logp_1"]
    log_prob = result["curves"]["simulator"]["log_prob"]
    assert len(log_prob) == 4 and result["metrics"]["oracle_logp"] > log_prob[0] > log_prob[3] > 0.0


def test_states_are_drawn_from_the_bins_of_a_start() -> None:
    rng, edges = np.random.default_rng(0), [np.array([0.0, 1.0, 3.0]), np.array([5.0])]
    drawn = np.stack([drawn_from_bins(np.array([1.5, 5.0]), edges, rng) for _ in range(200)])
    assert (drawn[:, 1] == 5.0).all() and drawn[:, 0].min() >= 1.0 and drawn[:, 0].max() <= 3.0
    assert np.ptp(drawn[:, 0]) > 1.8


def test_an_episode_from_narrow_bins_continues_like_a_visit(tmp_path: Path, policies: Path) -> None:
    pytest.importorskip("mujoco")
    options, _, _ = parsed(tmp_path, "--policies", policies, "--horizon", 3, "--reference_seed", 3)
    branch, visits = branch_of(options, 0), play_visits(options, 0, range(4))
    state = visits[0].observations[branch].astype(np.float64)
    narrow = [np.array([value - 1e-9, value + 1e-9]) for value in state]
    for visit, begun in zip(visits, play_from_bins(options, 0, range(4), narrow), strict=True):
        np.testing.assert_allclose(begun.observations, visit.observations[branch:], atol=1e-3)
        np.testing.assert_allclose(begun.actions, visit.actions[branch:], atol=1e-4)
    wide = [np.array([value - 0.01, value + 0.01]) for value in state]
    first, second = play_from_bins(options, 0, (1, 2), wide)
    assert 1e-3 < np.abs(first.observations[0] - state).max() <= 0.0101
    assert np.abs(first.observations[0] - second.observations[0]).max() > 1e-3


def test_played_futures_are_what_follows_the_start_of_each_episode() -> None:
    states = np.arange(12, dtype=np.float32).reshape(6, 2)
    episodes = [Episode(states, np.zeros((5, 1), dtype=np.float32), None, False)]
    episodes.append(Episode(states[:4] + 100.0, np.zeros((3, 1), dtype=np.float32), None, True))
    futures = CEILING["PlayedFutures"]({states[2].tobytes(): (episodes, 2)})
    past = Past(np.zeros((1, 0, 2), dtype=np.float32), np.zeros((1, 0, 1), dtype=np.float32))
    found = futures.predict(states[2:3], past, None, 3, 2)
    np.testing.assert_array_equal(found.states[0, 0], states[3:6])
    np.testing.assert_array_equal(found.states[0, 1, 0], states[3] + 100.0)
    np.testing.assert_array_equal(found.ended[0], [[False, False, False], [False, True, True]])


def test_flags_that_nothing_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        parsed(tmp_path, "--search.horizon", 3)
    for rows in (["--models", 5], ["--ensembles", -1]):
        with pytest.raises(SystemExit):
            tuning(tmp_path, *rows)


def test_one_future_of_each_predictor_begins_at_the_first_start(tmp_path: Path) -> None:
    options, places, _ = parsed(tmp_path, "--horizon", 4, "--context", 2)
    rng = np.random.default_rng(0)
    episodes = tuple(
        Episode(
            rng.normal(size=(13, 3)).astype(np.float32),
            rng.normal(size=(12, 1)).astype(np.float32),
            np.zeros(12, dtype=np.float32),
            terminated=False,
        )
        for _ in range(4)
    )
    for name in ("train", "references"):
        save_npz(Dataset(episodes), places.data(name))
    small = ["--model.window", 3, "--model.num_layers", 1, "--model.num_heads", 1, "--model.width", 8]
    small += ["--tokens.num_bins", 8, "--tokens.discretizer", "uniform", "--tokens.rewards", "false"]
    words = ["train", places.data("train"), "--out", places.run("tt", "observed", 0), "--train.steps", 1, *small]
    assert tt([str(word) for word in (*words, "--device", "cpu")]) == 0
    words = ["pets", places.data("train"), "--out", places.run("pets", "observed", 0), "--ensemble.epochs", 1]
    words += ["--ensemble.num_networks", 2, "--ensemble.num_elites", 2, "--ensemble.width", 8, "--device", "cpu"]
    assert tt([str(word) for word in words]) == 0
    HUMANOID["sample_futures"](options, places)
    start = find_starts(episodes, count=1, horizon=4, context=2, seed=0)[0]
    with np.load(places.futures) as file:
        assert set(file) == {"reality", "tt", "pets"}
        for name in file:
            assert file[name].shape == (5, 3)
            np.testing.assert_allclose(file[name][0], start.state)
        np.testing.assert_allclose(file["reality"][1:], start.visited[0])
        assert not np.array_equal(file["tt"], file["pets"])


def strip() -> dict[str, Any]:
    pytest.importorskip("mujoco")
    return runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "humanoid_strip.py"))


def test_states_become_positions_and_the_root_follows_its_velocity() -> None:
    make = strip()["place"]
    model = pytest.importorskip("gymnasium").make("Hopper-v5").unwrapped.model  # six positions, six velocities
    states = np.arange(33, dtype=np.float64).reshape(3, 11) / 10
    positions = make(model, states, 0.5)
    np.testing.assert_array_equal(positions[:, 1:], states[:, :5])
    np.testing.assert_allclose(positions[:, 0], [0.0, 0.5 * 0.5, 0.5 * 0.5 + 0.5 * 1.6])
    states[1, 4] = 1e30
    assert len(make(model, states, 0.5)) == 1, "a diverged future ends"
    with pytest.raises(SystemExit, match="states of 10 or 11 dimensions are needed, got 7"):
        make(model, states[:, :7], 0.5)


def test_paths_are_drawn_where_the_bodies_are(tmp_path: Path) -> None:
    script = strip()
    mujoco = pytest.importorskip("mujoco")
    model = pytest.importorskip("gymnasium").make("Hopper-v5").unwrapped.model
    try:
        side = script["Side"](model, -1.0, 4.0)
    except Exception as error:  # drivers raise exceptions of their own
        pytest.skip(f"no offscreen OpenGL here: {error}")
    poses = np.zeros((2, 6))
    poses[:, 0], poses[:, 1] = (0.0, 3.0), 1.25
    data = mujoco.MjData(model)
    data.qpos[:] = poses[0]
    mujoco.mj_forward(model, data)
    points = script["trace"](model, poses, ["torso_geom", "foot_geom"])
    np.testing.assert_allclose(points[0, 0], data.geom("torso_geom").xpos)
    np.testing.assert_allclose(points[1] - points[0], [[3.0, 0.0, 0.0]] * 2, atol=1e-9)
    picture, alone = side.draw(poses), side.draw(poses[:1])
    changed = (picture != alone).any(axis=2)
    column, row = side.pixels(points[1, 0])
    assert changed[round(row), round(column)] and not changed[:, : round(side.width / 2)].any()
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    assert abs(rows[-1] - side.pixels(points[1, 1])[1]) < 20, "the foot is lowest"
    assert abs((columns[0] + columns[-1]) / 2 - side.pixels(points[1]).mean(axis=0)[0]) < 20
    side.close()
