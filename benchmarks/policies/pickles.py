"""Read arrays out of pickles without running what they name.

A pickle is a program that may call any function it names. This reader knows a few names and gives each a stand-in of
its own that only keeps what it is handed; any other name is an error. No class or function of the file's choice is
imported or called, NumPy's own constructors included: an array of objects could hold invented pointers.
"""

import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_NUMBERS = ("b1", "i1", "u1", "i4", "u4", "i8", "u8", "f4", "f8")
_STORAGES = {"FloatStorage": "<f4", "DoubleStorage": "<f8", "LongStorage": "<i8"}


class Record:
    """What is left of an object: the state that its class would have been given."""

    def __init__(self, *arguments: object) -> None:
        """Ignore the arguments of the class."""
        self.state: Mapping[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        """Keep a state that is a dictionary of attributes, and no other."""
        self.state = state if isinstance(state, dict) else {}


class _Numbers:
    """A NumPy type: plain numbers only."""

    def __init__(self, name: str, align: object = False, copy: object = True) -> None:
        if name not in _NUMBERS:
            raise pickle.UnpicklingError(f"arrays must hold numbers, got type {name!r}")
        self.dtype = np.dtype("<" + name)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        if state[1] not in ("<", "|", "="):
            raise pickle.UnpicklingError(f"arrays must be little-endian, got byte order {state[1]!r}")


class _StoredArray:
    """A NumPy array as it is stored."""

    array: Array

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, numbers, is_fortran, content = state
        if not isinstance(numbers, _Numbers) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array must be stored as the bytes of numbers")
        flat = np.frombuffer(content, numbers.dtype)
        self.array = flat.reshape(shape, order="F" if is_fortran else "C")


class _Storage:
    """The type of a torch storage."""

    def __init__(self, name: str) -> None:
        self.dtype = np.dtype(_STORAGES[name])


class _Named(dict[str, Any]):
    """An ordered dictionary; torch gives that of a network's weights attributes, which are left out."""

    def __setstate__(self, state: object) -> None:
        pass


def _scalar(numbers: _Numbers, content: bytes) -> Array:
    """A NumPy scalar as an array without dimensions."""
    return np.frombuffer(content, numbers.dtype).reshape(())


def _encoded(text: str, encoding: str) -> bytes:
    """Bytes that Python 2 protocols store as text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes must be stored as latin1, got {encoding!r}")
    return text.encode("latin1")


def _tensor(storage: Array, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: object) -> Array:
    """A tensor that covers its storage row by row; views are refused."""
    rows = tuple(math.prod(size[index + 1 :]) for index in range(len(size)))
    if stride != rows or offset < 0 or offset + math.prod(size) > len(storage):
        raise pickle.UnpicklingError(f"a tensor must be a part of its storage in row order, got {size} by {stride}")
    return storage[offset : offset + math.prod(size)].reshape(size)


_STAND_INS: dict[str, Any] = {
    "_codecs encode": _encoded,
    "collections OrderedDict": _Named,
    "gym.spaces.box Box": Record,
    "numpy dtype": _Numbers,
    "numpy ndarray": None,  # only named, as an argument
    "numpy.core.multiarray _reconstruct": _StoredArray,
    "numpy.core.multiarray scalar": _scalar,
    "numpy.random._pickle __randomstate_ctor": Record,
    "stable_baselines3.common.running_mean_std RunningMeanStd": Record,
    "stable_baselines3.common.vec_env.vec_normalize VecNormalize": Record,
    "torch._utils _rebuild_tensor_v2": _tensor,
    **{f"torch {name}": _Storage(name) for name in _STORAGES},
}


class _Reader(pickle.Unpickler):
    """An unpickler that knows only stand-ins."""

    def __init__(self, content: bytes, archive: zipfile.ZipFile | None = None, prefix: str = "") -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self._archive, self._prefix = archive, prefix

    def find_class(self, module: str, name: str) -> Any:
        key = f"{module} {name}"
        if key not in _STAND_INS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not among the things to expect here")
        return _STAND_INS[key]

    def persistent_load(self, pid: Any) -> Array:
        if self._archive is None:
            raise pickle.UnpicklingError("it refers to data outside of the file")
        kind, storage, key, _, count = pid
        if kind != "storage" or not isinstance(storage, _Storage):
            raise pickle.UnpicklingError("a tensor must have a storage of numbers")
        content = np.frombuffer(self._archive.read(f"{self._prefix}data/{key}"), storage.dtype)
        if len(content) != count:
            raise pickle.UnpicklingError(f"storage {key} must have {count} numbers, got {len(content)}")
        return content


def read_pickle(content: bytes) -> Any:
    """The arrays, records, dictionaries and plain values of a pickle."""
    return _plain(_Reader(content).load())


def read_tensors(content: bytes) -> dict[str, Array]:
    """The named tensors of a file written by `torch.save`."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        found = _Reader(archive.read(name), archive, name.removesuffix("data.pkl")).load()
    if not isinstance(found, dict) or not all(isinstance(value, np.ndarray) for value in found.values()):
        raise pickle.UnpicklingError("a file of weights must hold tensors by name")
    return found


def _plain(value: Any) -> Any:
    """Arrays instead of their stand-ins, within dictionaries and records."""
    if isinstance(value, _StoredArray):
        return value.array
    if isinstance(value, Record):
        return {name: _plain(part) for name, part in value.state.items()}
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value
