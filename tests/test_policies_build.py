"""Actor files from public repositories: values by hand from small files of the same formats; hostile ones refused."""

import hashlib
import io
import json
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.policies import build
from benchmarks.policies.build import SOURCES, actor_file
from trajectory_transformer.actors import make_script, parse_actor
from trajectory_transformer.data.spaces import action_leaf

HOPPER, ARS, SAC, PPO = "hopper-expert-berkeley", "hopper-expert-ars", "hopper-medium-sac", "walker2d-medium-ppo-t075"


def old_pickle(value: object) -> bytes:
    """A pickle as older versions of NumPy wrote it."""
    return pickle.dumps(value, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write(repository: Path, name: str, content: bytes) -> None:
    path = repository / SOURCES[name].path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def berkeley(inputs: int, actions: int) -> bytes:
    """An expert of the course with random weights of 4 hidden units."""
    rng = np.random.default_rng(0)
    sizes = [(inputs, 4), (4, 4), (4, actions)]
    layers = [{"AffineLayer": {"W": rng.normal(size=size), "b": rng.normal(size=(1, size[1]))}} for size in sizes]
    mean = rng.normal(size=(1, inputs))
    policy = {
        "hidden": {"FeedforwardNet": {"layer_0": layers[0], "layer_2": layers[1]}},
        "out": layers[2],
        "logstdevs_1_Da": rng.normal(size=(1, actions)),
        "obsnorm": {"Standardizer": {"mean_1_D": mean, "meansq_1_D": mean**2 + 4.0}},
    }
    return old_pickle({"GaussianPolicy": policy, "nonlin_type": "tanh"})


def zipped(weights: dict[str, torch.Tensor]) -> bytes:
    """A Stable-Baselines3 file with its settings and weights."""
    saved, content = io.BytesIO(), io.BytesIO()
    torch.save(OrderedDict(weights), saved)
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("data", json.dumps({"policy_kwargs": {}}))
        archive.writestr("policy.pth", saved.getvalue())
    return content.getvalue()


def normalisation(monkeypatch: pytest.MonkeyPatch, mean: list[float], var: list[float]) -> bytes:
    """A `vecnormalize.pkl`: objects of classes of Stable-Baselines3."""
    made: dict[str, Any] = {}
    for module, name in (("running_mean_std", "RunningMeanStd"), ("vec_env.vec_normalize", "VecNormalize")):
        full = f"stable_baselines3.common.{module}"
        made[name] = type(name, (), {"__module__": full})
        stand_in = ModuleType(full)
        setattr(stand_in, name, made[name])
        monkeypatch.setitem(sys.modules, full, stand_in)
    rms, norm = made["RunningMeanStd"](), made["VecNormalize"]()
    rms.__dict__.update(mean=np.array(mean), var=np.array(var), count=3.0)
    norm.__dict__.update(obs_rms=rms, epsilon=1e-8, clip_obs=10.0, num_envs=np.float64(2.0))
    return old_pickle(norm)


def tensors_of(content: bytes, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    path.write_bytes(content)
    with safe_open(str(path), "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_an_expert_of_the_course_acts_as_its_weights_say(tmp_path: Path) -> None:
    write(tmp_path, HOPPER, berkeley(11, 3))
    path = tmp_path / "actor.safetensors"
    path.write_bytes(actor_file(HOPPER, tmp_path))
    space = action_leaf(gymnasium.spaces.Box(-1, 1, (3,)))
    observation = np.linspace(-1, 1, 11, dtype=np.float32)
    act = make_script(parse_actor(str(path)), "Hopper-v5", space, 11)
    found = act(observation, np.zeros(0, np.float32), np.random.default_rng(0))
    policy = pickle.loads(berkeley(11, 3))["GaussianPolicy"]
    x = (observation - policy["obsnorm"]["Standardizer"]["mean_1_D"]) / (2 + 1e-6)
    for layer in policy["hidden"]["FeedforwardNet"].values():
        x = np.tanh(x @ layer["AffineLayer"]["W"] + layer["AffineLayer"]["b"])
    out = policy["out"]["AffineLayer"]
    np.testing.assert_allclose(found, np.clip(x @ out["W"] + out["b"], -1, 1)[0], rtol=1e-4)


def test_inputs_that_current_environments_lack_are_dropped(tmp_path: Path) -> None:
    write(tmp_path, "humanoid-expert-berkeley", berkeley(376, 17))
    found, metadata = tensors_of(actor_file("humanoid-expert-berkeley", tmp_path), tmp_path / "a.safetensors")
    kept = found["obs_index_v4"]
    assert found["layer0.weight"].shape == (4, 348) and not {45, 54, 185, 269, 297} & set(kept.tolist())
    whole = pickle.loads(berkeley(376, 17))["GaussianPolicy"]["hidden"]["FeedforwardNet"]["layer_0"]["AffineLayer"]["W"]
    np.testing.assert_array_equal(found["layer0.weight"][:, 0], whole[kept[0]].astype(np.float32))
    masses = np.flatnonzero(np.isin(kept, 64 + 10 * np.arange(13)))
    assert not found["layer0.weight"][:, masses].any() and (found["obs_std"][masses] == 1).all()
    assert [each["obs_index"] for each in json.loads(metadata["envs"])] == [None, "obs_index_v4"]
    assert found["action_low"].tolist() == pytest.approx([-0.4] * 17)


def test_a_clock_is_frozen_into_the_first_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {
        "log_std": torch.zeros(6),
        "mlp_extractor.policy_net.0.weight": torch.arange(36.0).reshape(2, 18),
        "mlp_extractor.policy_net.0.bias": torch.tensor([1.0, 2.0]),
        "mlp_extractor.value_net.0.weight": torch.ones(2, 18),
        "action_net.weight": torch.ones(6, 2),
        "action_net.bias": torch.zeros(6),
    }
    write(tmp_path, PPO, zipped(weights))
    folder = (tmp_path / SOURCES[PPO].path).parent / "Walker2d-v3"
    folder.mkdir()
    (folder / "vecnormalize.pkl").write_bytes(normalisation(monkeypatch, [0.0] * 17 + [0.5], [1.0] * 17 + [0.25]))
    found, metadata = tensors_of(actor_file(PPO, tmp_path), tmp_path / "a.safetensors")
    # (0.75 - 0.5) / 0.5 = 0.5 of the last column, 17 and 35
    np.testing.assert_allclose(found["layer0.bias"], [1 + 8.5, 2 + 17.5], rtol=1e-6)
    assert found["layer0.weight"].tolist() == weights["mlp_extractor.policy_net.0.weight"][:, :17].tolist()
    assert found["obs_std"].shape == (17,) and metadata["clip_obs"] == "10.0" and metadata["activation"] == "tanh"
    assert set(found) >= {"log_std", "layer1.weight"} and "layer2.weight" not in found


def test_squashed_and_linear_policies_keep_their_kind(tmp_path: Path) -> None:
    hidden = {
        f"actor.latent_pi.{i}.{part}": torch.ones(2, 11)[: 2 if part == "weight" else 1]
        for i in (0, 2)
        for part in ("weight", "bias")
    }
    heads = {f"actor.{head}.{part}": torch.ones(3) for head in ("mu", "log_std") for part in ("weight", "bias")}
    write(tmp_path, SAC, zipped({**hidden, **heads, "critic.qf0.weight": torch.ones(1)}))
    found, metadata = tensors_of(actor_file(SAC, tmp_path), tmp_path / "a.safetensors")
    assert (metadata["squash"], metadata["activation"], metadata["n_layers"]) == ("tanh", "relu", "3")
    assert "log_std_layer.weight" in found and "obs_mean" not in found
    write(tmp_path, ARS, zipped({"action_net.weight": torch.ones(3, 11)}))
    found, metadata = tensors_of(actor_file(ARS, tmp_path), tmp_path / "a.safetensors")
    assert (metadata["squash"], metadata["activation"], metadata["n_layers"]) == ("clip", "none", "1")
    assert found["layer0.bias"].tolist() == [0, 0, 0]


class Shell:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_a_command_is_refused(tmp_path: Path, protocol: int) -> None:
    command = f"touch {tmp_path / 'ran'}"
    write(tmp_path, HOPPER, pickle.dumps({"GaussianPolicy": Shell(command)}, protocol=protocol))
    with pytest.raises(ValueError, match=r"Hopper-v2.pkl: not a policy of the expected format .* names \w+\.system"):
        actor_file(HOPPER, tmp_path)
    saved, content = io.BytesIO(), io.BytesIO()
    torch.save({"action_net.weight": Shell(command)}, saved)
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("data", "{}")
        archive.writestr("policy.pth", saved.getvalue())
    write(tmp_path, ARS, content.getvalue())
    with pytest.raises(ValueError, match=r"names \w+\.system"):
        actor_file(ARS, tmp_path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Shell(command), protocol=protocol))
    assert (tmp_path / "ran").exists(), "the pickle must be one that runs"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (old_pickle(np.array([{}], dtype=object)), "arrays must hold numbers, got type 'O8'"),
        (b"cnumpy\nndarray\n(tR.", "NoneType"),
        (b"cbuiltins\ngetattr\n(tR.", r"names builtins\.getattr"),
        (b"c_codecs\nencode\n(S'a'\nS'utf_16'\ntR.", "latin1"),
        (b"S'x'\nQ.", "outside of the file"),
        (berkeley(11, 3)[:400], "not a policy of the expected format"),
        (b"", "not a policy of the expected format"),
    ],
    ids=["objects", "called type", "getattr", "codec", "persistent", "truncated", "empty"],
)
def test_other_hostile_or_broken_pickles_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    write(tmp_path, HOPPER, content)
    with pytest.raises(ValueError, match=message):
        actor_file(HOPPER, tmp_path)


