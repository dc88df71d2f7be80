"""Import weights of the authors' released code (`state_*.pt`). Nothing in such a file is ever executed."""

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trajectory_transformer.checkpoint import check_finite
from trajectory_transformer.config import ModelConfig
from trajectory_transformer.limits import check_memory, check_size
from trajectory_transformer.model.gpt import GPT
from trajectory_transformer.tokens.layout import TokenLayout

_BLOCK = {"norm1": "ln1", "norm2": "ln2", "out": "attn.proj", "up": "mlp.0", "down": "mlp.2"}
_BUFFER = re.compile(r"blocks\.\d+\.attn\.mask")  # the attention mask; ours is computed from the layout


def read_state(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file by name; a file that holds anything else is refused."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickles
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: holds more than tensors; nothing else is ever unpickled") from error
    except Exception as error:  # a damaged file fails in many ways
        reason = str(error).splitlines()[0] if str(error) else "unexpected end"
        raise ValueError(f"{path}: not a file of torch.save; it may be truncated ({reason})") from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"{path}: expected a mapping of names to tensors, as the authors' code saves it, got another object"
        )
    # A few stored numbers can be spread over a tensor of any size.
    check_size(path, sum(value.numel() * value.element_size() for value in state.values()))
    try:
        known = {str(name): value.float() for name, value in state.items()}
        check_finite(known)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: the tensors are not weights of a model ({reason})") from error
    return known


def sizes_of(state: Mapping[str, Tensor], num_heads: int, dropout: float = 0.1) -> tuple[int, int, ModelConfig]:
    """Slots D, bins V and the model's sizes, from the shapes; the number of heads cannot be read from them."""
    heads = _shaped(state, "head.weight", 3)  # [D, V + 1, width]
    positions = _shaped(state, "pos_emb", 3).shape[1]
    num_slots, num_logits, width = heads.shape
    if (positions + 1) % num_slots:
        raise ValueError(
            f"a window of whole transitions of {num_slots} tokens has a multiple of {num_slots} tokens, "
            f"pos_emb has {positions} + 1"
        )
    num_layers = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    config = ModelConfig(
        window=(positions + 1) // num_slots, num_layers=num_layers, num_heads=num_heads, width=width, dropout=dropout
    )
    return num_slots, num_logits - 1, config


def gpt_from_authors(state: Mapping[str, Tensor], layout: TokenLayout, num_heads: int) -> GPT:
    """Our GPT with the authors' weights: the same logits up to rounding."""
    num_slots, num_bins, config = sizes_of(state, num_heads)
    if layout.goal_dim or num_slots != layout.size:
        raise ValueError(
            f"the state was trained on transitions of {num_slots} tokens, the dataset has {layout.size}: "
            f"{layout.observation_dim} of the observation, {layout.action_dim} of the action, reward and value"
        )
    ours = {
        "token_embedding.weight": _get(state, "tok_emb.weight"),
        "position_embedding": _get(state, "pos_emb")[0],
        "norm.weight": _get(state, "ln_f.weight"),
        "norm.bias": _get(state, "ln_f.bias"),
        # Their heads are indexed by the slot that is read, ours by the slot that is predicted.
        "heads": _get(state, "head.weight").roll(1, dims=0),
    }
    used = {"tok_emb.weight", "pos_emb", "ln_f.weight", "ln_f.bias", "head.weight"}
    for layer in range(config.num_layers):
        for kind in ("weight", "bias"):
            theirs = {name: f"blocks.{layer}.{their_name}.{kind}" for name, their_name in _BLOCK.items()}
            parts = [f"blocks.{layer}.attn.{name}.{kind}" for name in ("query", "key", "value")]
            ours |= {f"blocks.{layer}.{name}.{kind}": _get(state, their_name) for name, their_name in theirs.items()}
            ours[f"blocks.{layer}.qkv.{kind}"] = torch.cat([_get(state, name) for name in parts])
            used |= {*theirs.values(), *parts}
    unknown = sorted(name for name in set(state) - used if not _BUFFER.fullmatch(name))
    if unknown:
        raise ValueError(f"the state holds the tensor {unknown[0]!r}, which this model does not have")
    length = layout.length(config.window)
    check_memory(length**2, f"the attention mask of {length:,} tokens")
    gpt = GPT(layout, num_bins, config)
    for name, value in gpt.state_dict().items():
        if ours[name].shape != value.shape:
            raise ValueError(
                f"the shapes of the state do not match: {name} should have shape {tuple(value.shape)}, "
                f"got {tuple(ours[name].shape)}"
            )
    gpt.load_state_dict(ours)
    return gpt.eval()


def _get(state: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of the state."""
    if name not in state:
        raise ValueError(f"the state lacks the tensor {name!r}: is it a state_*.pt of the authors' code?")
    return state[name].float()


def _shaped(state: Mapping[str, Tensor], name: str, num_dims: int) -> Tensor:
    """A tensor of the state with an expected number of dimensions."""
    tensor = _get(state, name)
    if tensor.ndim != num_dims:
        raise ValueError(f"the tensor {name!r} of the state needs {num_dims} dimensions, got {tensor.ndim}")
    return tensor
