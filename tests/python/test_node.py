"""OpenAI's client for Node against the server: runs `tests/node`."""

import os
import shutil
import subprocess

import pytest

from servers import PROGRAM, ROOT, run

SOURCES = ROOT / "tests/node"
FILES = ["package.json", "package-lock.json", ".npmrc", "openai.test.mjs"]


@pytest.fixture(scope="module")
def directory():
    """The tests beside the installed client, which is fetched once for each version."""
    if shutil.which("npm") is None:
        assert not os.environ.get("CI"), "CI needs Node with npm"
        pytest.skip("needs Node with npm")
    home = PROGRAM.parents[1] / "node"
    home.mkdir(exist_ok=True)
    for name in FILES:
        shutil.copyfile(SOURCES / name, home / name)
    wanted, installed = (SOURCES / "package-lock.json").read_bytes(), home / "installed-package-lock.json"
    if not installed.is_file() or installed.read_bytes() != wanted:
        subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=home, check=True)
        installed.write_bytes(wanted)
    return home


def test_openai_for_node(url, guarded, directory):
    run(["node", "--test", directory / "openai.test.mjs"], TOKENROUTER_URL=url, TOKENROUTER_GUARDED_URL=guarded)
