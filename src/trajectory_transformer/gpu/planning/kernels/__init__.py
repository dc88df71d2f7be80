"""Compile and launch the fused decoder's CUDA kernels.

The CUDA C++ source is compiled with NVRTC for a model's sizes at first use. Importing this module needs no GPU.
`HostKernels` runs the same source on a CPU, for tests.
"""

import ctypes
import functools
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, Protocol

import torch

MAX_SEGMENTS = 64  # as in common.cuh
MAX_CANDIDATES = 4096  # per environment, as in select.cu
MAX_PARTS = 2  # runs of slots per launch, as in common.cuh
RANKS = 2  # thread blocks per cluster in bfloat16, as in matrix.cuh
THREADS = 512
TEAM = 128  # threads that copy one candidate if no keys and values are copied, as in select.cu


class StoreArguments(ctypes.Structure):
    """Mirrors `Store` in common.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tokens", "rewards", "log_prob", "value", "ended", "identity")),
        *((name, ctypes.c_int) for name in ("token_capacity", "reward_capacity", "num_tokens", "num_rewards")),
    )


class PartArguments(ctypes.Structure):
    """Mirrors `Part` in common.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("seeds", "bin_values")),
        *((name, ctypes.c_int) for name in ("number", "num_slots", "allow_stop", "top_k")),
        *((name, ctypes.c_float) for name in ("temperature", "dropped", "middle", "percentile")),
    )


class RunArguments(ctypes.Structure):
    """Mirrors `Run` in common.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "token_embedding", "position_embedding", "offsets", "readable", "map_embedding", "weights", "vectors",
            "heads", "given", "order", "ancestors", "prompt_keys", "prompt_values", "keys", "values", "logits",
        )),
        ("store", StoreArguments),
        ("parts", PartArguments * MAX_PARTS),
        *((name, ctypes.c_longlong) for name in ("stop_embedding", "prompt_stride", "layer_stride", "segment_stride")),
        ("segments", ctypes.c_int * MAX_SEGMENTS),
        *((name, ctypes.c_int) for name in (
            "depth", "current", "prompt_tiles", "prompt_columns", "tiles", "capacity", "columns", "candidates", "group",
            "groups", "given_stride", "num_given", "num_slots", "first_slot", "start", "head_period", "head_first",
        )),
    )  # fmt: skip


class KeepArguments(ctypes.Structure):
    """Mirrors `Ranking` in select.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "identity", "kept")),
        *((name, ctypes.c_int) for name in ("candidates", "width", "distinct")),
    )


class SelectArguments(ctypes.Structure):
    """Mirrors `Selection` in select.cu."""

    _fields_ = (
        ("parents", ctypes.c_void_p),
        *((name, StoreArguments) for name in ("before", "after")),
        *((name, ctypes.c_void_p) for name in (
            "ancestors", "new_ancestors", "order_index", "new_order_index", "order", "columns", "new_columns",
        )),
        ("plane_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in (
            "row_elements", "candidates", "candidates_before", "depth", "completes",
        )),
    )  # fmt: skip


Target = Literal["gpu", "fibers", "serial"]
"""Where kernels run: on a GPU, or for tests on a CPU with one fiber per CUDA thread, or one thread per thread block."""


@dataclass(frozen=True)
class Sizes:
    """Compile-time sizes of the kernels."""

    width: int
    heads: int
    layers: int
    vocabulary: int
    bf16: bool

    def definitions(self) -> list[str]:
        """Compiler options that define the sizes."""
        names = ("width", "heads", "layers", "vocabulary")
        return [f"-D{name.upper()}={getattr(self, name)}" for name in names] + ["-DBF16"] * self.bf16

    def source(self, target: Target) -> str:
        """Concatenate the source files for a target in this precision."""
        folder = resources.files(__name__)
        own = ("matrix.cuh", "attention.cuh", "bf16.cu") if self.bf16 else ("float32.cu",)
        names = (f"{target}.cuh", "common.cuh", "tiles.cuh", *own, "select.cu")
        return "\n".join(folder.joinpath(name).read_text() for name in names)


class Kernels(Protocol):
    """Compiled kernels that can be launched."""

    tile_bytes: int
    """Shared memory of one entry in a thread block's tile list."""
    multiprocessors: int
    """Number of multiprocessors: thread blocks that run concurrently."""

    @property
    def max_tiles(self) -> int:
        """Maximum length of a thread block's tile list."""

    def extend(self, arguments: RunArguments, blocks: int, max_tiles: int) -> None:
        """Launch `extend` for `blocks` groups of candidates, with shared memory for `max_tiles` tiles each."""

    def keep(self, arguments: KeepArguments, envs: int) -> None:
        """Launch `keep`."""

    def select(self, arguments: SelectArguments, envs: int) -> None:
        """Launch `select_parents`."""


