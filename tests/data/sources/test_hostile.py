"""Files made to exhaust memory or to read other files: refused before anything is allocated."""

import gzip
import json
import resource
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from trajectory_transformer.data.episode import Dataset, load_npz, save_npz
from trajectory_transformer.data.sources import Columns, load_dataset, save_dataset
from trajectory_transformer.data.sources.minari import load_minari

LIMIT = 3 * 2**30  # bytes of address space: far more than a reader needs here, far less than a bomb


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A mistake must not take the machine's memory; bombs of a few megabytes are enough here."""
    monkeypatch.setattr("trajectory_transformer.limits._ALWAYS_ALLOWED", 2**20)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def npy(header: dict[str, object], content: bytes) -> bytes:
    """An array file with any header."""
    text = (repr(header) + " " * 64).encode()
    text = text[: len(text) - (10 + len(text) + 1) % 64] + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


def add(path: Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, content)


@pytest.mark.parametrize("name", ["observations", "metadata", "maps"])
def test_an_npz_array_larger_than_its_file_is_refused(tiny_dataset: Dataset, tmp_path: Path, name: str) -> None:
    save_npz(tiny_dataset, tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as file:
        arrays = {key: file[key] for key in file.files if key != name}
    np.savez(tmp_path / "y.npz", **arrays)
    kind = "<U1000000000" if name == "metadata" else "<f4"
    shape = () if name == "metadata" else (10**9, 3)
    add(tmp_path / "y.npz", f"{name}.npy", npy({"descr": kind, "fortran_order": False, "shape": shape}, bytes(64)))
    with pytest.raises(ValueError, match="y.npz"):
        load_npz(tmp_path / "y.npz")


def test_an_npz_member_that_is_a_bomb_is_refused(tiny_dataset: Dataset, tmp_path: Path) -> None:
    save_npz(tiny_dataset, tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as file:
        arrays = {key: file[key] for key in file.files if key != "observations"}
    np.savez(tmp_path / "y.npz", **arrays)
    rows = 2**22
    with (
        zipfile.ZipFile(tmp_path / "y.npz", "a", zipfile.ZIP_DEFLATED) as file,
        file.open("observations.npy", "w") as m,
    ):
        m.write(npy({"descr": "<f4", "fortran_order": False, "shape": (rows, 1)}, b""))
        for _ in range(16):
            m.write(bytes(4 * rows // 16))
    with pytest.raises(ValueError, match=r"y.npz: .* declare contents of"):
        load_npz(tmp_path / "y.npz")


def hdf5(path: Path, **arrays: Any) -> Path:
    """A small D4RL file; arrays replace its own, None leaves one out."""
    known: dict[str, Any] = {
        "observations": np.zeros((4, 2), np.float32),
        "actions": np.zeros((4, 1), np.float32),
        "terminals": np.array([False, False, False, True]),
        "timeouts": np.zeros(4, np.bool_),
    }
    with h5py.File(path, "w") as file:
        for name, values in {**known, **arrays}.items():
            if values is not None:
                file[name] = values
    return path


def test_hdf5_links_and_storage_outside_the_file_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(32))
    hdf5(tmp_path / "other.hdf5")
    link = hdf5(tmp_path / "link.hdf5", observations=h5py.ExternalLink("other.hdf5", "observations"))
    soft = hdf5(tmp_path / "soft.hdf5", rest=h5py.ExternalLink("other.hdf5", "/"))
    with h5py.File(soft, "a") as file:
        del file["observations"]
        file["observations"] = h5py.SoftLink("/rest/observations")
    stored = hdf5(tmp_path / "stored.hdf5", observations=None)
    with h5py.File(stored, "a") as file:
        file.create_dataset("observations", (4, 2), np.float32, external=[(str(secret), 0, 32)])
    virtual = hdf5(tmp_path / "virtual.hdf5", observations=None)
    with h5py.File(virtual, "a") as file:
        layout = h5py.VirtualLayout((4, 2), np.float32)
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.hdf5"), "observations", shape=(4, 2))
        file.create_virtual_dataset("observations", layout)
    for path in (link, soft, stored, virtual):
        with pytest.raises(ValueError, match=f"{path.name}: .*(another file|other files)"):
            load_dataset(path)


def test_hdf5_arrays_larger_than_their_file_are_refused(tmp_path: Path) -> None:
    path = hdf5(tmp_path / "x.hdf5", observations=None, actions=None, terminals=None, timeouts=None)
    with h5py.File(path, "a") as file:
        for name, shape in (("observations", (10**9, 9)), ("actions", (10**9, 3)), ("terminals", (10**9,))):
            file.create_dataset(name, shape, np.float32, chunks=(1000, *shape[1:]), compression="gzip")
        file["timeouts"] = np.zeros(1)
    with pytest.raises(ValueError, match=r"x.hdf5: .* declare contents of"):
        load_dataset(path)


@pytest.mark.parametrize("chunk", [1, 3])
def test_hdf5_arrays_that_are_not_stored_in_full_are_refused(tmp_path: Path, chunk: int) -> None:
    path = hdf5(tmp_path / "x.hdf5", rewards=None)
    with h5py.File(path, "a") as file:
        file.create_dataset("rewards", data=np.ones(4), chunks=(chunk,), maxshape=(None,))
    assert len(load_dataset(path)) == 1
    with h5py.File(path, "a") as file:
        file["rewards"].resize((100_000,))  # read as zeros, block by block
    with pytest.raises(ValueError, match=r"x.hdf5: /rewards is not complete: \d of \d+ blocks are stored"):
        load_dataset(path)


def test_parquet_columns_larger_than_their_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    rows = 2**20
    schema = pyarrow.schema([("a", pyarrow.float64()), ("b", pyarrow.float64())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        table = pyarrow.table({"a": np.zeros(rows), "b": np.zeros(rows)}, schema)
        for _ in range(2):
            writer.write_table(table, rows)
    with pytest.raises(ValueError, match=r"x.parquet: .* declare contents of"):
        load_dataset(path, Columns(observations=("a",), actions=("b",)))


def test_compressed_tables_larger_than_their_file_are_refused(tmp_path: Path) -> None:
    row = b"0,0\n" * 2**17
    with gzip.open(tmp_path / "rows.csv.gz", "wb") as file:
        file.write(b"a,b\n")
        for _ in range(3):
            file.write(row)
    with gzip.open(tmp_path / "line.csv.gz", "wb") as file:
        for _ in range(3):
            file.write(bytes(2**20).replace(b"\0", b"x"))
    for name, pattern in (("rows", "declare contents of"), ("line", "a line")):
        with pytest.raises(ValueError, match=rf"{name}.csv.gz: .*{pattern}"):
            load_dataset(tmp_path / f"{name}.csv.gz", Columns(observations=("a",), actions=("b",)))


def test_minari_datasets_that_refer_to_other_files_or_declare_too_much_are_refused(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    for name in ("link", "bomb"):
        save_dataset(tiny_dataset, f"stranger/{name}-v0")
        data = tmp_path / "minari" / "stranger" / f"{name}-v0" / "data" / "main_data.hdf5"
        with h5py.File(data, "a") as file:
            del file["episode_0/rewards"]
            if name == "link":
                file["episode_0/rewards"] = h5py.ExternalLink("/etc/hostname", "x")
            else:
                file.create_dataset("episode_0/rewards", (2**40,), np.float32, chunks=(1000,))
        with pytest.raises(ValueError, match="another file" if name == "link" else "declare contents of"):
            load_minari(f"stranger/{name}-v0")


def test_reading_a_hostile_file_costs_little_memory(tmp_path: Path, tiny_dataset: Dataset) -> None:
    save_npz(tiny_dataset, tmp_path / "x.npz")
    with zipfile.ZipFile(tmp_path / "x.npz", "a", zipfile.ZIP_DEFLATED) as file, file.open("extra.npy", "w") as member:
        member.write(npy({"descr": "|u1", "fortran_order": False, "shape": (2**28,)}, b""))
        for _ in range(8):
            member.write(bytes(2**25))
    script = (
        "import resource, sys; from trajectory_transformer.data.episode import load_npz\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; load_npz(sys.argv[1])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x.npz")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 64 * 1024, "KiB"


def test_descriptions_inside_files_are_checked(tmp_path: Path, tiny_dataset: Dataset) -> None:
    save_dataset(tiny_dataset, tmp_path / "x.hdf5")
    save_dataset(tiny_dataset, tmp_path / "x.parquet")
    for text in ("{", "[]", '{"metadata": 3}', '{"outcomes": 5}', '{"observation_names": 3}', "[" * 100_000):
        with h5py.File(tmp_path / "x.hdf5", "a") as file:
            file.attrs["trajectory_transformer"] = text
        with pytest.raises(ValueError, match=r"x\.hdf5"):
            load_dataset(tmp_path / "x.hdf5")
        table = pyarrow.parquet.read_table(tmp_path / "x.parquet")
        changed = table.replace_schema_metadata({"trajectory_transformer": text})
        pyarrow.parquet.write_table(changed, tmp_path / "y.parquet")
        with pytest.raises(ValueError, match=r"y\.parquet"):
            load_dataset(tmp_path / "y.parquet")
    save_npz(tiny_dataset, tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as arrays:
        known = {name: arrays[name] for name in arrays.files}
    for name, value in {
        "metadata": json.dumps([1]),
        "outcomes": json.dumps(5),
        "format": "x",
        "lengths": "x",
        "observation_names": 5,
        "terminated": "abcdef",
    }.items():
        np.savez(tmp_path / "y.npz", **{**known, name: np.array(value)})
        with pytest.raises(ValueError, match=r"y\.npz"):
            load_npz(tmp_path / "y.npz")
