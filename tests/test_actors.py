"""Policies that collect data: their actions, their noise, and errors for policies that do not fit."""

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from safetensors import safe_open
from safetensors.numpy import save_file

from trajectory_transformer.actors import ActorSpec, make_script, parse_actor
from trajectory_transformer.data.episode import FloatArray
from trajectory_transformer.data.spaces import Leaf

BOX = Leaf((), spaces.Box(np.array([-1.0, -2.0], np.float32), np.array([1.0, 4.0], np.float32)))
NO_GOAL = np.zeros(0, dtype=np.float32)


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """An actor file with two layers that reads the last two of three observations and has a wide Gaussian."""
    tensors = {
        "layer0.weight": np.array([[1.0, 0.0], [0.0, -1.0]], np.float32),
        "layer0.bias": np.array([0.0, 1.0], np.float32),
        "layer1.weight": np.array([[2.0, 0.0], [0.0, 10.0]], np.float32),
        "layer1.bias": np.array([0.5, 0.0], np.float32),
        "log_std": np.log(np.array([0.1, 0.2], np.float32)),
        "action_low": np.array([-1.0, -2.0], np.float32),
        "action_high": np.array([1.0, 4.0], np.float32),
        "obs_mean": np.array([1.0, 0.0]),
        "obs_std": np.array([2.0, 1.0]),
        "tail": np.array([1, 2]),
    }
    meta = {"envs": '[{"id": "Toy-v0", "kwargs": {}, "obs_index": "tail"}]', "n_layers": "2", "activation": "relu"}
    path = tmp_path / "toy.safetensors"
    save_file(tensors, path, {**meta, "clip_obs": "5.0", "squash": "clip"})
    return path


def act(text: str, observation: list[float], seed: int = 0, leaf: Leaf = BOX, env: str = "Toy-v0") -> FloatArray:
    script = make_script(parse_actor(text), env, leaf, len(observation))
    return np.asarray(script(np.array(observation, np.float32), NO_GOAL, np.random.default_rng(seed)))


def test_actor_files_are_networks_of_normalised_observations(actor: Path) -> None:
    # (0.5 - 1) / 2 = -0.25 -> relu 0 -> 0.5; -(-0.2) + 1 = 1.2 -> 12, clipped to 4
    np.testing.assert_allclose(act(str(actor), [9.0, 0.5, -0.2]), [0.5, 4.0])
    # (1.2 - 1) / 2 = 0.1 -> 0.7; -0.95 + 1 = 0.05 -> 0.5
    np.testing.assert_allclose(act(str(actor), [9.0, 1.2, 0.95]), [0.7, 0.5], rtol=1e-5)


def test_stochastic_actors_sample_their_gaussian(actor: Path) -> None:
    actions = np.array([act(f"{actor} sto", [9.0, 0.5, 0.95], seed) for seed in range(400)])
    np.testing.assert_allclose(actions.mean(axis=0), [0.5, 0.5], atol=0.04)
    np.testing.assert_allclose(actions.std(axis=0), [0.1, 0.2], rtol=0.15)


def test_noise_is_added_after_clipping_and_clipped_again(actor: Path) -> None:
    # The mean of the second action is 12, far above its limit of 4: noise added before clipping would have no effect.
    actions = np.array([act(f"{actor} sigma=0.1", [9.0, 0.5, -0.2], seed)[1] for seed in range(400)])
    assert actions.max() == 4.0
    assert 0.4 < (actions < 4.0).mean() < 0.6
    below = 4.0 - actions[actions < 4.0]  # half a Gaussian of 0.1 times half the range of 6
    assert below.mean() == pytest.approx(0.3 * np.sqrt(2 / np.pi), rel=0.15)


def test_eps_replaces_actions_by_uniformly_random_ones(actor: Path) -> None:
    actions = np.array([act(f"{actor} eps=0.5", [9.0, 0.5, -0.2], seed) for seed in range(400)])
    assert 0.4 < (actions[:, 1] == 4.0).mean() < 0.6
    assert actions[:, 0].min() < -0.9 and actions[:, 1].min() < -1.8


def test_random_actions_cover_all_categories_of_a_discrete_space() -> None:
    leaf = Leaf((), spaces.Discrete(3, start=5))
    seen = {act("random", [0.0], seed, leaf).tolist()[0] for seed in range(40)}
    assert seen == {0.0, 1.0, 2.0}  # relative to the start of the space


