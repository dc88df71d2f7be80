"""`tt import`: the run folder gives the authors' logits, and invalid files are refused."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from trajectory_transformer.cli import main
from trajectory_transformer.data.episode import Dataset, Episode, save_npz
from trajectory_transformer.model.trajectory_model import TrajectoryModel

GOLDEN = Path(__file__).parents[1] / "golden"
STATE = GOLDEN / "state_1.pt"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The dataset of the golden file, in an empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    with np.load(GOLDEN / "small.npz") as file:
        ends = np.cumsum(file["lengths"].astype(np.int64))
        episodes = []
        for start, end in zip(ends - file["lengths"], ends, strict=True):
            observations = file["observations"][start:end].astype(np.float32)
            episodes.append(
                Episode(
                    observations=np.concatenate([observations, observations[-1:]]),
                    actions=file["actions"][start:end].astype(np.float32),
                    rewards=file["rewards"][start:end, 0].astype(np.float32),
                    terminated=bool(file["terminals"][end - 1]),
                )
            )
    save_npz(Dataset(tuple(episodes), {"env": "Golden-v0"}), tmp_path / "data.npz")
    return tmp_path / "data.npz"


def refused(words: list[object], capsys: pytest.CaptureFixture[str], pattern: str) -> None:
    """Exit code 2, one sentence, nothing written."""
    assert main([str(word) for word in words]) == 2
    text = capsys.readouterr().err
    assert len(text.strip().splitlines()) == 1, text
    assert re.search(pattern, text), text
    assert not Path("runs").exists()


def test_an_imported_state_gives_the_authors_logits_and_edges(data: Path) -> None:
    assert main(["import", str(STATE), "--dataset", str(data), "--out", "run"]) == 0
    model = TrajectoryModel.load(Path("run"))
    with np.load(GOLDEN / "small.npz") as file:
        with torch.no_grad():
            logits = model.gpt(torch.from_numpy(file["X"]))
        np.testing.assert_allclose(logits.numpy(), file["logits"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(
            np.stack(model.tokenizer.discretizer.edges, axis=1), file["thresholds"], rtol=1e-6, atol=1e-6
        )
    assert model.metadata == {"env": "Golden-v0", "imported": "state_1.pt"}
    config = model.tokenizer.config
    assert (config.authors_conventions, config.num_bins) == (True, 10)


def test_a_pickle_that_carries_code_is_refused_and_not_run(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (Path("ran"),)  # type: ignore[return-value]

    torch.save({"tok_emb.weight": Evil()}, "evil.pt")
    Path("plain.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("evil.pt", "plain.pt"):
        refused(["import", name, "--dataset", data], capsys, f"{name}: holds more than tensors")
    assert not Path("ran").exists()


def test_a_file_that_is_no_state_is_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = STATE.read_bytes()
    Path("cut.pt").write_bytes(whole[: len(whole) // 2])
    Path("empty.pt").write_bytes(b"")
    torch.save([torch.zeros(1)], "list.pt")
    torch.save({"epoch": 3}, "numbers.pt")
    refused(["import", "cut.pt", "--dataset", data], capsys, r"cut\.pt: .*truncated")
    refused(["import", "empty.pt", "--dataset", data], capsys, r"empty\.pt: .*truncated")
    refused(["import", "list.pt", "--dataset", data], capsys, "a mapping of names to tensors")
    refused(["import", "numbers.pt", "--dataset", data], capsys, "a mapping of names to tensors")
    refused(["import", "absent.pt", "--dataset", data], capsys, r"absent\.pt: no such file")


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda state: state.pop("blocks.1.attn.key.bias"), r"lacks the tensor 'blocks\.1\.attn\.key\.bias'"),
        (lambda state: state.pop("head.weight"), r"lacks the tensor 'head\.weight'"),
        (lambda state: state.update({"extra.weight": torch.zeros(1)}), r"holds the tensor 'extra\.weight'"),
        (lambda state: state.update({"pos_emb": torch.zeros(1, 26, 32)}), r"pos_emb has 26 \+ 1"),
        (lambda state: state.update({"pos_emb": torch.zeros(27)}), "'pos_emb' of the state needs 3 dimensions, got 1"),
        (
            lambda state: state.update({"ln_f.bias": torch.zeros(3)}),
            r"norm\.bias should have shape \(32,\), got \(3,\)",
        ),
    ],
)
def test_a_state_with_a_fault_is_refused(
    data: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Tensor]], object],
    pattern: str,
) -> None:
    state = torch.load(STATE, weights_only=True)
    change(state)
    torch.save(state, "changed.pt")
    refused(["import", "changed.pt", "--dataset", data], capsys, rf"changed\.pt: .*{pattern}")


def test_a_dataset_or_heads_that_do_not_fit_are_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = Episode(np.zeros((3, 5), np.float32), np.zeros((2, 2), np.float32), np.zeros(2, np.float32), True)
    save_npz(Dataset((wide,)), Path("wide.npz"))
    refused(
        ["import", STATE, "--dataset", "wide.npz"], capsys, "transitions of 7 tokens, the dataset has 9: 5 of the obs"
    )
    refused(["import", STATE, "--dataset", data, "--heads", 5], capsys, "a multiple of 5 heads, got 32")
    refused(["import", STATE, "--dataset", data, "--heads", 0], capsys, "--heads must be at least 1, got 0")
    refused(["import", STATE], capsys, "name the dataset")
    refused(["import", "--dataset", data], capsys, "name the file to import")


def test_an_imported_run_is_not_written_over(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("there").mkdir()
    refused(["import", STATE, "--dataset", data, "--out", "there"], capsys, "there exists already")


def test_hostile_states_are_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.load(STATE, weights_only=True)
    broken: dict[str, tuple[dict[str, Tensor], str]] = {
        "nan.pt": (state | {"pos_emb": torch.full_like(state["pos_emb"], torch.nan)}, "pos_emb has NaN or infinite"),
        # A hundred bytes that stand for 40 TB.
        "spread.pt": (state | {"pos_emb": torch.zeros(1).expand(1, 10**7, 10**6)}, "declare contents of"),
        "complex.pt": (state | {"pos_emb": torch.zeros(1, 4, 4, device="meta")}, "pos_emb|not weights"),
    }
    for name, (content, pattern) in broken.items():
        torch.save(content, tmp_path / name)
        refused(["import", name, "--dataset", data], capsys, f"{name}: .*({pattern})")
    cut = STATE.read_bytes()
    for size in (0, 10, len(cut) // 2, len(cut) - 10):
        (tmp_path / "cut.pt").write_bytes(cut[:size])
        refused(["import", "cut.pt", "--dataset", data], capsys, r"cut.pt: ")
