"""Where the fused decoder keeps keys and values, and which of them each candidate continues.

The prompt is segment 0; after it, each complete transition is a segment of its own. A segment's rows are the candidates
there were when it was completed, and they are never moved: every candidate has a list of ancestors, the row it
continues in each segment, and a selection only picks from those lists. Only the segment being written is copied with
its candidates.
"""

import functools

import torch
from torch import Tensor

from trajectory_transformer.gpu.planning.kernels import MAX_SEGMENTS, Kernels, RunArguments, SelectArguments
from trajectory_transformer.gpu.planning.packed import TILE, pack_tiles


class Segments:
    """Keys and values in tiles, for searches of any size one after the other."""

    def __init__(
        self, kernels: Kernels, *, layers: int, width: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Nothing yet; `capacity` tokens make a transition."""
        self._kernels = kernels
        self._device = device
        self._layers, self._width, self._dtype = layers, width, dtype
        self.capacity = capacity
        self.tiles = -(-capacity // TILE)  # of one row
        # [places, 2, layers, rows, tiles * width * 16], keys and values. One for each size of search, and for good: a
        # captured search goes on using its own.
        self._pools: dict[tuple[int, ...], Tensor] = {}
        self._pool = torch.empty(0)
        self._prompt_keys = self._prompt_values = torch.empty(0)  # see `pack_tiles`
        self._prompt_columns = 0
        # [E, K, MAX_SEGMENTS], rows counted over all environments; None before anything was read.
        self._ancestors: Tensor | None = None
        # In which order candidates are worked on, and each one's place in it [E, K]: families side by side, so that
        # what they have in common is read once.
        self._order = self._places = torch.empty(0)
        self._complete: list[int] = []  # places in the pool, segment by segment
        self._current = 0
        self.columns = 0  # of the segment being written

    def begin(self, *, rows: int, places: int) -> None:
        """Make room for so many candidates, counted over all environments, and segments."""
        shape = (places, 2, self._layers, rows, self.tiles * self._width * TILE)
        if shape not in self._pools:
            self._check_memory(shape)
            # Zeros: a tile is multiplied as a whole, and what no token has filled must not be infinite.
            self._pools[shape] = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._pool = self._pools[shape]
        self._ancestors = None
        self._complete, self._current, self.columns = [], 0, 0

    def restart(self, keys: Tensor, values: Tensor, *, columns: int, envs: int, candidates: int) -> None:
        """Start from a prompt's keys and values [layers, R, H, C, d], a row for each environment or each candidate.

        Of the C columns, a multiple of 16, the first `columns` count.
        """
        self._prompt_keys = pack_tiles(keys.to(self._dtype), transposed=False)
        self._prompt_values = pack_tiles(values.to(self._dtype), transposed=True)
        self._prompt_columns = columns
        self._ancestors, self._order = _first_ancestors(envs, keys.shape[1] // envs, candidates, self._device)
        self._places = self._order
        self._complete, self.columns = [], 0

    @property
    def room(self) -> int:
        """Columns that the segment being written has left."""
        return self.capacity - self.columns

    def select(self, arguments: SelectArguments, envs: int, candidates: int) -> None:
        """Replace the candidates by copies of themselves, as told; a full segment is complete with that."""
        before, places = self._ancestors, self._places
        if before is not None:
            self._ancestors = torch.empty(envs, candidates, MAX_SEGMENTS, dtype=torch.int32, device=self._device)
            order = torch.empty(2, envs, candidates, dtype=torch.int32, device=self._device)
            self._order, self._places = order.unbind()
            arguments.ancestors, arguments.new_ancestors = before.data_ptr(), self._ancestors.data_ptr()
            arguments.places, arguments.new_places = places.data_ptr(), self._places.data_ptr()
            arguments.order, arguments.depth = self._order.data_ptr(), len(self._complete)
            if not self.room:
                arguments.completes = True
                self._complete.append(self._current)
                self._current, self.columns = self._free_place(), 0
            elif self.columns:
                place = self._free_place()
                arguments.columns = self._pool[self._current].data_ptr()
                arguments.new_columns = self._pool[place].data_ptr()
                arguments.plane_stride, arguments.row_numbers = self._pool.stride(2), self._pool.stride(3)
                self._current = place
        self._kernels.select(arguments, envs)

    def describe_to(self, arguments: RunArguments) -> None:
        """Tell a kernel where everything is."""
        pool = self._pool
        layer_stride = pool.shape[3] * pool.shape[4]
        assert self._ancestors is not None, "a prompt is read first"
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
        """Tiles that so many candidates read at most."""
        return num_rows * (self._prompt_keys.shape[2] + (len(self._complete) + 1) * self.tiles)

    def _free_place(self) -> int:
        used = {*self._complete, self._current}
        return next(place for place in range(len(self._pool)) if place not in used)

    def _check_memory(self, shape: tuple[int, ...]) -> None:
        """Refuse a search that would not fit, before it is half done."""
        if self._device.type != "cuda":
            return
        needed = functools.reduce(int.__mul__, shape) * self._dtype.itemsize
        free = torch.cuda.mem_get_info(self._device)[0]
        if needed > free:
            raise ValueError(
                f"a search with {shape[3]} candidates needs {needed / 2**30:.1f} GiB for keys and values, "
                f"{free / 2**30:.1f} GiB are free: lower search.beam_width, search.expansion or --num_envs"
            )


@functools.cache
def _first_ancestors(envs: int, rows: int, candidates: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ancestors and order of candidates that continue a prompt: each environment's, or its own of as many `rows`."""
    numbers = torch.arange(candidates, dtype=torch.int32, device=device)
    first = torch.arange(envs, dtype=torch.int32, device=device)[:, None] * rows
    ancestors = torch.zeros(envs, candidates, MAX_SEGMENTS, dtype=torch.int32, device=device)
    ancestors[:, :, 0] = first + (numbers if rows > 1 else 0)
    return ancestors, numbers.expand(envs, -1).contiguous()