def test_options_are_parsed_and_files_found_in_the_folder(actor: Path) -> None:
    spec = parse_actor("toy stochastic sigma=0.3 share=0.25", actor.parent)
    assert spec == ActorSpec(name=str(actor), mode="sto", sigma=0.3, share=0.25)
    assert spec.label == "toy sto sigma=0.3"
    known = spec.provenance()
    assert known["file"] == "toy.safetensors" and len(str(known["sha256"])) == 64
    assert parse_actor("random").label == "random"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            "nobody",
            "policy 'nobody': not one of random, .* no such file here; give the folder of actor files with --policies",
        ),
        (
            "random sigme=1",
            "an option must be det, sto or NAME=NUMBER with NAME one of sigma, eps, share, .*, got 'sigme=1'",
        ),
        ("random sigma=much", "an option must be det, sto or NAME=NUMBER .*, got 'sigma=much'"),
        ("random eps=2", r"policy random: eps must lie in \[0, 1\], got 2"),
        ("random stray=2", r"policy random: stray must lie in \[0, 1\], got 2"),
        ("random wander=-1", r"policy random: wander must lie in \[0, 1\], got -1"),
        ("random noise=-1", "policy random: noise must be finite and at least 0, got -1"),
        ("no_such_module:act", r"policy no_such_module:act: cannot be imported \(ModuleNotFoundError: No module named"),
        (
            "demonstrator",
            "policy demonstrator: supports only tt/FourRooms-v0 .* got environment Toy-v0; use policy random",
        ),
    ],
)
def test_text_that_names_no_policy_is_refused(text: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        act(text, [0.0])


@pytest.mark.parametrize(
    ("text", "space", "message"),
    [
        (
            "random sigma=0.1",
            spaces.Discrete(3),
            "policy random sigma=0.1: sigma needs a continuous action space, got Di",
        ),
        (
            "builtins:print eps=0.5",
            spaces.Box(0, np.inf, (2,)),
            "policy builtins:print det eps=0.5: sigma and eps need a bounded action space, got Box",
        ),
        ("random", spaces.Box(0, np.inf, (2,)), "policy random: needs a bounded action space, got Box"),
    ],
)
def test_errors_about_spaces_say_got_once(text: str, space: spaces.Space[Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        act(text, [0.0], leaf=Leaf((), space))
    assert str(caught.value).startswith(message)
    assert str(caught.value).count("got") == 1


def test_actors_for_other_environments_and_broken_files_are_refused(actor: Path) -> None:
    with pytest.raises(ValueError, match=r"toy\.safetensors: made for Toy-v0, got environment Hopper-v5"):
        act(str(actor), [0.0] * 3, env="Hopper-v5")
    with pytest.raises(
        ValueError, match=r"toy\.safetensors: the network has 2 inputs, which do not fit the 2 observation dim"
    ):
        act(str(actor), [0.0] * 2)
    actor.write_bytes(actor.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"toy\.safetensors: not a complete actor file"):
        act(str(actor), [0.0] * 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer1.weight": np.ones((2, 3), np.float32)}, "layer 1 must have 2 inputs, got"),
        ({"layer0.bias": np.array([0.0, np.nan], np.float32)}, r"layer0\.bias must be finite"),
        ({"action_low": np.zeros(3, np.float32)}, "action_low must have shape"),
        ({"action_low": np.full(2, 9, np.float32)}, "action_low must not exceed action_high"),
        ({"obs_std": np.zeros(2)}, "obs_std must be above 0"),
        ({"obs_std": None}, "obs_mean and obs_std belong together"),
        ({"log_std": np.zeros(1, np.float32)}, "log_std must have shape"),
        ({"tail": np.array([0.5, 1.0])}, "2 inputs, which do not fit the 3 observation"),
        ({"tail": np.array([-1, 1])}, "2 inputs, which do not fit the 3 observation"),
        ({"n_layers": "0"}, "n_layers must be the number of layers"),
        ({"n_layers": "99999999999"}, "n_layers must be the number of layers"),
        ({"envs": "[1, 2]"}, "not a complete actor file"),
        ({"envs": "{}"}, "made for , got environment Toy-v0"),
        ({"clip_obs": "nan"}, "clip_obs must be above 0"),
        ({"activation": "gelu"}, "not a complete actor file"),
    ],
)
def test_an_actor_file_that_cannot_act_is_refused_by_name(actor: Path, change: dict[str, Any], reason: str) -> None:
    with safe_open(str(actor), "np") as file:
        meta, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    name, value = next(iter(change.items()))
    (meta if isinstance(value, str) else tensors)[name] = value
    save_file({key: each for key, each in tensors.items() if each is not None}, actor, meta)
    with pytest.raises(ValueError, match=rf"toy\.safetensors: .*{reason}"):
        act(f"{actor} sto", [9.0, 0.5, 0.95])


def test_functions_are_imported_by_name_and_their_actions_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_actors.py").write_text(
        "import numpy as np\n"
        "def good(observation, goal, rng):\n    return np.array([observation[0], 0.0])\n"
        "def long(observation, goal, rng):\n    return np.zeros(3)\n"
        "def large(observation, goal, rng):\n    return np.array([0.0, 4.5])\n"
        "def lost(observation, goal, rng):\n    return np.array([0.0, np.nan])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    np.testing.assert_array_equal(act("my_actors:good", [0.5]), [0.5, 0.0])
    with pytest.raises(ValueError, match=r"policy my_actors:long det: .* 2 dimensions to fit Box.*got shape \(3,\)"):
        act("my_actors:long", [0.5])
    for name in ("large", "lost"):
        with pytest.raises(ValueError, match=rf"policy my_actors:{name} det: an action must lie in Box"):
            act(f"my_actors:{name}", [0.5])


def test_stable_baselines_policies_act_as_in_stable_baselines(tmp_path: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    env = gymnasium.make("CartPole-v1")
    model = sb3.PPO("MlpPolicy", env, n_steps=8, batch_size=8, device="cpu", seed=0)
    model.save(tmp_path / "pole.zip")
    leaf = Leaf((), env.action_space)
    observation = [0.01, -0.5, 0.02, 0.6]
    expected, _ = model.predict(np.array(observation, np.float32), deterministic=True)
    text = f"{tmp_path / 'pole.zip'}"
    assert act(text, observation, leaf=leaf, env="CartPole-v1").tolist() == [float(expected)]
    first = [act(f"{text} sto", observation, seed, leaf, "CartPole-v1").tolist() for seed in range(12)]
    again = [act(f"{text} sto", observation, seed, leaf, "CartPole-v1").tolist() for seed in range(12)]
    assert first == again and len({*map(tuple, first)}) == 2