class CudaKernels:
    """Kernels on a GPU, launched on torch's current stream."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        """Compile and load the kernels; raises RuntimeError on failure."""
        properties = torch.cuda.get_device_properties(device)
        if sizes.bf16 and properties.major < 9:
            raise RuntimeError(
                f"bfloat16 needs compute capability 9, this GPU has {properties.major}.{properties.minor}"
            )
        self.multiprocessors: int = properties.multi_processor_count
        self._device = device
        self._sizes = sizes
        self._driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context current
            cubin = _compile(sizes, f"sm_{properties.major}{properties.minor}")
            module = ctypes.c_void_p()
            self._check(self._driver.cuModuleLoadData(ctypes.byref(module), cubin), "load the kernels")
            self._module = module
            self._extend, self._keep, self._select = (
                self._function(name) for name in (b"extend", b"keep", b"select_parents")
            )
            self._shared_struct_bytes, run_bytes, self.tile_bytes = (
                self._constant(name) for name in (b"room_bytes", b"run_bytes", b"tile_bytes")
            )
        assert run_bytes == ctypes.sizeof(RunArguments), "RunArguments does not match Run in common.cuh"
        self._max_shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        if self._shared_struct_bytes > self._max_shared_bytes:
            raise RuntimeError(
                f"a thread block needs {self._shared_struct_bytes} bytes of shared memory, "
                f"this GPU has {self._max_shared_bytes}"
            )
        for function in (self._extend, self._keep, self._select):
            limit = self._driver.cuFuncSetAttribute(function, 8, self._max_shared_bytes)  # max dynamic shared memory
            self._check(limit, "raise the shared memory limit")

    @property
    def max_tiles(self) -> int:
        """Maximum length of a thread block's tile list."""
        return (self._max_shared_bytes - self._shared_struct_bytes) // self.tile_bytes

    def extend(self, arguments: RunArguments, blocks: int, max_tiles: int) -> None:
        """Launch `extend` for `blocks` groups of candidates, with shared memory for `max_tiles` tiles each."""
        blocks *= RANKS if self._sizes.bf16 else 1
        self._launch(self._extend, arguments, blocks, self._shared_struct_bytes + max_tiles * self.tile_bytes)

    def keep(self, arguments: KeepArguments, envs: int) -> None:
        """Launch `keep`."""
        self._launch(self._keep, arguments, envs, 32 * _padded_count(arguments.candidates))

    def select(self, arguments: SelectArguments, envs: int) -> None:
        """Launch `select_parents`."""
        teams = 1 if arguments.new_columns else THREADS // TEAM
        blocks = envs * (1 + -(-arguments.candidates // teams))
        self._launch(self._select, arguments, blocks, 4 * _padded_count(arguments.candidates))

    def _launch(self, function: ctypes.c_void_p, arguments: ctypes.Structure, blocks: int, shared_bytes: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        one = 1
        code = self._driver.cuLaunchKernel(
            function, blocks, one, one, THREADS, one, one, shared_bytes, stream, parameters, None
        )
        self._check(code, "launch a kernel")

    def _function(self, name: bytes) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), self._module, name), "find a kernel")
        return function

    def _constant(self, name: bytes) -> int:
        address, size, value = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_int()
        found = self._driver.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), self._module, name)
        self._check(found, "find a constant")
        self._check(self._driver.cuMemcpyDtoH_v2(ctypes.byref(value), address, ctypes.c_size_t(4)), "read a constant")
        return value.value

    def _check(self, code: int, what: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"could not {what}: {(text.value or b'unknown error').decode()}")


class HostKernels:
    """The same source compiled for a CPU: slow, for tests of everything but speed."""

    def __init__(self, sizes: Sizes, folder: Path, target: Target) -> None:
        """Compile with the system's C++ compiler into a folder; bfloat16 needs the target `fibers`."""
        compiler = find_compiler()
        if compiler is None:
            raise RuntimeError("no C++ compiler found: install c++, g++ or clang++")
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        source.write_text(sizes.source(target))
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-DHOST", *sizes.definitions()]
        done = subprocess.run([compiler, *flags, source, "-o", library], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the kernels failed to compile with {compiler}: {done.stderr}")
        self._library = ctypes.CDLL(str(library))
        self.tile_bytes = ctypes.c_int.in_dll(self._library, "tile_bytes").value
        self.multiprocessors = 4
        assert ctypes.c_int.in_dll(self._library, "run_bytes").value == ctypes.sizeof(RunArguments)

    @property
    def max_tiles(self) -> int:
        """Maximum length of a thread block's tile list."""
        return 10_000

    def extend(self, arguments: RunArguments, blocks: int, max_tiles: int) -> None:
        """Run `extend`."""
        del max_tiles
        self._library.launch_extend(ctypes.byref(arguments), blocks)

    def keep(self, arguments: KeepArguments, envs: int) -> None:
        """Run `keep`."""
        self._library.launch_keep(ctypes.byref(arguments), envs)

    def select(self, arguments: SelectArguments, envs: int) -> None:
        """Run `select_parents`."""
        self._library.launch_select(ctypes.byref(arguments), envs)


def _padded_count(count: int) -> int:
    """Next power of two, at least 32: array size for sorting `count` keys, as in select.cu."""
    return max(1 << (count - 1).bit_length(), 32)


def find_compiler() -> str | None:
    """Return the path of a C++ compiler, or None."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


@functools.cache
def cuda_kernels(sizes: Sizes, device: torch.device) -> CudaKernels:
    """Return the kernels for a GPU, compiled once per process."""
    return CudaKernels(sizes, device)


def _compile(sizes: Sizes, architecture: str) -> bytes:
    """Compile to a cubin for a GPU architecture with NVRTC."""
    nvrtc = _load_nvrtc()
    program = ctypes.c_void_p()
    source = sizes.source("gpu").encode()
    options = [option.encode() for option in (f"-arch={architecture}", "-std=c++17", *sizes.definitions())]
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None):
        raise RuntimeError("NVRTC failed to create a program")
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"the kernels failed to compile for {architecture}: {log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def _load_nvrtc() -> ctypes.CDLL:
    """Load NVRTC from the package that torch depends on, or from the system."""
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    packages = Path(sysconfig.get_path("purelib"))
    paths: Sequence[str] = [str(path) for path in sorted(packages.glob(f"nvidia/*/lib/{name}"))]
    for candidate in (*paths, name, "libnvrtc.so"):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise RuntimeError(f"NVRTC ({name}) was not found: install the CUDA toolkit or nvidia-cuda-nvrtc")
