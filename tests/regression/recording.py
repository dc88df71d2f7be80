"""Record what training and planning compute at fixed seeds, so that a refactor can show that nothing changed.

    python tests/regression/recording.py OUT.npz [--device cuda] [--summary] [--against OLD.npz]

`tests/golden/recorded.npz` is the summary of a CPU recording on aarch64. It is recorded again only by a commit that
means to change what is computed. Bits depend on the machine: compare recordings of one machine exactly (`--against`),
and those of another with a tolerance (`test_recording.py`).
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from trajectory_transformer.config import ModelConfig, Sampler, SearchConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Dimension, Episode
from trajectory_transformer.gpu.backends import make_batch_maker, make_engine
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.planner import PlanKind, Planner, PlanTrace
from trajectory_transformer.rollout import Step
from trajectory_transformer.search.predict import predict
from trajectory_transformer.tokens.windows import tokenize
from trajectory_transformer.training.parallel import World
from trajectory_transformer.training.train import Trainer

Arrays = dict[str, npt.NDArray[np.generic]]

STEPS = 60
SIZE = 6  # cells of a map's side


def episode(rng: np.random.Generator, steps: int, *, terminated: bool, kind: str) -> Episode:
    """One random episode of a kind of layout."""
    if kind == "map":
        observations = rng.integers((SIZE, SIZE, 4), size=(steps + 1, 3)).astype(np.float32)
        actions = rng.integers(7, size=(steps, 1)).astype(np.float32)
        plan = (rng.random((2, SIZE, SIZE)) < 0.3).astype(np.uint8)
        return Episode(observations, actions, None, terminated, observations[-1, :2].copy(), {}, plan)
    observations = rng.normal(size=(steps + 1, 3)).cumsum(axis=0).astype(np.float32)
    if kind == "discrete":
        actions = rng.integers((4, 3), size=(steps, 2)).astype(np.float32)
    else:
        actions = np.clip(rng.normal(size=(steps, 2)), -1, 1).astype(np.float32)
    rewards = (observations[1:, 0] - np.abs(actions).sum(axis=1)).astype(np.float32)
    return Episode(observations, actions, rewards, terminated)


def dataset(kind: str) -> Dataset:
    """Forty random episodes."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(2, 30, size=40)
    episodes = [episode(rng, int(n), terminated=index % 3 == 0, kind=kind) for index, n in enumerate(lengths)]
    if kind == "map":
        observed = map(Dimension, ("x", "y", "direction"), (SIZE, SIZE, 4))
        return Dataset(tuple(episodes), {}, tuple(observed), (Dimension("action", 7),))
    acted = (Dimension("a", 4), Dimension("b", 3)) if kind == "discrete" else ()
    return Dataset(tuple(episodes), {}, (), acted)


TOKENS = {
    "reward": TokenConfig(num_bins=20, truncated="stop"),
    "goal": TokenConfig(num_bins=20, goal_dims=(2, 0), rewards=False),
    "discrete": TokenConfig(num_bins=12, discretizer="uniform", truncated="stop"),
    "map": TokenConfig(num_bins=SIZE + 1, goal_dims=(0, 1), rewards=False),
    # The authors' conventions.
    "reference": TokenConfig(num_bins=20, termination_penalty=-100.0, truncated="stop", authors_conventions=True),
    # The paper's return-to-go, and returns that go on after a recording's end.
    "paper": TokenConfig(num_bins=20, value_includes_reward=True, truncated="continue"),
}
KINDS = {"reference": "reward", "paper": "reward"}


def trained(name: str, device: torch.device) -> tuple[TrajectoryModel, list[float]]:
    """A model after 60 steps, and the loss of each."""
    data = dataset(KINDS.get(name, name))
    small = ModelConfig(window=4, num_layers=2, num_heads=2, width=32, dropout=0.1)
    model = TrajectoryModel.create(data, TOKENS[name], small, seed=5)
    windows = tokenize(data, model.tokenizer).to(device)
    model.gpt.to(device)
    config = TrainConfig(steps=STEPS, batch_size=16, learning_rate=3e-3, augment="grid" if name == "map" else "none")
    trainer = Trainer(
        model,
        windows,
        config,
        seed=5,
        engine=make_engine(model, config, World()),
        make_batch=make_batch_maker(model, windows, config),
        log_every=1,
    )
    losses = [metrics.loss for metrics in trainer.run() if metrics is not None]
    return model, losses


BASE = SearchConfig(beam_width=8, horizon=4, context=3, action=Sampler(nucleus=0.4), first_action=None)
# Name: layout it is for, planned for return or not, changes of the search.
SEARCHES: dict[str, tuple[str, bool, dict[str, object]]] = {
    "return": ("reward", True, {}),
    "return_sliding": ("reward", True, {"window": 2, "context": 1}),
    "return_top": ("reward", True, {"action": Sampler(top_k=5), "expansion": 3}),
    "return_middle": ("reward", True, {"action": Sampler(middle=0.4), "first_action": Sampler(nucleus=1.0)}),
    "return_observed": ("reward", True, {"observation": Sampler(nucleus=0.8), "horizon": 7}),
    "return_replan": ("reward", True, {"replan_every": 2}),
    "return_discrete": ("discrete", True, {}),
    "return_paper": ("paper", True, {"context": 2}),
    "return_reference": ("reference", True, {"window": 3, "context": 2, "beam_width": 12}),
    "likelihood": ("reward", False, {}),
    "likelihood_sliding": ("reward", False, {"window": 2, "context": 1}),
    "likelihood_goal": ("goal", False, {"horizon": 3}),
    "likelihood_map": ("map", False, {"horizon": 3}),
    "median": ("reward", False, {"imitate": "median"}),
    "median_sliding": ("reward", False, {"imitate": "median", "window": 2, "context": 1, "replan_every": 4}),
    "median_goal": ("goal", False, {"imitate": "median"}),
}


