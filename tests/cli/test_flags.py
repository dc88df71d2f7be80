"""Flags: successors of vanished ones, presets, nested settings, and commands that can be repeated."""

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajectory_transformer.cli import COMMANDS
from trajectory_transformer.cli.collect import Collect
from trajectory_transformer.cli.evaluate import Evaluate
from trajectory_transformer.cli.parser import RENAMED, Command, command_line, parse
from trajectory_transformer.cli.train import Train
from trajectory_transformer.config import PRESETS, ModelConfig, Sampler, SearchConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, save_npz

Run = Callable[..., tuple[int, str]]
Refused = Callable[..., None]


@pytest.mark.parametrize("flag", RENAMED)
@pytest.mark.parametrize("joined", [False, True])
def test_a_vanished_flag_names_its_successor(tt: Run, flag: str, joined: bool) -> None:
    command = "evaluate" if flag.startswith("search.") else "train"
    words = [f"--{flag}=1"] if joined else [f"--{flag}", "1"]
    assert tt(command, "x", *words) == (2, f"tt {command}: error: --{flag} {RENAMED[flag]}\n")


@pytest.mark.parametrize("flag", RENAMED)
def test_a_vanished_setting_in_a_config_file_names_its_successor(tt: Run, tmp_path: Path, flag: str) -> None:
    group, _, name = flag.partition(".")
    (tmp_path / "old.yaml").write_text(f"{group}: {{{name}: 1}}\n" if name else f"{group}: 1\n")
    command = "evaluate" if group == "search" else "train"
    expected = f"tt {command}: error: --{flag} {RENAMED[flag]} (settings of old.yaml)\n"
    assert tt(command, "x", "--config", "old.yaml") == (2, expected)


def test_successors_that_are_flags_exist() -> None:
    flags = {command: set(_flags(COMMANDS[command])) for command in ("train", "evaluate")}
    for old, text in RENAMED.items():
        command = "evaluate" if old.startswith("search.") else "train"
        for word in text.replace(":", " ").replace(",", " ").split():
            if word.startswith("--") and not word.startswith("--search.first_action"):
                assert word.removeprefix("--") in flags[command], (old, word)


def _flags(settings: Any, prefix: str = "") -> list[str]:
    """Dotted names of all settings of a dataclass."""
    names = []
    for field in dataclasses.fields(settings):
        names.append(prefix + field.name)
        if callable(field.default_factory) and dataclasses.is_dataclass(value := field.default_factory()):
            names += _flags(value, f"{prefix}{field.name}.")
    return names


samplers = st.builds(
    Sampler,
    temperature=st.floats(1e-6, 100.0),
    top_k=st.none() | st.integers(1, 1000),
    nucleus=st.none() | st.floats(1e-5, 1.0),
    middle=st.none() | st.floats(0.001, 1.0),
)
searches = st.builds(
    SearchConfig,
    beam_width=st.integers(1, 10**6),
    horizon=st.integers(3, 50),
    window=st.none() | st.integers(1, 50),
    action=samplers,
    first_action=st.none() | samplers,
    observation=samplers,
    imitate=st.sampled_from(["mode", "median"]),
    replan_every=st.integers(1, 3),
    backend=st.sampled_from(["auto", "fused-float32", "naive"]),
)
tokens = st.builds(
    TokenConfig,
    num_bins=st.integers(2, 1000),
    discretizer=st.sampled_from(["quantile", "uniform"]),
    goal_dims=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    rewards=st.booleans(),
    discount=st.floats(0.0, 0.999),
    termination_penalty=st.none() | st.floats(-1e6, 1e6),
    truncated=st.sampled_from(["stop", "continue"]),
)
trains = st.builds(
    TrainConfig,
    steps=st.none() | st.integers(1, 10**9),
    learning_rate=st.floats(1e-9, 1.0),
    warmup_steps=st.none() | st.integers(0, 10**6),
    optimizer=st.sampled_from(["adamw", "adam"]),
)
# File names with spaces, quotes and shell characters. A name that is a YAML value (null, 1, [a]) is read as that value.
names = st.text("ab c'$&;*\"é", min_size=1, max_size=12).filter(lambda text: text.strip() == text).map("x/{}".format)
paths = names.map(Path)


