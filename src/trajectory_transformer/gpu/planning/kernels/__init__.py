"""The fused decoder's kernels: CUDA C++ compiled for a model's sizes at first use, with the compiler torch brings.

Nothing here needs a GPU to be imported. `HostKernels` runs the same source on a CPU, for tests.
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
MAX_CANDIDATES = 4096  # of one environment, as in select.cu
MAX_PARTS = 2  # runs of slots that one launch takes, as in common.cuh
RANKS = 2  # blocks that work together in bfloat16, as in matrix.cuh
THREADS = 512
TEAM = 128  # threads that move a candidate where there is little to move, as in select.cu


class StoreArguments(ctypes.Structure):
    """`Store` of common.cuh, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tokens", "rewards", "log_prob", "value", "ended", "identity")),
        *((name, ctypes.c_int) for name in ("token_room", "reward_room", "num_tokens", "num_rewards")),
    )


class PartArguments(ctypes.Structure):
    """`Part` of common.cuh, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("seeds", "worths")),
        *((name, ctypes.c_int) for name in ("number", "num_slots", "allow_stop", "top_k")),
        *((name, ctypes.c_float) for name in ("temperature", "dropped", "middle", "percentile")),
    )


class RunArguments(ctypes.Structure):
    """`Run` of common.cuh, field by field."""

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
            "groups", "given_room", "num_given", "num_slots", "first_slot", "start", "head_period", "head_first",
        )),
    )  # fmt: skip


class KeepArguments(ctypes.Structure):
    """`Ranking` of select.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "identity", "kept")),
        *((name, ctypes.c_int) for name in ("candidates", "width", "distinct")),
    )


class SelectArguments(ctypes.Structure):
    """`Selection` of select.cu, field by field."""

    _fields_ = (
        ("parents", ctypes.c_void_p),
        *((name, StoreArguments) for name in ("before", "after")),
        *((name, ctypes.c_void_p) for name in (
            "ancestors", "new_ancestors", "places", "new_places", "order", "columns", "new_columns",
        )),
        ("plane_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in (
            "row_numbers", "candidates", "candidates_before", "depth", "completes",
        )),
    )  # fmt: skip


Machine = Literal["gpu", "fibers", "serial"]
"""What runs the kernels: a GPU, or for tests a CPU with a fiber for each GPU thread, or with one thread for a block."""


@dataclass(frozen=True)
class Sizes:
    """What the source is compiled for."""

    width: int
    heads: int
    layers: int
    vocabulary: int
    bf16: bool

    def definitions(self) -> list[str]:
        """As the compiler's command line wants them."""
        names = ("width", "heads", "layers", "vocabulary")
        return [f"-D{name.upper()}={getattr(self, name)}" for name in names] + ["-DBF16"] * self.bf16

    def source(self, machine: Machine) -> str:
        """The whole source in the precision asked for."""
        folder = resources.files(__name__)
        own = ("matrix.cuh", "attention.cuh", "bf16.cu") if self.bf16 else ("float32.cu",)
        names = (f"{machine}.cuh", "common.cuh", "tiles.cuh", *own, "select.cu")
        return "\n".join(folder.joinpath(name).read_text() for name in names)


class Kernels(Protocol):
    """Compiled kernels that can be launched."""

    tile_bytes: int
    """Shared memory of one entry in a block's list of tiles."""
    multiprocessors: int
    """Blocks that run at the same time."""

    @property
    def max_tiles(self) -> int:
        """Tiles that a block's list may hold."""

    def extend(self, arguments: RunArguments, blocks: int, max_tiles: int) -> None:
        """Launch `extend` for so many groups of candidates, each with room for so many tiles."""

    def keep(self, arguments: KeepArguments, envs: int) -> None:
        """Launch `keep`."""

    def select(self, arguments: SelectArguments, envs: int) -> None:
        """Launch `select_parents`."""