def plans(model: TrajectoryModel, name: str, **changes: object) -> Arrays:
    """Plans and actions of eight steps in three environments with random observations."""
    layout, for_return, own = SEARCHES[name]
    config = SearchConfig(**{**vars(BASE), **own, **changes})
    traces: list[PlanTrace] = []
    kind: PlanKind = "return" if for_return else "goal" if model.layout.goal_dim else "imitate"
    policy = Planner(model, kind=kind, search=config, seed=3, on_plan=traces.append).policy()
    rng = np.random.default_rng(11)
    actions = []
    on_map = layout == "map"
    maps = (rng.random((3, 2, SIZE, SIZE)) < 0.3).astype(np.uint8) if on_map else None
    for step in range(8):
        seen = rng.integers((SIZE, SIZE, 4), size=(3, 3)) if on_map else rng.normal(size=(3, 3))
        goals = rng.integers(SIZE, size=(3, 2)) if on_map else rng.normal(size=(3, model.layout.goal_dim))
        first = np.array([step == 0, step in (0, 5), step == 0])
        rewards = np.where(first, 0, rng.normal(size=3)).astype(np.float32)
        active = np.array([True, True, step < 6])
        seen32, goals32 = seen.astype(np.float32), goals.astype(np.float32)
        actions.append(policy.act(Step(seen32, rewards, first, goals32, active, maps)))
    return {
        "actions": np.stack(actions),
        "tokens": np.concatenate([trace.tokens.ravel() for trace in traces]),
        "scores": np.concatenate([trace.scores.ravel() for trace in traces]),
        "prompts": np.concatenate([trace.prompt.ravel() for trace in traces]),
    }


def bf16_plans(device: torch.device) -> Arrays:
    """Plans of the fused decoder in bfloat16, for a model of the paper's sizes with random weights."""
    model = TrajectoryModel.create(dataset("reward"), TOKENS["reward"], ModelConfig(window=9, dropout=0.0), seed=5)
    with torch.no_grad():
        model.gpt.token_embedding.weight.normal_(generator=torch.Generator().manual_seed(0))
    model.gpt.to(device)
    return {
        f"plan/{name}/bf16/{part}": array
        for name in ("return", "return_sliding", "return_middle", "return_observed", "likelihood", "median")
        for part, array in plans(model, name, backend="fused").items()
    }


def record(device: torch.device, report: Callable[[str], None] = lambda line: None) -> Arrays:
    """All arrays by name."""
    arrays: Arrays = {}
    models = {}
    for name in TOKENS:
        models[name], losses = trained(name, device)
        arrays[f"train/{name}/losses"] = np.array(losses)
        for key, value in models[name].gpt.state_dict().items():
            arrays[f"train/{name}/weights/{key}"] = value.cpu().numpy()
        arrays[f"train/{name}/values"] = models[name].tokenizer.discretizer.values
        report(f"trained {name}: {losses[0]:.6f} -> {losses[-1]:.6f}")
    backends = {"fused": "fused-float32"} if device.type == "cuda" else {"naive": "naive"}
    backends["cached"] = "cached"
    for name, (layout, _, _) in SEARCHES.items():
        for decoder, backend in backends.items():
            for part, array in plans(models[layout], name, backend=backend).items():
                arrays[f"plan/{name}/{decoder}/{part}"] = array
        report(f"planned {name}")
    if device.type == "cuda":
        arrays |= bf16_plans(device)
    source = dataset("reward").episodes[5]
    for given in (True, False):
        seen = predict(
            models["reward"], source, start=2, horizon=6, num_samples=5, seed=1, context=2, given_actions=given
        )
        arrays[f"predict/{given}/observations"] = seen.observations
        arrays[f"predict/{given}/actions"] = seen.actions
    return arrays


def summarize(arrays: Arrays) -> Arrays:
    """Replace weights by their sum and sum of squares, to keep a file small."""
    return {
        name: np.array([array.sum(dtype=np.float64), np.square(array, dtype=np.float64).sum()])
        if "/weights/" in name
        else array
        for name, array in arrays.items()
    }


def differences(found: Arrays, expected: Arrays) -> list[str]:
    """Names of the arrays that are not equal bit for bit."""
    names = sorted(found.keys() | expected.keys())
    return [
        name
        for name in names
        if name not in found
        or name not in expected
        or not np.array_equal(found[name], expected[name], equal_nan=found[name].dtype.kind == "f")
    ]


def main() -> int:
    """Record, write, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--summary", action="store_true", help="write and compare sums of weights instead of weights")
    parser.add_argument("--against", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    arrays = record(torch.device(options.device), print)
    if options.summary:
        arrays = summarize(arrays)
    np.savez_compressed(options.out, **arrays)  # type: ignore[arg-type]
    if options.against is None:
        return 0
    with np.load(options.against) as old:
        expected = {name.replace("context_encoder", "map_encoder"): old[name] for name in old.files}
    wrong = differences(arrays, expected)
    print(f"{len(arrays) - len(wrong)} of {len(arrays)} arrays are equal bit for bit")
    for name in wrong:
        print(f"differs: {name}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