def again(name: str, command: Command, *, preset: str | None = None) -> Command:
    """What the recorded command parses to; a preset is recorded with it."""
    line = command_line(name, command) if preset is None else command_line(name, command, preset=preset)
    tt, *words = shlex.split(line)
    assert [tt, *words[: len(name.split())]] == ["tt", *name.split()]
    return parse(name, type(command), words[len(name.split()) :])


quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(
    st.builds(
        Evaluate,
        run=names,
        env=st.none() | names,
        env_options=st.none() | st.dictionaries(names, st.none() | st.booleans() | st.integers() | names, max_size=2),
        plan=st.sampled_from([None, "return", "imitate", "goal"]),
        discount=st.none() | st.floats(0.0, 1.0),
        out=st.none() | paths,
        search=searches,
    )
)
def test_the_command_of_an_evaluation_gives_back_its_settings(command: Evaluate) -> None:
    assert again("evaluate", command) == command


@quick
@given(
    st.builds(
        Train,
        dataset=st.none() | names,
        out=paths,
        shards=st.none() | paths,
        seed=st.integers(0, 2**40),
        log=st.sampled_from([None, "tensorboard", "wandb"]),
        tokens=tokens,
        model=st.builds(ModelConfig, window=st.integers(1, 99), dropout=st.floats(0.0, 0.99)),
        train=trains,
    )
)
def test_the_command_of_a_training_run_gives_back_its_settings(command: Train) -> None:
    assert again("train", command, preset="default") == dataclasses.replace(command, preset="default")


@quick
@given(st.builds(Collect, out=st.none() | names, policy=names | st.lists(names, min_size=1, max_size=3)))
def test_the_command_of_a_collection_gives_back_its_settings(command: Collect) -> None:
    assert again("collect", command) == command


def test_recorded_commands_repeat_training_and_evaluation(tt: Run, tiny_dataset: Dataset, tmp_path: Path) -> None:
    data = tmp_path / "my data.npz"
    save_npz(dataclasses.replace(tiny_dataset, metadata={"env": "Pendulum-v1"}), data)
    sizes = ["--model.window", 2, "--model.num_layers", 1, "--model.width", 16, "--tokens.num_bins", 4]
    train = [
        "train",
        data,
        "--preset",
        "paper",
        "--train.epochs",
        "null",
        "--train.steps",
        2,
        "--out",
        "my run",
        *sizes,
    ]
    assert tt(*train)[0] == 0
    stored = json.loads((tmp_path / "my run/run.json").read_text())
    _, _, *words = shlex.split(json.loads((tmp_path / "my run/training.json").read_text())["command"])
    repeated = parse("train", Train, words)
    assert isinstance(repeated, Train)
    assert (repeated.dataset, repeated.out) == (str(data), Path("my run"))
    for group in ("tokens", "model", "train"):
        found = json.loads(json.dumps(dataclasses.asdict(getattr(repeated, group))))
        assert found == stored[group], group


def test_a_recorded_evaluation_can_be_repeated(tt: Run, tmp_path: Path) -> None:
    options = '{"g": 9.0}'
    collect = ["--env", "Pendulum-v1", "--policy", "random", "--episodes", 1, "--env_options", options]
    assert tt("collect", *collect, "--out", "p.npz")[0] == 0
    sizes = ["--model.window", 2, "--model.num_layers", 1, "--model.width", 16, "--tokens.num_bins", 4]
    assert tt("train", "p.npz", "--train.steps", 1, "--train.batch_size", 2, "--out", "my run", *sizes)[0] == 0
    search = ["--search.beam_width", 1, "--search.horizon", 1, "--search.first_action.nucleus", 1.0]
    search += ["--search.action.nucleus", "null", "--search.action.middle", 0.5]
    choices: list[list[object]] = [[], ["--env_options", "{}"], ["--discount", 0.5]]
    for number, extra in enumerate(choices):
        code, text = tt("evaluate", "my run", "--episodes", 1, *search, *extra, "--out", f"{number}.json")
        assert code == 0, text
        result = json.loads((tmp_path / f"{number}.json").read_text())
        _, _, *words = shlex.split(result["command"])
        repeated = parse("evaluate", Evaluate, words)
        assert isinstance(repeated, Evaluate)
        assert (repeated.run, repeated.env, repeated.plan) == ("my run", "Pendulum-v1", "return")
        assert repeated.env_options == ({} if extra[:1] == ["--env_options"] else {"g": 9.0})
        assert repeated.discount == (0.5 if extra[:1] == ["--discount"] else None)
        assert json.loads(json.dumps(dataclasses.asdict(repeated.search))) == result["settings"]["search"]


