"""The fused decoder's key-value cache, stored in segments that candidates share.

Segment 0 is the prompt; after it, each complete transition is one segment. The rows of a segment are the candidates
that existed when it was completed, and they are never copied again. Instead, every candidate has a list of ancestors:
the row that it continues in each segment. A selection copies only these lists and the segment being written.
"""

import functools
import math

import torch
from torch import Tensor

from trajectory_transformer.gpu.planning.kernels import MAX_SEGMENTS, Kernels, RunArguments, SelectArguments
from trajectory_transformer.gpu.planning.packed import TILE, pack_tiles
from trajectory_transformer.search.cache import check_free_memory


class Segments:
    """Keys and values in tiles; reused by consecutive searches of any size."""

    def __init__(
        self, kernels: Kernels, *, layers: int, width: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Create an empty cache; `capacity` is the number of columns of a transition."""
        self._kernels = kernels
        self._device = device
        self._layers, self._width, self._dtype = layers, width, dtype
        self.capacity = capacity
        self.tiles = -(-capacity // TILE)  # tiles per row
        # [segments, 2, layers, rows, tiles * width * 16], keys and values. One pool for each size of search; never
        # freed, because a captured search keeps using its own.
        self._pools: dict[tuple[int, ...], Tensor] = {}
        self._pool = torch.empty(0)
        self._prompt_keys = self._prompt_values = torch.empty(0)  # see `pack_tiles`
        self._prompt_columns = 0
        # [E, K, MAX_SEGMENTS], row indices across all environments; None before a prompt is read.
        self._ancestors: Tensor | None = None
        # The order in which thread blocks process candidates, and its inverse [E, K]. Candidates with common ancestors
        # are adjacent, so that a block loads their shared tiles once.
        self._order = self._order_index = torch.empty(0)
        self._complete: list[int] = []  # pool index of each complete segment
        self._current = 0
        self.columns = 0  # used columns of the segment being written

    def begin(self, *, rows: int, num_segments: int) -> None:
        """Allocate `num_segments` segments of `rows` candidates (of all environments together)."""
        shape = (num_segments, 2, self._layers, rows, self.tiles * self._width * TILE)
        if shape not in self._pools:
            check_free_memory(math.prod(shape) * self._dtype.itemsize, rows, self._device)
            # Zeros: matmuls read whole tiles, and uninitialised columns could hold NaN or infinity.
            self._pools[shape] = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._pool = self._pools[shape]
        self._ancestors = None
        self._complete, self._current, self.columns = [], 0, 0

    def restart(self, keys: Tensor, values: Tensor, *, columns: int, envs: int, candidates: int) -> None:
        """Start from a prompt's keys and values [layers, R, H, C, d]; R is one row per environment or per candidate.

        C is a multiple of 16; only the first `columns` columns are valid.
        """
        self._prompt_keys = pack_tiles(keys.to(self._dtype), transposed=False)
        self._prompt_values = pack_tiles(values.to(self._dtype), transposed=True)
        self._prompt_columns = columns
        self._ancestors, self._order = _first_ancestors(envs, keys.shape[1] // envs, candidates, self._device)
        self._order_index = self._order
        self._complete, self.columns = [], 0

    @property
    def columns_left(self) -> int:
        """Free columns of the segment being written."""
        return self.capacity - self.columns

    def select(self, arguments: SelectArguments, envs: int, candidates: int) -> None:
        """Replace candidates by copies of their parents; a full segment is marked complete."""
        before, order_index = self._ancestors, self._order_index
        if before is not None:
            self._ancestors = torch.empty(envs, candidates, MAX_SEGMENTS, dtype=torch.int32, device=self._device)
            order = torch.empty(2, envs, candidates, dtype=torch.int32, device=self._device)
            self._order, self._order_index = order.unbind()
            arguments.ancestors, arguments.new_ancestors = before.data_ptr(), self._ancestors.data_ptr()
            arguments.order_index, arguments.new_order_index = order_index.data_ptr(), self._order_index.data_ptr()
            arguments.order, arguments.depth = self._order.data_ptr(), len(self._complete)
            if not self.columns_left:
                arguments.completes = True
                self._complete.append(self._current)
                self._current, self.columns = self._free_index(), 0
            elif self.columns:
                index = self._free_index()
                arguments.columns = self._pool[self._current].data_ptr()
                arguments.new_columns = self._pool[index].data_ptr()
                arguments.plane_stride, arguments.row_elements = self._pool.stride(2), self._pool.stride(3)
                self._current = index
        self._kernels.select(arguments, envs)

    def fill_arguments(self, arguments: RunArguments) -> None:
        """Fill in the kernel arguments that describe the cache."""
        pool = self._pool
        layer_stride = pool.shape[3] * pool.shape[4]
        assert self._ancestors is not None, "no prompt was read: call restart first"
        arguments.order, arguments.ancestors = self._order.data_ptr(), self._ancestors.data_ptr()
        arguments.prompt_keys, arguments.prompt_values = self._prompt_keys.data_ptr(), self._prompt_values.data_ptr()
        arguments.keys, arguments.values = pool.data_ptr(), pool[0, 1].data_ptr()
        arguments.prompt_stride = self._prompt_keys[0].numel()
        arguments.layer_stride, arguments.segment_stride = layer_stride, 2 * pool.shape[2] * layer_stride
        arguments.depth, arguments.current = len(self._complete), self._current
        arguments.prompt_tiles, arguments.prompt_columns = self._prompt_keys.shape[2], self._prompt_columns
        arguments.tiles, arguments.capacity, arguments.columns = self.tiles, self.capacity, self.columns
        arguments.segments[1 : 1 + len(self._complete)] = self._complete

    def max_tiles(self, num_rows: int) -> int:
        """Maximum number of tiles that `num_rows` candidates read."""
        return num_rows * (self._prompt_keys.shape[2] + (len(self._complete) + 1) * self.tiles)

    def _free_index(self) -> int:
        used = {*self._complete, self._current}
        return next(index for index in range(len(self._pool)) if index not in used)


@functools.cache
def _first_ancestors(envs: int, rows: int, candidates: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Initial ancestors [E, K, MAX_SEGMENTS] and order [E, K]: `rows` is 1 if candidates share a prompt row, else K."""
    numbers = torch.arange(candidates, dtype=torch.int32, device=device)
    first = torch.arange(envs, dtype=torch.int32, device=device)[:, None] * rows
    ancestors = torch.zeros(envs, candidates, MAX_SEGMENTS, dtype=torch.int32, device=device)
    ancestors[:, :, 0] = first + (numbers if rows > 1 else 0)
    return ancestors, numbers.expand(envs, -1).contiguous()