class CudaKernels:
    """Kernels on a GPU, launched on torch's current stream."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        """Compile and load; RuntimeError says what went wrong."""
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
            torch.cuda.current_stream().synchronize()  # makes the device's context the current one
            cubin = _compile(sizes, f"sm_{properties.major}{properties.minor}")
            module = ctypes.c_void_p()
            self._check(self._driver.cuModuleLoadData(ctypes.byref(module), cubin), "load the kernels")
            self._module = module
            self._extend, self._keep, self._select = (
                self._function(name) for name in (b"extend", b"keep", b"select_parents")
            )
            self._room_bytes, run_bytes, self.tile_bytes = (
                self._constant(name) for name in (b"room_bytes", b"run_bytes", b"tile_bytes")
            )
        assert run_bytes == ctypes.sizeof(RunArguments), "kernel and caller differ about the parameters"
        self._most_shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        if self._room_bytes > self._most_shared:
            raise RuntimeError(
                f"a block needs {self._room_bytes} bytes of shared memory, the GPU has {self._most_shared}"
            )
        for function in (self._extend, self._keep, self._select):
            limit = self._driver.cuFuncSetAttribute(function, 8, self._most_shared)  # dynamic shared memory
            self._check(limit, "raise the limit of shared memory")

    @property
    def max_tiles(self) -> int:
        """Tiles that a block's list may hold."""
        return (self._most_shared - self._room_bytes) // self.tile_bytes

    def extend(self, arguments: RunArguments, blocks: int, max_tiles: int) -> None:
        """Launch `extend` for so many groups of candidates, each with room for so many tiles."""
        blocks *= RANKS if self._sizes.bf16 else 1
        self._launch(self._extend, arguments, blocks, self._room_bytes + max_tiles * self.tile_bytes)

    def keep(self, arguments: KeepArguments, envs: int) -> None:
        """Launch `keep`."""
        self._launch(self._keep, arguments, envs, 32 * _sorting_room(arguments.candidates))

    def select(self, arguments: SelectArguments, envs: int) -> None:
        """Launch `select_parents`."""
        teams = 1 if arguments.new_columns else THREADS // TEAM
        blocks = envs * (1 + -(-arguments.candidates // teams))
        self._launch(self._select, arguments, blocks, 4 * _sorting_room(arguments.candidates))

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
    """The same source run by the CPU: slow, for tests of everything but speed."""

    def __init__(self, sizes: Sizes, folder: Path, machine: Machine) -> None:
        """Compile with the system's C++ compiler into a folder; bfloat16 needs fibers."""
        compiler = find_compiler()
        if compiler is None:
            raise RuntimeError("no C++ compiler found (c++, g++ or clang++)")
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        source.write_text(sizes.source(machine))
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-DHOST", *sizes.definitions()]
        done = subprocess.run([compiler, *flags, source, "-o", library], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the kernels do not compile: {done.stderr}")
        self._library = ctypes.CDLL(str(library))
        self.tile_bytes = ctypes.c_int.in_dll(self._library, "tile_bytes").value
        self.multiprocessors = 4
        assert ctypes.c_int.in_dll(self._library, "run_bytes").value == ctypes.sizeof(RunArguments)

    @property
    def max_tiles(self) -> int:
        """Tiles that a block's list may hold."""
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


def _sorting_room(count: int) -> int:
    """Numbers that a sort of `count` has room for, as in select.cu."""
    return max(1 << (count - 1).bit_length(), 32)


def find_compiler() -> str | None:
    """A C++ compiler of this system."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


@functools.cache
def cuda_kernels(sizes: Sizes, device: torch.device) -> CudaKernels:
    """Kernels for a GPU, compiled once a process."""
    return CudaKernels(sizes, device)


def _compile(sizes: Sizes, architecture: str) -> bytes:
    """Machine code for a GPU's architecture, by the run-time compiler of CUDA."""
    nvrtc = _load_nvrtc()
    program = ctypes.c_void_p()
    source = sizes.source("gpu").encode()
    options = [option.encode() for option in (f"-arch={architecture}", "-std=c++17", *sizes.definitions())]
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None):
        raise RuntimeError("CUDA's run-time compiler does not start")
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"the kernels do not compile for {architecture}: {log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def _load_nvrtc() -> ctypes.CDLL:
    """CUDA's run-time compiler: a package that torch depends on, or the system's."""
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    packages = Path(sysconfig.get_path("purelib"))
    places: Sequence[str] = [str(path) for path in sorted(packages.glob(f"nvidia/*/lib/{name}"))]
    for place in (*places, name, "libnvrtc.so"):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise RuntimeError(f"CUDA's run-time compiler ({name}) was not found")