def evaluated(*words: str) -> SearchConfig:
    """Search settings of `tt evaluate`."""
    command = parse("evaluate", Evaluate, words)
    assert isinstance(command, Evaluate)
    return command.search


def test_presets_give_defaults_that_flags_override(tmp_path: Path) -> None:
    paper = PRESETS["paper"].search
    assert evaluated("--preset", "paper") == evaluated("--preset=paper") == paper
    assert evaluated("--preset", "reference", "--preset", "paper") == paper
    changed = evaluated("--preset", "paper", "--search.action.nucleus", "0.5", "--search.horizon", "3")
    assert changed == dataclasses.replace(paper, horizon=3, action=Sampler(top_k=20, nucleus=0.5))
    path = tmp_path / "paper.yaml"
    path.write_text("preset: paper\nsearch: {horizon: 3}\n")
    assert evaluated("--config", str(path)) == evaluated(f"--config={path}") == dataclasses.replace(paper, horizon=3)
    assert evaluated("--config", str(path), "--preset", "default").action == Sampler(middle=0.4)


def test_a_filter_that_is_given_replaces_the_default_middle(tmp_path: Path) -> None:
    nucleus, path = Sampler(nucleus=0.8), tmp_path / "filter.yaml"
    assert evaluated().action == evaluated("--preset", "default").action == Sampler(middle=0.4)
    assert evaluated("--search.action.nucleus", "0.8").action == nucleus
    assert evaluated("--preset", "default", "--search.action.nucleus=0.8").action == nucleus
    assert evaluated("--search.action", "{nucleus: 0.8}").action == nucleus
    assert evaluated("--search", "{action: {top_k: 3}}").action == Sampler(top_k=3)
    path.write_text("search: {action: {nucleus: 0.8}}")
    assert evaluated("--config", str(path)).action == nucleus
    path.write_text("{nucleus: 0.8}")
    assert evaluated("--search.action", str(path)).action == nucleus
    both = evaluated("--search.action.nucleus", "0.8", "--search.action.middle", "0.4")
    assert both.action == Sampler(nucleus=0.8, middle=0.4)
    line = command_line("evaluate", Evaluate(run="run", search=both))
    assert line == "tt evaluate run --search.action.nucleus 0.8 --search.action.middle 0.4"
    assert evaluated("--search.action.temperature", "0.5").action == Sampler(temperature=0.5, middle=0.4)


def test_the_first_action_may_be_sampled_like_all_others() -> None:
    assert evaluated().first_action == evaluated("--preset", "small").first_action == Sampler()
    assert evaluated("--search.first_action", "null").first_action is None
    assert evaluated("--preset", "default", "--search.first_action", "null").first_action is None
    assert evaluated("--preset", "reference").first_action is None
    command = Evaluate(run="run", search=SearchConfig(first_action=None))
    assert command_line("evaluate", command) == "tt evaluate run --search.first_action null"


