"""Choose the decoder and the training engine for a device and a model, and report why a faster one is unavailable."""

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed

from trajectory_transformer.config import SearchConfig, TrainConfig
from trajectory_transformer.gpu.planning.captured import CapturedSearch, Search
from trajectory_transformer.gpu.planning.fused import FusedDecoder, why_not_fused
from trajectory_transformer.gpu.training.batches import device_batch_maker
from trajectory_transformer.gpu.training.captured import CompiledEngine
from trajectory_transformer.gpu.training.fused import FusedEngine, why_not_fused_training
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.search.beam import Plan
from trajectory_transformer.search.cached import CachedDecoder
from trajectory_transformer.search.decoder import Decoder, NaiveDecoder, StepwiseDecoder
from trajectory_transformer.tokens.windows import TokenizedDataset
from trajectory_transformer.training.engine import EagerEngine, Engine
from trajectory_transformer.training.parallel import World
from trajectory_transformer.training.train import MakeBatch, batch_maker

log = logging.getLogger(__name__)

SearchWith = Callable[[Decoder, Tensor, Tensor, Tensor | None], Plan]
"""A search: decoder, prompts [E, L], noise seeds [E], map embeddings [E, width] -> plans."""


def find_device(name: str) -> torch.device:
    """Return a device by name; `auto` selects the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"the device must be auto, cpu or cuda, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name} was requested, but torch finds no GPU here; use cpu")
    return device


def prepare_search(search: SearchWith, gpt: GPT, config: SearchConfig) -> Search:
    """Bind a search to the decoder that `config.backend` names; `auto` selects the fastest one available.

    The result takes prompts and seeds on the host. On a GPU the whole search is captured as a CUDA graph.
    """
    device = gpt.position_embedding.device
    decoder = make_decoder(gpt, config)
    if isinstance(decoder, FusedDecoder):
        return CapturedSearch(lambda *given: search(decoder, *given), device, refresh=decoder.refresh)
    return lambda prompts, seeds, maps: search(decoder, prompts.to(device), seeds.to(device), maps)


def make_decoder(gpt: GPT, config: SearchConfig) -> StepwiseDecoder:
    """Create the decoder that `config.backend` names; `auto` selects the fastest one available."""
    fused = _fused_decoder(gpt, config)
    if fused is not None:
        return fused
    if config.backend == "naive":
        return NaiveDecoder(gpt, config.window)
    return CachedDecoder(gpt, config.window, bf16=config.backend == "cached-bfloat16")


def _fused_decoder(gpt: GPT, config: SearchConfig) -> FusedDecoder | None:
    """Return the fused decoder if it is requested, or if the backend is `auto` and the model is supported."""
    on_gpu = gpt.position_embedding.device.type == "cuda"
    requested = config.backend.startswith("fused")
    if requested and not on_gpu:
        raise ValueError(f"search.backend {config.backend} needs a GPU, the model is on the CPU: use cached")
    if not on_gpu or not (requested or config.backend == "auto"):
        return None
    window = config.window or gpt.config.window
    bf16 = config.backend != "fused-float32"
    if config.backend == "auto":
        bf16 = why_not_fused(gpt, window, bf16=True) is None
    try:
        return FusedDecoder(gpt, config.window, bf16=bf16)
    except (OSError, RuntimeError, ValueError) as error:
        if requested:
            raise ValueError(f"search.backend {config.backend} cannot be used here: {error}") from error
        log.warning("planning with the cached decoder instead of the fused one: %s", error)
        return None


def make_engine(model: TrajectoryModel, config: TrainConfig, world: World) -> Engine:
    """Create the engine that `config.backend` names; `auto` selects the fastest one available."""
    if model.device.type == "cuda":
        torch.backends.cudnn.deterministic = True  # resumed runs must be bit-identical
    compiled = why_not_compiled(model.device)
    fused = compiled or why_not_fused_training(model)
    if world.size > 1 and fused is None:
        fused = "it needs a single process"
    reasons = {"compiled": compiled, "fused": fused}
    if config.backend in reasons and reasons[config.backend] is not None:
        raise ValueError(f"train.backend {config.backend} cannot be used here: {reasons[config.backend]}")
    best = "eager" if compiled else "compiled" if fused else "fused"
    chosen = best if config.backend == "auto" else config.backend
    if config.backend == "auto" and chosen == "eager" and model.device.type != "cpu":
        log.warning("training with the eager backend: %s", compiled)
    if chosen == "fused":
        return FusedEngine(model, config)
    return CompiledEngine(model, config, world) if chosen == "compiled" else EagerEngine(model, config, world)


def why_not_compiled(device: torch.device) -> str | None:
    """Return why torch.compile cannot be used on this device, or None if it can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if importlib.util.find_spec("triton") is None:
        return "it needs triton"
    if not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        return "it needs a C compiler"
    return None


def make_batch_maker(model: TrajectoryModel, data: TokenizedDataset, config: TrainConfig) -> MakeBatch:
    """Return a function that makes batches on the model's device."""
    if model.device.type == "cpu":
        return batch_maker(model, data, config)
    compiled = config.backend != "eager" and why_not_compiled(model.device) is None
    return device_batch_maker(model, data, config, compiled=compiled)


@contextmanager
def matmul_precision(tf32: bool) -> Iterator[None]:
    """Allow TF32 in the matmuls of a block, or forbid it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def joined_world(device: torch.device) -> Iterator[tuple[World, torch.device]]:
    """Join the process group if `torchrun` started this process; yields the world and this process's device."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(), device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.cuda.device_count():
            raise ValueError(
                f"torchrun started more processes than the {torch.cuda.device_count()} GPUs here; "
                "lower --nproc-per-node or use --device cpu"
            )
        torch.cuda.set_device(device)
    # Functions of this module have the process group as a default argument. Imported later, by the optimizer, they keep
    # the group and its threads alive until Python exits, where such a thread can abort the process.
    importlib.import_module("torch.distributed.nn.functional")
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(distributed.get_rank(), size), device
    finally:
        distributed.destroy_process_group()
