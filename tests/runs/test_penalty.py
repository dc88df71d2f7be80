"""Runs whose termination penalty depends on the data: the number is stored, and `auto` still means the same run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trajectory_transformer.config import ModelConfig, TokenConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.runs import train
from trajectory_transformer.runs.settings import RunSettings

AUTO = TokenConfig(num_bins=5, termination_penalty="auto")
MODEL = ModelConfig(window=2, num_layers=1, num_heads=1, width=8)


def falling(*lengths: int) -> Dataset:
    """Episodes that end early, with a reward of 2 at every step."""
    rng = np.random.default_rng(0)
    return Dataset(
        tuple(
            Episode(
                rng.normal(size=(length + 1, 1)).astype(np.float32),
                rng.normal(size=(length, 1)).astype(np.float32),
                np.full(length, 2.0, np.float32),
                terminated=True,
            )
            for length in lengths
        )
    )


@pytest.mark.parametrize("shards", [None, "tokens"])
def test_an_automatic_penalty_is_stored_as_a_number_and_may_be_given_again(tmp_path: Path, shards: str | None) -> None:
    dataset, steps = falling(3, 5, 9), TrainConfig(steps=2, batch_size=2)
    folder = None if shards is None else tmp_path / shards

    def run(out: str, tokens: TokenConfig, **more: object) -> RunSettings:
        settings = {"model": MODEL, "train": steps, "device": "cpu", "shards": folder} | more
        train(dataset, out=tmp_path / out, tokens=tokens, **settings)  # type: ignore[arg-type]
        return RunSettings.read(tmp_path / out)

    stored = run("run", AUTO)
    assert stored.tokens == replace(AUTO, termination_penalty=-60.0)
    assert run("run", AUTO, resume=True) == stored  # finished: nothing is trained, nothing is refused
    assert run("again", AUTO).tokens == stored.tokens  # with the shards of the first run
    with pytest.raises(ValueError, match="other settings"):
        run("run", replace(AUTO, termination_penalty=-1.0), resume=True)
    if shards is None:
        assert run("tuned", AUTO, init=tmp_path / "run").tokens == stored.tokens
