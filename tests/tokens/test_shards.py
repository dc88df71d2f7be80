"""Memory-mapped tokens: the same batches as tokens in memory, an unbiased sample, and broken folders."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trajectory_transformer.config import TokenConfig
from trajectory_transformer.data.episode import Dataset, Dimension, Episode
from trajectory_transformer.tokens.shards import Reservoir, build_shards, fit_stream, open_shards
from trajectory_transformer.tokens.tokenizer import Tokenizer
from trajectory_transformer.tokens.windows import gather_windows, tokenize

CONFIG = TokenConfig(num_bins=10)


@pytest.fixture
def folder(tiny_dataset: Dataset, tmp_path: Path) -> Path:
    """Shards of the tiny dataset."""
    build_shards(tmp_path / "deep/shards", lambda: tiny_dataset, CONFIG, metadata={"env": "x"}, source="tiny")
    return tmp_path / "deep/shards"


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        TokenConfig(num_bins=300, goal_dims=(2, 0), discretizer="uniform"),
        TokenConfig(num_bins=5, rewards=False, authors_conventions=True, termination_penalty=-3.0),
    ],
)
def test_shards_give_the_same_batches_as_tokens_in_memory(
    tiny_dataset: Dataset, tmp_path: Path, config: TokenConfig
) -> None:
    build_shards(tmp_path / "shards", lambda: tiny_dataset, config)
    shards = open_shards(tmp_path / "shards")
    tokenizer = Tokenizer.fit(tiny_dataset, config)
    assert shards.tokenizer.layout == tokenizer.layout and shards.tokenizer.config == config
    np.testing.assert_array_equal(shards.tokenizer.discretizer.values, tokenizer.discretizer.values)
    for ours, theirs in zip(shards.tokenizer.discretizer.edges, tokenizer.discretizer.edges, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    data = tokenize(tiny_dataset, tokenizer)
    assert shards.data.num_windows == data.num_windows
    index = torch.randperm(data.num_windows)
    mapped, resident = (gather_windows(one, index, 4, tokenizer) for one in (shards.data, data))
    assert torch.equal(mapped.tokens, resident.tokens) and torch.equal(mapped.real, resident.real)


def test_a_folder_stores_its_source_and_metadata(folder: Path) -> None:
    shards = open_shards(folder)
    assert (shards.source, shards.metadata) == ("tiny", {"env": "x"})
    assert sorted(path.name for path in folder.parent.iterdir()) == ["shards"]


def test_writing_to_mapped_tokens_does_not_change_the_files(folder: Path) -> None:
    before = (folder / "rows.bin").read_bytes()
    open_shards(folder).data.rows.zero_()
    assert (folder / "rows.bin").read_bytes() == before


def test_episodes_are_read_one_at_a_time(tiny_dataset: Dataset, tmp_path: Path) -> None:
    read_in_order: list[int] = []

    def read() -> Iterator[Episode]:
        for index, episode in enumerate(tiny_dataset):
            read_in_order.append(index)
            yield replace(episode, terminated=False)

    build_shards(tmp_path / "shards", read, CONFIG)
    assert read_in_order == [0, *range(6), *range(6)]  # for the layout, to fit, to write
    assert not open_shards(tmp_path / "shards").data.terminated.any()


def test_a_reservoir_keeps_all_rows_in_order_up_to_its_capacity(rng: np.random.Generator) -> None:
    rows = rng.normal(size=(10, 2))
    reservoir = Reservoir(10, 2, rng)
    for part in (rows[:4], rows[4:5], rows[5:]):
        reservoir.add(part)
    np.testing.assert_array_equal(np.stack(reservoir.columns(), axis=1), rows)


def test_a_reservoir_samples_every_row_with_equal_probability(rng: np.random.Generator) -> None:
    rows = np.arange(20.0)[:, None]
    counts = np.zeros(20)
    for _ in range(3000):
        reservoir = Reservoir(5, 1, rng)
        for part in (rows[:3], rows[3:11], rows[11:]):
            reservoir.add(part)
        kept = reservoir.columns()[0]
        assert kept[-2:].tolist() == [0.0, 19.0] and len(set(kept[:5])) == 5
        counts[kept[:5].astype(int)] += 1
    # Each row is kept 3000 * 5 / 20 = 750 times, with a standard deviation of 24.
    assert (abs(counts - 750) < 100).all()


def test_a_sampled_fit_is_reproducible_close_to_the_exact_one_and_exact_at_the_extremes(
    rng: np.random.Generator,
) -> None:
    episodes = [
        Episode(
            rng.normal(size=(101, 2)).astype(np.float32), rng.uniform(size=(100, 1)).astype(np.float32), None, False
        )
        for _ in range(100)
    ]
    for kind in ("quantile", "uniform"):
        config = TokenConfig(num_bins=10, rewards=False, discretizer=kind)
        exact = Tokenizer.fit(Dataset(tuple(episodes)), config).discretizer
        sampled, again = (fit_stream(episodes, config, sample_values=9000, seed=1) for _ in range(2))
        for ours, twice, theirs in zip(sampled.edges, again.edges, exact.edges, strict=True):
            np.testing.assert_array_equal(ours, twice)
            assert (ours[0], ours[-1]) == (theirs[0], theirs[-1])
            np.testing.assert_allclose(ours, theirs, atol=0.12 if kind == "quantile" else 1e-12)


def test_categories_of_a_stream_are_their_own_tokens(tmp_path: Path) -> None:
    # The last of three categories never occurs: edges fitted to the data would leave no bin for it.
    actions = np.array([[0.5, 0], [0.1, 1], [0.9, 1], [0.3, 0]], dtype=np.float32)
    episode = Episode(np.arange(10, dtype=np.float32).reshape(5, 2), actions, np.ones(4, np.float32), terminated=False)
    dataset = Dataset((episode,), action_dimensions=(Dimension("a"), Dimension("b", 3)))
    exact = Tokenizer.fit(dataset, CONFIG).discretizer
    build_shards(
        tmp_path / "shards",
        lambda: dataset,
        CONFIG,
        action_categories=[d.categories for d in dataset.action_dimensions],
    )
    shards = open_shards(tmp_path / "shards")
    for ours, theirs in zip(shards.tokenizer.discretizer.edges, exact.edges, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(shards.tokenizer.discretizer.edges[3], [0, 1, 2, 3])
    np.testing.assert_array_equal(shards.data.rows[:4, 3], [0, 1, 1, 0])


def test_leftovers_of_a_killed_build_do_not_block(tiny_dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "shards.0.tmp").mkdir()
    (tmp_path / "shards.0.tmp/rows.bin").write_bytes(b"half")
    build_shards(tmp_path / "shards", lambda: tiny_dataset, CONFIG)
    assert open_shards(tmp_path / "shards").data.num_windows == 29


def test_a_broken_folder_is_refused_by_name(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    whole = (folder / "rows.bin").read_bytes()
    (folder / "rows.bin").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"rows.bin: index.json says {len(whole)} bytes, .*truncated"):
        open_shards(folder)
    (folder / "rows.bin").unlink()
    with pytest.raises(ValueError, match="rows.bin: the file is missing"):
        open_shards(folder)
    for text, message in (
        ("{", "not valid JSON"),
        ("[]", "not the index of"),
        (json.dumps({**index, "format": 3}), "shard format 3 cannot be read by this version, which reads format 2"),
        (json.dumps({**index, "format": 1}), "shard format 1 cannot be read .* remove the folder"),
        (json.dumps({"format": 2, "kind": index["kind"]}), ".*arrays"),
    ):
        (folder / "index.json").write_text(text)
        with pytest.raises(ValueError, match=f"(index.json: |shards: not a folder of ){message}"):
            open_shards(folder)
    (folder / "index.json").unlink()
    with pytest.raises(ValueError, match="index.json: the file is missing"):
        open_shards(folder)


def test_streams_that_cannot_be_written_leave_no_folder(tiny_dataset: Dataset, tmp_path: Path) -> None:
    wide = Episode(np.zeros((3, 5), np.float32), np.zeros((2, 2), np.float32), np.zeros(2, np.float32), True)
    discretizer = Tokenizer.fit(tiny_dataset, CONFIG).discretizer
    with pytest.raises(ValueError, match="episode 6: every episode must have 3 observation and 2 action dimensions"):
        build_shards(tmp_path / "s", lambda: [*tiny_dataset, wide], CONFIG, discretizer=discretizer)
    with pytest.raises(ValueError, match="at least one episode, got none"):
        build_shards(tmp_path / "s", lambda: [], CONFIG)
    assert not (tmp_path / "s").exists()
    (tmp_path / "s").mkdir()
    (tmp_path / "s/mine").touch()
    with pytest.raises(ValueError, match="s exists already"):
        build_shards(tmp_path / "s", lambda: tiny_dataset, CONFIG)


def test_shards_hold_the_maps_of_episodes(tiny_dataset: Dataset, tmp_path: Path) -> None:
    maps = np.random.default_rng(0).integers(2, size=(len(tiny_dataset), 2, 3, 4)).astype(np.uint8)
    dataset = Dataset(tuple(replace(episode, map=each) for episode, each in zip(tiny_dataset, maps, strict=True)))
    build_shards(tmp_path / "shards", lambda: dataset, CONFIG)
    shards = open_shards(tmp_path / "shards")
    assert shards.tokenizer.layout.map_shape == (2, 3, 4)
    index = torch.arange(shards.data.num_windows)
    mapped = gather_windows(shards.data, index, 4, shards.tokenizer)
    resident = gather_windows(tokenize(dataset, shards.tokenizer), index, 4, shards.tokenizer)
    assert mapped.maps is not None and resident.maps is not None
    assert torch.equal(mapped.maps, resident.maps)
    mixed = (dataset.episodes[0], tiny_dataset.episodes[1])
    with pytest.raises(ValueError, match=r"episode 1: every episode must have a map of shape \(2, 3, 4\)"):
        build_shards(tmp_path / "mixed", lambda: mixed, CONFIG)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rows", lambda a: a.fill(255), r"rows.bin: tokens must lie in \[0, "),
        ("num_rows", lambda a: a.fill(-1), "num_rows.bin: every episode needs"),
        ("num_rows", lambda a: a.__setitem__(0, 2**62), "num_rows.bin: every episode needs"),
        ("num_steps", lambda a: a.fill(2**40), "num_rows.bin: every episode needs"),
        ("terminated", lambda a: a.view(np.uint8).fill(7), "terminated.bin: must hold 0 or 1"),
    ],
)
def test_damaged_values_are_found_when_a_folder_is_opened(
    folder: Path, name: str, change: Callable[[npt.NDArray[Any]], object], message: str
) -> None:
    entry = json.loads((folder / "index.json").read_text())["arrays"][name]
    array = np.fromfile(folder / f"{name}.bin", entry["type"])
    change(array)
    array.tofile(folder / f"{name}.bin")
    with pytest.raises(ValueError, match=message):
        open_shards(folder)
    if name == "rows":
        assert int(open_shards(folder, check=False).data.rows.max()) == 255


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("rows", {"type": "object", "shape": [4]}),
        ("goals", {"type": "uint8", "shape": [2**32, 2**32]}),
        ("goals", {"type": "uint8", "shape": [2**70, 0]}),
        ("goals", {"type": "uint8", "shape": [-1, 0]}),
        ("num_rows", {"type": "float64", "shape": [6]}),
        ("rows", {"type": "uint8", "shape": "x"}),
        ("rows", 5),
    ],
)
def test_a_hostile_index_is_refused(folder: Path, name: str, entry: object) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["arrays"][name] = entry
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=str(folder)):
        open_shards(folder)


@pytest.mark.parametrize("shape", ["x", [4], [0, 2, 2], [1.5, 2, 2], "xyz"])
def test_a_map_that_is_no_map_is_refused(folder: Path, shape: object) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["layout"]["map_shape"] = shape
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{folder}: .*the shape of a map must be 3 sizes of at least 1, got"):
        open_shards(folder)


@pytest.mark.parametrize("size", [True, 1.0, "1"])
def test_a_layout_whose_size_is_no_whole_number_is_refused(folder: Path, size: object) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["layout"]["action_dim"] = size
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{folder}: .*the sizes of a layout must be whole numbers"):
        open_shards(folder)
