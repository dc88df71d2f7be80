"""The fused decoder: one CUDA kernel per run of slots. Launching many small kernels would cost more than the work."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trajectory_transformer.gpu.planning.kernels import (
    MAX_CANDIDATES,
    MAX_PARTS,
    MAX_SEGMENTS,
    RANKS,
    KeepArguments,
    Kernels,
    PartArguments,
    RunArguments,
    SelectArguments,
    Sizes,
    StoreArguments,
    cuda_kernels,
)
from trajectory_transformer.gpu.planning.packed import TILE, PackedWeights
from trajectory_transformer.gpu.planning.prompt import read_prompt
from trajectory_transformer.gpu.planning.segments import Segments
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.search.decoder import Candidates, Run, StepwiseDecoder

MAX_ROWS = 8  # candidates of one thread block, as in common.cuh


class FusedDecoder(StepwiseDecoder):
    """Extends candidates with one kernel per run, without synchronising with the host."""

    def __init__(
        self, gpt: GPT, window: int | None = None, *, bf16: bool = True, kernels: Kernels | None = None
    ) -> None:
        """Decode with a model; matmuls in bfloat16 or float32."""
        super().__init__(gpt, window)
        reason = why_not_fused(gpt, self.window, bf16=bf16)
        if reason is not None:
            raise ValueError(f"the fused decoder cannot be used: {reason}")
        self.device = gpt.position_embedding.device
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self._kernels = kernels or cuda_kernels(sizes_of(gpt, bf16=bf16), self.device)
        self._weights = PackedWeights(gpt, self.dtype)
        layout = gpt.layout
        self._segments = Segments(
            self._kernels,
            layers=gpt.config.num_layers,
            width=gpt.config.width,
            capacity=layout.size - layout.rewards,  # nothing reads a value
            dtype=self.dtype,
            device=self.device,
        )
        self._readable = layout.readable(0, gpt.max_tokens)
        self._readable_mask = torch.tensor(self._readable, dtype=torch.uint8, device=self.device)
        self.rows_per_block: int | None = None  # None: chosen by the number of candidates
        self._store = self.candidates  # the same with room for more tokens and rewards
        self._position = -1  # visible tokens read so far; -1 before the first pass
        self._cropped = 0

    def refresh(self) -> None:
        """Update the packed weights if the model has changed; a captured search calls this before every replay."""
        self._weights.refresh()

    def begin(self, prompt: Tensor, *, max_candidates: int, max_new: int, map_embedding: Tensor | None = None) -> None:
        """Start a search, see `Decoder`."""
        map_embedding = None if map_embedding is None else map_embedding.float().contiguous()
        super().begin(prompt, max_candidates=max_candidates, max_new=max_new, map_embedding=map_embedding)
        if max_candidates > MAX_CANDIDATES:
            raise ValueError(
                f"the fused decoder takes at most {MAX_CANDIDATES} candidates (search.beam_width x search.expansion), "
                f"got {max_candidates}: use search.backend cached"
            )
        self.refresh()
        # Besides the complete segments: the one being written, and one to copy it to.
        places = min(max_new // self.gpt.layout.size + 2, self.window + 1) + 2
        self._segments.begin(rows=prompt.shape[0] * max_candidates, places=places)
        self._position, self._cropped = -1, 0
        layout, device = self.gpt.layout, self.device
        self._store = replace(
            self.candidates,
            tokens=torch.empty(len(prompt), 1, max_new, dtype=torch.long, device=device),
            rewards=torch.empty(len(prompt), 1, max_new // layout.size + 1, device=device),
        )

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits of every candidate's next token [E, K, V + 1]; call it at most once per token."""
        self._catch_up()
        envs, candidates, _ = self.tokens.shape
        logits = torch.empty(envs, candidates, self.gpt.num_bins + 1, device=self.device)
        self._launch(1, logits=logits)
        return logits

    def append(self, tokens: Tensor) -> None:
        """Add one token to every candidate: tokens [E, K]."""
        self._store.tokens[:, :, self.tokens.shape[2]] = tokens
        self._show(num_more=1)

    @torch.no_grad()
    def extend(self, *runs: Run) -> None:
        """Add runs of slots to every candidate, one after the other."""
        for first in range(0, len(runs), MAX_PARTS):
            parts = runs[first : first + MAX_PARTS]
            num_slots, done = sum(part.num_slots for part in parts), 0
            while done < num_slots:
                self._catch_up()
                count = self._slots_at_once(num_slots - done)
                num_rewards = _num_rewards(parts, done, count)
                assert self.tokens.shape[2] + count <= self._store.tokens.shape[2], "there is room for max_new tokens"
                assert self.candidates.rewards.shape[2] + num_rewards <= self._store.rewards.shape[2]
                self._launch(count, parts=parts, first_slot=done)
                self._show(num_more=count, num_rewards=num_rewards)
                done += count

    def select(self, parents: Tensor) -> None:
        """Replace the candidates by copies of themselves: parents [E, K']."""
        before, parents = self._store, parents.contiguous()

        def empty(part: Tensor) -> Tensor:
            return part.new_empty(*parents.shape, *part.shape[2:])

        self._store = Candidates(
            tokens=empty(before.tokens),
            log_prob=empty(before.log_prob),
            rewards=empty(before.rewards),
            value=empty(before.value),
            ended=empty(before.ended),
            identity=empty(before.identity),
            prompt=before.prompt,
        )
        arguments = SelectArguments(
            parents=parents.data_ptr(),
            before=self._describe(before),
            after=self._describe(self._store),
            candidates=parents.shape[1],
            candidates_before=before.value.shape[1],
        )
        self._segments.select(arguments, *parents.shape)
        self._show()

    def keep(self, scores: Tensor, width: int, *, distinct: bool) -> Tensor:
        """Indices of the best candidates in one kernel, see `Decoder`."""
        envs, candidates = scores.shape
        kept = torch.empty(envs, width, dtype=torch.long, device=self.device)
        scores, identity = scores.float().contiguous(), self._store.identity
        arguments = KeepArguments(
            scores=scores.data_ptr(),
            identity=identity.data_ptr(),
            kept=kept.data_ptr(),
            candidates=candidates,
            width=width,
            distinct=distinct,
        )
        self._kernels.keep(arguments, envs)
        return kept

    def _catch_up(self) -> None:
        """Read what must be read before the next slot: everything visible if the window has slid."""
        cropped = self.num_cropped()
        if self._position < 0 or cropped != self._cropped:
            # Positions restart after a crop, so what was read before is no longer valid.
            self._cropped = cropped
            prompt, own = self.visible(cropped)
            if own.shape[2] and self._position >= 0:
                shared = prompt[:, None].expand(-1, own.shape[1], -1)
                self._read_visible(torch.cat([shared, own], dim=2)[..., :-1])
            else:
                self._read_visible(prompt[:, None, :-1])
        num_unread = self._num_visible() - self._position
        while self._columns_of(num_unread) > self._segments.room:
            # The segment is full or would overflow: tokens were appended without asking for logits.
            count = next(n for n in range(num_unread, -1, -1) if self._columns_of(n) <= self._segments.room)
            if count:
                self._launch(0, num_given=count + 1)
                num_unread -= count
            envs, candidates, _ = self.tokens.shape
            self.select(torch.arange(candidates, device=self.device).expand(envs, -1))  # this completes the segment

    def _read_visible(self, tokens: Tensor) -> None:
        """Fill the prompt's segment with tokens [E, 1 or K, L] in one pass of the model."""
        envs, rows, length = tokens.shape
        maps = None if self.map_embedding is None else self.map_embedding.repeat_interleave(rows, dim=0)
        keys, values = read_prompt(self.gpt, self._weights.blocks, tokens.flatten(0, 1), maps, multiple_of=TILE)
        self._segments.restart(
            keys, values, columns=sum(self._readable[:length]), envs=envs, candidates=self.tokens.shape[1]
        )
        self._position = length

    def _num_visible(self) -> int:
        return self.prompt.shape[1] - self._cropped + self.tokens.shape[2]

    def _columns_of(self, num_tokens: int) -> int:
        """Columns that the next unread tokens occupy."""
        return sum(self._readable[self._position : self._position + num_tokens])

    def _slots_at_once(self, wanted: int) -> int:
        """Slots that can be sampled before a segment is full or the window slides."""
        num_unread = self._num_visible() - self._position
        count = 1
        while (
            count < wanted
            and self.num_cropped(count) == self._cropped
            and self._columns_of(num_unread + count) <= self._segments.room
        ):
            count += 1
        return count

    def _launch(
        self,
        num_slots: int,
        *,
        num_given: int | None = None,
        parts: Sequence[Run] = (),
        first_slot: int = 0,
        logits: Tensor | None = None,
    ) -> None:
        """Read the unread tokens (`num_given - 1` of them before the first slot), and sample or return logits."""
        envs, candidates, _ = self.tokens.shape
        gpt, layout, segments = self.gpt, self.gpt.layout, self._segments
        given = self._unread()[..., :num_given]
        group = self._group(envs * candidates)
        groups = -(-candidates // group)
        predicted = self._position + given.shape[2]  # position of the first slot to sample
        arguments = RunArguments(
            token_embedding=gpt.token_embedding.weight.data_ptr(),
            position_embedding=gpt.position_embedding.data_ptr(),
            offsets=gpt.offsets.data_ptr(),
            readable=self._readable_mask.data_ptr(),
            map_embedding=None if self.map_embedding is None else self.map_embedding.data_ptr(),
            weights=self._weights.matrices.data_ptr(),
            vectors=self._weights.vectors.data_ptr(),
            heads=self._weights.heads.data_ptr(),
            given=given.data_ptr(),
            store=self._describe(self._store),
            parts=tuple(self._describe_part(part) for part in parts),
            logits=None if logits is None else logits.data_ptr(),
            stop_embedding=gpt.token_embedding.num_embeddings - 1,
            candidates=candidates,
            group=group,
            groups=groups,
            given_room=given.stride(1),
            num_given=given.shape[2],
            num_slots=num_slots,
            first_slot=first_slot,
            start=self._position,
            head_period=layout.size,
            head_first=layout.slot(predicted) if num_slots else 0,
        )
        segments.describe_to(arguments)
        max_tiles = segments.max_tiles(group)
        if max_tiles > self._kernels.max_tiles:
            raise ValueError(
                f"the fused decoder reads at most {self._kernels.max_tiles} tiles of keys at once, this search "
                f"needs {max_tiles}: lower search.window or use search.backend cached"
            )
        self._kernels.extend(arguments, envs * groups, max_tiles)
        num_read = given.shape[2] - 1 + num_slots
        segments.columns += self._columns_of(num_read)
        self._position += num_read

    def _show(self, *, num_more: int = 0, num_rewards: int = 0) -> None:
        """Expose what is in store, with this many more tokens and rewards."""
        num_tokens, num_rewards = self.tokens.shape[2] + num_more, self.candidates.rewards.shape[2] + num_rewards
        store = self._store
        self.candidates = replace(
            store, tokens=store.tokens[:, :, :num_tokens], rewards=store.rewards[:, :, :num_rewards]
        )

    def _describe(self, store: Candidates) -> StoreArguments:
        """Kernel arguments: where candidates are stored."""
        return StoreArguments(
            tokens=store.tokens.data_ptr(),
            rewards=store.rewards.data_ptr(),
            log_prob=store.log_prob.data_ptr(),
            value=store.value.data_ptr(),
            ended=store.ended.data_ptr(),
            identity=store.identity.data_ptr(),
            token_room=store.tokens.shape[2],
            reward_room=store.rewards.shape[2],
            num_tokens=self.tokens.shape[2],
            num_rewards=self.candidates.rewards.shape[2],
        )

    def _describe_part(self, run: Run) -> PartArguments:
        """Kernel arguments: how to sample."""
        sampler, every_token = run.sampler, self.gpt.num_bins + 1
        top_k, nucleus = (None, None) if sampler.middle is not None else (sampler.top_k, sampler.nucleus)
        assert run.values is None or run.values.is_contiguous()
        return PartArguments(
            seeds=None if run.noise is None else run.noise.seeds.data_ptr(),
            number=0 if run.noise is None else run.noise.number,
            worths=None if run.values is None else run.values.data_ptr(),
            num_slots=run.num_slots,
            allow_stop=run.allow_stop,
            top_k=every_token if top_k is None else top_k,
            temperature=sampler.temperature,
            dropped=-1.0 if nucleus is None or nucleus >= 1.0 else 1.0 - nucleus,
            middle=1.0 if sampler.middle is None else sampler.middle,
            percentile=-1.0 if run.percentile is None else run.percentile,
        )

    def _unread(self) -> Tensor:
        """Visible tokens that have not been read [E, K, G]."""
        num_unread = self._num_visible() - self._position
        behind_prompt = self.tokens.shape[2] - max(self._cropped - self.prompt.shape[1] + self.gpt.layout.goal_dim, 0)
        if num_unread <= behind_prompt:
            return self.tokens[:, :, self.tokens.shape[2] - num_unread :]
        prompt, own = self.visible(self._cropped)
        rest = prompt[:, None, self._position :].expand(-1, own.shape[1], -1)
        return torch.cat([rest, own], dim=2)

    def _group(self, rows: int) -> int:
        """Candidates per thread block: more share one read of the weights, fewer keep more multiprocessors busy."""
        if self.rows_per_block is not None:
            return self.rows_per_block
        at_once = self._kernels.multiprocessors // (RANKS if self.dtype == torch.bfloat16 else 1)
        return min(-(-rows // at_once), MAX_ROWS)


def _num_rewards(parts: Sequence[Run], first: int, count: int) -> int:
    """Rewards among `count` slots of some runs from `first` on."""
    begins = [sum(part.num_slots for part in parts[:index]) for index in range(len(parts))]
    rewards = [begin for begin, part in zip(begins, parts, strict=True) if part.values is not None]
    assert len(rewards) < 2, "a launch has room for one reward"
    return sum(first <= begin < first + count for begin in rewards)


def sizes_of(gpt: GPT, *, bf16: bool) -> Sizes:
    """The sizes that the kernels of a model are compiled for."""
    config = gpt.config
    return Sizes(config.width, config.num_heads, config.num_layers, gpt.num_bins + 1, bf16)


def why_not_fused(gpt: GPT, window: int, *, bf16: bool) -> str | None:
    """Why the fused decoder does not support a model; None if it does."""
    config = gpt.config
    if bf16 and (config.width != 128 or config.num_heads != 4 or gpt.num_bins > 127):
        return (
            "in bfloat16 it needs a width of 128, 4 heads and at most 127 bins, the model has "
            f"{config.width}, {config.num_heads} and {gpt.num_bins}"
        )
    if window > MAX_SEGMENTS - 4:
        return f"it sees at most {MAX_SEGMENTS - 4} transitions at once, the window has {window}"
    return None
