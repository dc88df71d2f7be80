"""Which decoder, engine and batch maker a device and a model get."""

import importlib.util
import shutil
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.gpu.planning.test_fused_gpu import LAYOUTS as GPU_LAYOUTS
from tests.gpu.planning.test_fused_gpu import random_gpt as gpu_gpt
from tests.search.test_decoder import LAYOUTS, random_gpt
from trajectory_transformer.config import SearchConfig, TrainConfig
from trajectory_transformer.data.episode import Dataset
from trajectory_transformer.gpu.backends import (
    find_device,
    make_batch_maker,
    make_engine,
    prepare_search,
    why_not_compiled,
)
from trajectory_transformer.gpu.planning.fused import FusedDecoder
from trajectory_transformer.gpu.training.captured import CompiledEngine
from trajectory_transformer.gpu.training.fused import FusedEngine
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.search.beam import Plan
from trajectory_transformer.search.cached import CachedDecoder
from trajectory_transformer.search.decoder import Decoder, NaiveDecoder
from trajectory_transformer.tokens.windows import gather_windows, tokenize
from trajectory_transformer.training.engine import EagerEngine
from trajectory_transformer.training.parallel import World

CPU = torch.device("cpu")


def decoder_of(gpt: GPT, config: SearchConfig) -> Decoder:
    """The decoder that a prepared search uses."""
    used: list[Decoder] = []

    def search(decoder: Decoder, prompts: Tensor, seeds: Tensor, map_embedding: Tensor | None) -> Plan:
        assert map_embedding is None and len(seeds) == len(prompts)
        assert prompts.device == gpt.position_embedding.device == seeds.device
        used.append(decoder)
        return Plan(prompts[:, None].clone(), prompts[:, :1].float())

    found = prepare_search(search, gpt, config)(torch.ones(1, 4, dtype=torch.long), torch.zeros(1).long(), None)
    assert found.tokens.tolist() == [[[1, 1, 1, 1]]]
    return used[-1]


def test_a_model_on_the_cpu_plans_with_the_cached_decoder() -> None:
    gpt = random_gpt(LAYOUTS["rewards"])
    auto, cached, rounded, naive = (
        decoder_of(gpt, SearchConfig(backend=backend, window=2))
        for backend in ("auto", "cached", "cached-bfloat16", "naive")
    )
    assert isinstance(auto, CachedDecoder) and isinstance(cached, CachedDecoder) and isinstance(naive, NaiveDecoder)
    assert auto.dtype == cached.dtype == torch.float32
    assert isinstance(rounded, CachedDecoder) and rounded.dtype == torch.bfloat16
    assert auto.window == cached.window == rounded.window == naive.window == 2


@pytest.mark.parametrize("backend", ["fused", "fused-float32"])
def test_the_fused_decoder_is_refused_on_the_cpu(backend: Literal["fused", "fused-float32"]) -> None:
    message = f"search.backend {backend} needs a GPU, the model is on the CPU: use cached"
    with pytest.raises(ValueError, match=message):
        decoder_of(random_gpt(LAYOUTS["plain"]), SearchConfig(backend=backend))


def test_a_model_on_the_cpu_trains_with_the_eager_engine(tiny_model: TrajectoryModel) -> None:
    for config in (TrainConfig(), TrainConfig(backend="eager")):
        assert type(make_engine(tiny_model, config, World())) is EagerEngine
    assert why_not_compiled(CPU) == "it needs a GPU"


@pytest.mark.parametrize("backend", ["compiled", "fused"])
def test_gpu_engines_are_refused_on_the_cpu(tiny_model: TrajectoryModel, backend: Literal["compiled", "fused"]) -> None:
    with pytest.raises(ValueError, match=f"train.backend {backend} cannot be used here: it needs a GPU"):
        make_engine(tiny_model, TrainConfig(backend=backend), World())


def test_batches_on_the_cpu_are_the_gathered_windows(tiny_model: TrajectoryModel, tiny_dataset: Dataset) -> None:
    data = tokenize(tiny_dataset, tiny_model.tokenizer)
    index = torch.tensor([3, 0, 11])
    batch = make_batch_maker(tiny_model, data, TrainConfig())(index, None)
    expected = gather_windows(data, index, 3, tiny_model.tokenizer)
    assert torch.equal(batch.tokens, expected.tokens) and torch.equal(batch.real, expected.real)


def test_devices_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == find_device("cpu") == CPU
    with pytest.raises(ValueError, match="device cuda was requested, but torch finds no GPU here; use cpu"):
        find_device("cuda")
    with pytest.raises(ValueError, match="the device must be auto, cpu or cuda, got 'toaster'"):
        find_device("toaster")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device("auto") == torch.device("cuda")


def test_compilation_needs_triton_and_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not_compiled(gpu) == "it needs triton"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert why_not_compiled(gpu) == "it needs a C compiler"
    monkeypatch.setenv("CC", "mycc")
    assert why_not_compiled(gpu) is None


@pytest.mark.gpu
def test_the_decoder_is_chosen_by_what_the_gpu_supports(caplog: pytest.LogCaptureFixture) -> None:
    auto = SearchConfig()
    paper = decoder_of(gpu_gpt(GPU_LAYOUTS["small"]), auto)
    assert isinstance(paper, FusedDecoder)
    assert paper.dtype == torch.bfloat16
    exact = decoder_of(gpu_gpt(GPU_LAYOUTS["small"]), SearchConfig(backend="fused-float32"))
    assert isinstance(exact, FusedDecoder)
    assert exact.dtype == torch.float32
    other = decoder_of(gpu_gpt(GPU_LAYOUTS["small"], width=64, num_heads=2), auto)
    assert isinstance(other, FusedDecoder)
    assert other.dtype == torch.float32
    assert not caplog.messages
    long = gpu_gpt(GPU_LAYOUTS["small"], window=70)
    assert isinstance(decoder_of(long, auto), CachedDecoder)
    assert "at most 60 transitions" in caplog.messages[0]
    with pytest.raises(ValueError, match="search.backend fused cannot be used here: .* at most 60 transitions"):
        decoder_of(long, SearchConfig(backend="fused"))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_engine_is_chosen_by_what_the_gpu_supports(tiny_model: TrajectoryModel, tiny_dataset: Dataset) -> None:
    tiny_model.gpt.to("cuda")  # heads of 8, which the fused engine does not support
    assert isinstance(make_engine(tiny_model, TrainConfig(), World()), CompiledEngine)
    assert type(make_engine(tiny_model, TrainConfig(backend="eager"), World())) is EagerEngine
    with pytest.raises(ValueError, match="train.backend fused cannot be used here: it needs a width of at most 256"):
        make_engine(tiny_model, TrainConfig(backend="fused"), World())
    sizes = replace(tiny_model.gpt.config, num_heads=2)
    wide = TrajectoryModel.create(tiny_dataset, tiny_model.tokenizer.config, sizes, seed=0)
    wide.gpt.to("cuda")
    assert isinstance(make_engine(wide, TrainConfig(), World()), FusedEngine)
    assert isinstance(make_engine(wide, TrainConfig(backend="compiled"), World()), CompiledEngine)
