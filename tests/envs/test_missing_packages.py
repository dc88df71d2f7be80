"""An environment whose package is missing names the extra to install."""

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["mujoco"] = None
from trajectory_transformer.rollout import make_envs
make_envs("Hopper-v5", 1)
"""


def test_without_mujoco_its_extra_is_named() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], check=False, capture_output=True, text=True)
    cure = "ImportError: Hopper-v5 needs MuJoCo: pip install 'trajectory-transformer[mujoco]'"
    assert done.stderr.splitlines()[-1] == cure
