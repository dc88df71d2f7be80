"""Training and planning compute what they computed when `golden/recorded.npz` was recorded, see recording.py.

The recording was made on aarch64. Other machines round differently, so plans, where a rounding error can select another
candidate, are compared on aarch64 only. `recording.py --against` compares two recordings of one machine bit for bit.
"""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.regression.recording import SEARCHES, plans, summarize, trained
from trajectory_transformer.model.trajectory_model import TrajectoryModel

Arrays = dict[str, npt.NDArray[Any]]
RECORDED_ON = "aarch64"
# Searches of each layout, with the backend that is compared. recording.py covers all of them.
CASES = {
    "reward": {"return": "cached", "return_sliding": "cached", "likelihood_sliding": "cached", "median": "naive"},
    "goal": {"likelihood_goal": "cached", "median_goal": "cached"},
    "map": {"likelihood_map": "cached"},
}


@pytest.fixture(scope="module")
def recorded() -> Arrays:
    with np.load(Path(__file__).parents[1] / "golden" / "recorded.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module", params=sorted(CASES))
def run(request: pytest.FixtureRequest) -> Iterator[tuple[str, TrajectoryModel, list[float]]]:
    """A layout, the model trained on it, and the losses. One thread, because others sum in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield request.param, *trained(request.param, torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def test_losses_and_weights_equal_the_recorded_ones(
    run: tuple[str, TrajectoryModel, list[float]], recorded: Arrays
) -> None:
    layout, model, losses = run
    expected = recorded[f"train/{layout}/losses"]
    np.testing.assert_allclose(model.tokenizer.discretizer.values, recorded[f"train/{layout}/values"], rtol=1e-12)
    if torch._C.has_mkl:
        # Dropout takes its random numbers from MKL, which gives others than the machine of the recording. Losses then
        # vary by up to 5 %, and their mean by 0.3 %.
        np.testing.assert_allclose(losses, expected, rtol=0.1)
        assert np.mean(losses) == pytest.approx(expected.astype(np.float64).mean(), rel=0.01)
        return
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    weights = {f"train/{layout}/weights/{name}": value.numpy() for name, value in model.gpt.state_dict().items()}
    assert weights.keys() == {name for name in recorded if name.startswith(f"train/{layout}/weights/")}
    for name, found in summarize(weights).items():
        (total, squares), size = recorded[name], weights[name].size
        assert found[1] == pytest.approx(squares, rel=1e-4), name
        assert found[0] == pytest.approx(total, rel=1e-4, abs=1e-4 * (size * squares) ** 0.5), name


@pytest.mark.skipif(
    platform.machine() != RECORDED_ON,
    reason=f"plans were recorded on {RECORDED_ON}: on {platform.machine()} rounding may select other candidates",
)
def test_plans_equal_the_recorded_ones(run: tuple[str, TrajectoryModel, list[float]], recorded: Arrays) -> None:
    layout, model, _ = run
    for search, backend in CASES[layout].items():
        assert SEARCHES[search][0] == layout
        planned: Arrays = plans(model, search, backend=backend)
        for part, found in planned.items():
            expected = recorded[f"plan/{search}/{backend}/{part}"]
            if part == "scores":
                np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=search)
            else:
                np.testing.assert_array_equal(found, expected, err_msg=f"{part} of {search}")