def test_config_files_set_nested_samplers(tmp_path: Path) -> None:
    path = tmp_path / "search.yaml"
    path.write_text(
        "search: {action: {nucleus: 0.7, top_k: 3}, first_action: {nucleus: 1.0}, observation: {top_k: null}}"
    )
    found = evaluated("--config", str(path), "--search.action.top_k", "null")
    first = Sampler(nucleus=1.0)
    assert found == SearchConfig(action=Sampler(nucleus=0.7), first_action=first, observation=Sampler())
    assert evaluated("--config", str(path), "--search.first_action", "null").first_action is None
    assert evaluated("--search.first_action", "{top_k: 2}").first_action == Sampler(top_k=2)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["--search.action", "null"], r"--search\.action: expected a YAML file or a mapping, got 'null'"),
        (["--search.action", "{nucleus: x}"], r"--search\.action\.nucleus: expected float or null, got x"),
        (["--search.action.nucleus", "2"], r"a sampler's nucleus must lie in \(0, 1\], got 2\.0"),
        (["--search.first_action", "5"], r"expected a mapping such as '\{nucleus: 0\.5\}' or null, got 5"),
        (["--search.first_action.nucleus", "x"], r"--search\.first_action\.nucleus: expected float or null, got x"),
        (["--search.first_action.nucleus", "5"], r"error: a sampler's nucleus must lie in \(0, 1\], got 5\.0$"),
        (["--search.first_action.nucles", "1"], r"unknown setting search\.first_action\.nucles; did you mean"),
        (
            ["--search.backend", "fast"],
            r"expected one of 'auto', 'fused', 'fused-float32', 'cached', 'cached-bfloat16', 'naive', got fast",
        ),
        (["--preset", "papr"], r"--preset: expected one of 'default', 'small', 'paper', .*, got papr"),
        (["--plan", "fly"], r"--plan: expected one of 'return', 'imitate', 'goal' or null, got fly"),
        (["--pre", "paper"], r"unrecognized arguments: --pre paper; did you mean --preset\?"),
        (["--env_options", "5"], r"--env_options: expected a mapping in braces or null, got 5"),
        (["--seed", "1.5"], r"--seed: expected int, got 1\.5"),
        (["extra"], r"unrecognized arguments: extra$"),
        (["--config", "null.yaml"], r"--search\.action: expected a mapping, got null; leave it out for the defaults"),
        (["--config", "broken.yaml"], r"broken\.yaml: not valid YAML \("),
        (["--config", "absent.yaml"], r"--config: File does not exist: .*absent\.yaml"),
    ],
)
def test_invalid_settings_get_one_plain_sentence(
    refused: Refused, tmp_path: Path, words: list[str], pattern: str
) -> None:
    (tmp_path / "null.yaml").write_text("search: {action: null}\n")
    (tmp_path / "broken.yaml").write_text("search: [\n")
    refused(pattern, "evaluate", "run", *words)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["demo", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["demo", "--goals", "0"], "--goals must be at least 1, got 0"),
        (["evaluate", "four-rooms", "--episodes", "0"], "error: --episodes must be at least 1, got 0"),
        (["evaluate", "four-rooms", "--num_envs", "0"], "error: --num_envs must be at least 1, got 0"),
        (["evaluate", "four-rooms", "--seed", "-1"], "error: --seed must not be negative, got -1"),
        (["train", "--shards", "nowhere"], "nowhere: no token shards there; name the dataset"),
        (
            ["collect", "--env_options", '{"x": 1}'],
            "'tt/FourRooms-v0' cannot be made: .* unexpected keyword argument 'x'",
        ),
        (["report", ".", "--into", "[nowhere.md]"], r"nowhere\.md: no such document"),
    ],
)
def test_mistakes_are_found_before_work_starts(
    refused: Refused, tmp_path: Path, words: list[str], pattern: str
) -> None:
    refused(pattern, *words)
    assert list(tmp_path.iterdir()) == []


def test_version_is_printed(tt: Run) -> None:
    assert tt("--version") == (0, "0.1.0\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_types_in_plain_words(tt: Run, name: str) -> None:
    code, text = tt(*name.split(), "--help")
    assert code == 0
    joined = " ".join(text.split())
    assert f"usage: tt {name}" in joined
    for raw in ("<class", "Optional[", "typing."):
        assert raw not in joined, raw


@pytest.mark.parametrize(
    ("words", "epochs", "steps"),
    [
        (["--preset", "reference"], None, 195_312),
        (["--preset", "reference", "--train.epochs", "3"], 3.0, None),
        (["--preset", "paper"], 80.0, None),
        (["--preset", "paper", "--train.steps=7"], None, 7),
    ],
)
def test_steps_and_epochs_replace_each_other_in_a_preset(
    words: list[str], epochs: float | None, steps: int | None
) -> None:
    parsed = parse("train", Train, words)
    assert isinstance(parsed, Train)
    assert (parsed.train.epochs, parsed.train.steps) == (epochs, steps)