def test_a_tensor_must_lie_within_its_storage(tmp_path: Path) -> None:
    write(tmp_path, ARS, zipped({"action_net.weight": torch.ones(11, 3).T}))
    with pytest.raises(ValueError, match="in row order"):
        actor_file(ARS, tmp_path)


def test_only_files_with_the_recorded_sum_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, HOPPER, berkeley(11, 3))
    (tmp_path / "LICENSE").write_text("terms")
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["build.py", HOPPER, "--berkeley", str(tmp_path), "--out", str(out)])
    assert build.main() == 2
    assert "expected SHA-256" in capsys.readouterr().err and not out.exists()
    sums = tmp_path / "sums.json"
    sums.write_text(json.dumps({HOPPER: hashlib.sha256(actor_file(HOPPER, tmp_path)).hexdigest()}))
    monkeypatch.setattr(build, "SUMS", sums)
    assert build.main() == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "berkeleydeeprlcourse-homework.LICENSE",
        f"{HOPPER}.safetensors",
    ]


def test_every_actor_has_a_recorded_sum() -> None:
    sums = json.loads(build.SUMS.read_text())
    assert set(sums) == set(SOURCES) and all(len(value) == 64 for value in sums.values())


def test_names_and_repositories_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["nobody", "--dlr", str(tmp_path)], "no actor 'nobody'"),
        ([HOPPER, "--dlr", str(tmp_path)], "needs --berkeley FOLDER"),
        ([], "name a copy of a repository"),
        (["--dlr", str(tmp_path)], "No such file"),
    ):
        monkeypatch.setattr(sys, "argv", ["build.py", *words, "--out", str(tmp_path / "out")])
        assert build.main() == 2
        assert message in capsys.readouterr().err
