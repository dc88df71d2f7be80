"""Every error in a dataset names the dataset."""

from pathlib import Path

import numpy as np
import pytest

from trajectory_transformer.data.sources import load_dataset


def test_a_name_in_a_file_that_is_no_text_is_reported_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.npz"
    np.savez(path, observations=np.zeros((3, 1)))
    content = path.read_bytes()
    # A zip marks names that are UTF-8 by a flag; these bytes are none.
    flagged = content.replace(b"PK\x03\x04\x2d\x00\x00\x00", b"PK\x03\x04\x2d\x00\x00\x08")
    flagged = flagged.replace(b"PK\x01\x02\x2d\x03\x2d\x00\x00\x00", b"PK\x01\x02\x2d\x03\x2d\x00\x00\x08")
    path.write_bytes(flagged.replace(b"observations", b"\xff\xfeservations"))
    assert path.read_bytes() != content
    with pytest.raises(ValueError, match=r"log\.npz"):
        load_dataset(path)
