"""The `reference` preset reproduces the authors' released code, array by array.

`golden/small.npz` was made by that code from small synthetic data and random weights; its `meta` is a JSON object with
the sizes. The tests replace these sizes in the preset and its conventions, and nothing else.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.conventions import authors_conventions
from trajectory_transformer.config import PRESETS
from trajectory_transformer.data.episode import Dataset, Episode
from trajectory_transformer.model.authors import gpt_from_authors
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.search.beam import likelihood_search
from trajectory_transformer.search.cached import CachedDecoder
from trajectory_transformer.search.decoder import Decoder, NaiveDecoder
from trajectory_transformer.search.sampling import keep_nucleus, predicted_value
from trajectory_transformer.tokens.layout import TokenLayout
from trajectory_transformer.tokens.tokenizer import CONVENTIONS, Tokenizer, slot_values
from trajectory_transformer.tokens.windows import Batch, gather_windows, loss_weights, tokenize

Arrays = dict[str, npt.NDArray[Any]]  # by name


@dataclass(frozen=True)
class Golden:
    """The file, and what this package makes of its data and weights."""

    arrays: Arrays
    meta: dict[str, float]
    dataset: Dataset
    tokenizer: Tokenizer
    batch: Batch
    gpt: GPT

    def tensor(self, name: str) -> Tensor:
        """An array of the file."""
        return torch.from_numpy(self.arrays[name])


@pytest.fixture(scope="module")
def golden() -> Iterator[Golden]:
    with np.load(Path(__file__).parent / "golden" / "small.npz") as file:
        arrays = {name: file[name] for name in file.files}
    meta = json.loads(str(arrays["meta"]))
    dataset = read_dataset(arrays)
    with authors_conventions(replace(CONVENTIONS[True], max_episode_steps=meta["max_path_length"])):
        tokenizer = Tokenizer.fit(dataset, replace(PRESETS["reference"].tokens, num_bins=meta["vocab_size"]))
        yield Golden(
            arrays=arrays,
            meta=meta,
            dataset=dataset,
            tokenizer=tokenizer,
            batch=read_windows(arrays, dataset, tokenizer, meta["sequence_length"]),
            gpt=read_model(arrays, tokenizer.layout, meta["n_head"]),
        )


def read_dataset(arrays: Arrays) -> Dataset:
    """Split the arrays into episodes. Final states were not recorded; the preset must not read their placeholders."""
    ends = np.cumsum(arrays["lengths"].astype(np.int64))
    episodes = []
    for start, end in zip(ends - arrays["lengths"], ends, strict=True):
        observations = arrays["observations"][start:end].astype(np.float32)
        episodes.append(
            Episode(
                observations=np.concatenate([observations, np.full_like(observations[:1], 1e6)]),
                actions=arrays["actions"][start:end].astype(np.float32),
                rewards=arrays["rewards"][start:end, 0].astype(np.float32),
                terminated=bool(arrays["terminals"][end - 1]),
            )
        )
    return Dataset(tuple(episodes))


def read_windows(arrays: Arrays, dataset: Dataset, tokenizer: Tokenizer, window: int) -> Batch:
    """Gather the windows that the file lists as (episode, first step, last step + 1)."""
    lengths = arrays["lengths"].astype(np.int64)
    num_windows = lengths - 1  # none starts at the last step
    first_window = np.cumsum(num_windows) - num_windows
    listed = arrays["window_index"].astype(np.int64)
    index = torch.from_numpy(first_window[listed[:, 0]] + listed[:, 1])
    return gather_windows(tokenize(dataset, tokenizer), index, window, tokenizer)


def read_model(arrays: Arrays, layout: TokenLayout, num_heads: int) -> GPT:
    """Build our GPT with the file's weights under our names."""
    weights = {
        key.removeprefix("weights/"): torch.from_numpy(arrays[key]) for key in arrays if key.startswith("weights/")
    }
    return gpt_from_authors(weights, layout, num_heads).requires_grad_(False)


