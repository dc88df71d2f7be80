"""Pictures and videos appear complete or not at all."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from trajectory_transformer.cli import main
from trajectory_transformer.data.episode import Dataset, save_npz
from trajectory_transformer.model.trajectory_model import TrajectoryModel
from trajectory_transformer.report.plots import save_figure
from trajectory_transformer.report.video import video_writer

FRAMES = [np.full((4, 4, 3), value, np.uint8) for value in (0, 100, 200)]


def killed(path: Path) -> None:
    """What a writer does that ends in the middle."""
    path.write_bytes(b"half")
    raise OSError("no space left on device")


@pytest.mark.parametrize("name", ["x.png", "x.svg", "a/b/x.pdf", "plain"])
def test_a_figure_has_the_format_of_its_suffix(tmp_path: Path, name: str) -> None:
    save_figure(Figure(figsize=(1, 1)), tmp_path / name)
    start = {".svg": b"<?xml", ".pdf": b"%PDF-"}.get(Path(name).suffix, b"\x89PNG")
    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [Path(name).name]


def test_a_figure_that_cannot_be_finished_leaves_the_old_file(
    tmp_path: Path, tiny_dataset: Dataset, tiny_model: TrajectoryModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_npz(tiny_dataset, "x.npz")
    tiny_model.save("run")
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: killed(Path(path)))
    for words in (
        ["data", "show", "x.npz", "--plot", "x.png"],
        ["predict", "run", "--dataset", "x.npz", "--horizon", "1", "--samples", "2", "--out", "x.png"],
    ):
        Path("x.png").write_bytes(b"old")
        assert main([*words, "--overwrite", "true", *(["--device", "cpu"] if words[0] == "predict" else [])]) == 2
        assert Path("x.png").read_bytes() == b"old"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x.npz", "x.png"]


def test_a_gif_that_cannot_be_finished_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.gif"
    video_writer(path)(FRAMES, 4)
    whole = path.read_bytes()
    with Image.open(path) as video:
        assert getattr(video, "n_frames", 1) == 3
    monkeypatch.setattr(Image.Image, "save", lambda self, path, *given, **options: killed(Path(path)))
    with pytest.raises(OSError, match="no space left"):
        video_writer(path)(FRAMES, 4)
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


def test_an_mp4_that_cannot_be_finished_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "x.mp4"
    codec: Any = ModuleType("imageio.v3")  # stands for the optional package
    codec.imwrite = lambda path, frames, fps: path.write_bytes(f"{path.suffix} {frames.shape} {fps}".encode())
    package: Any = ModuleType("imageio")
    package.v3 = codec
    for name, module in (("imageio", package), ("imageio.v3", codec), ("imageio_ffmpeg", ModuleType("ffmpeg"))):
        monkeypatch.setitem(sys.modules, name, module)
    video_writer(path)(FRAMES, 4)
    assert path.read_bytes() == b".mp4 (3, 4, 4, 3) 4"
    codec.imwrite = lambda path, frames, fps: killed(path)
    with pytest.raises(OSError, match="no space left"):
        video_writer(path)(FRAMES, 4)
    assert path.read_bytes() == b".mp4 (3, 4, 4, 3) 4"
    assert list(path.parent.iterdir()) == [path]