def test_the_preset_has_the_settings_of_the_file(golden: Golden) -> None:
    preset = PRESETS["reference"]
    assert preset.tokens.discount == golden.meta["discount"]
    assert preset.tokens.termination_penalty == golden.meta["termination_penalty"]
    assert preset.train.action_weight == golden.meta["action_weight"]
    layout = golden.tokenizer.layout
    assert (layout.observation_dim, layout.action_dim) == (golden.meta["observation_dim"], golden.meta["action_dim"])


def test_the_sizes_read_from_the_weights_are_those_of_the_file(golden: Golden) -> None:
    config = golden.gpt.config
    assert golden.gpt.num_bins == golden.meta["vocab_size"]
    assert config.window == golden.meta["sequence_length"]
    assert (config.num_layers, config.width) == (golden.meta["n_layer"], golden.meta["n_embd"])


def test_values_equal(golden: Golden) -> None:
    values = [slot_values(episode, golden.tokenizer.config)[3][:, 0] for episode in golden.dataset]
    np.testing.assert_allclose(np.concatenate(values), golden.arrays["values"], rtol=1e-12, atol=1e-12)


def test_thresholds_equal(golden: Golden) -> None:
    edges = np.stack(golden.tokenizer.discretizer.edges, axis=1)
    np.testing.assert_allclose(edges, golden.arrays["thresholds"], rtol=1e-12, atol=1e-12)


def test_window_tokens_targets_and_mask_equal(golden: Golden) -> None:
    tokens, real = golden.batch.tokens.numpy(), golden.batch.real.numpy()
    np.testing.assert_array_equal(tokens[:, :-1], golden.arrays["X"])
    np.testing.assert_array_equal(tokens[:, 1:], golden.arrays["Y"])
    np.testing.assert_array_equal(real[:, :-1], golden.arrays["mask"])
    # The windows extend beyond terminations and time limits, otherwise the comparison would show little.
    assert (tokens == golden.tokenizer.stop).any() and not real.all()


def test_logits_equal(golden: Golden) -> None:
    logits = golden.gpt(golden.tensor("X"))
    np.testing.assert_allclose(logits.numpy(), golden.arrays["logits"], rtol=0, atol=5e-6)


def test_loss_equals(golden: Golden) -> None:
    action_weight = PRESETS["reference"].train.action_weight
    weights = loss_weights(golden.batch, golden.tokenizer, action_weight)
    logits = golden.gpt(golden.batch.tokens[:, :-1])
    targets = golden.batch.tokens[:, 1:]
    by_token = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
    assert float((by_token * weights).mean()) == pytest.approx(float(golden.arrays["loss"]), abs=5e-6)


@pytest.mark.parametrize("make_decoder", [NaiveDecoder, CachedDecoder])
def test_beam_search_finds_the_same_candidates(golden: Golden, make_decoder: Callable[[GPT], Decoder]) -> None:
    plan = likelihood_search(
        make_decoder(golden.gpt),
        golden.tensor("beam_prefix")[None],
        num_tokens=int(golden.meta["beam_steps"]),
        beam_width=int(golden.meta["beam_width"]),
    )
    found = np.concatenate([golden.arrays["beam_prefix"], plan.best[0].numpy()])
    np.testing.assert_array_equal(found, golden.arrays["beam_best"])
    np.testing.assert_allclose(plan.scores[0].numpy(), golden.arrays["beam_logp"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["reward", "value"])
def test_expected_reward_and_value_equal(golden: Golden, name: str) -> None:
    slot = golden.tokenizer.layout.reward if name == "reward" else golden.tokenizer.layout.value
    logits = golden.gpt(golden.tensor("X"))[:, slot - 1]  # the position before a slot predicts it
    expected = predicted_value(logits.double(), torch.from_numpy(golden.tokenizer.discretizer.values[slot]))
    np.testing.assert_allclose(expected.numpy(), golden.arrays[f"expected_{name}"], rtol=0, atol=3e-5)


def test_the_action_filter_keeps_the_same_tokens(golden: Golden) -> None:
    logits = golden.gpt(golden.tensor("X"))[0]
    kept = keep_nucleus(logits, 1.0 - golden.meta["cdf_act"]).isfinite()
    np.testing.assert_array_equal(kept.numpy(), golden.arrays["cdf_kept"])
