"""The local sandbox's own tests, once more, by a user without rights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.unprivileged import run_as_nobody

BEHAVIOUR = Path(__file__).with_name("test_local.py")


def test_a_local_sandbox_behaves_the_same_for_a_user_without_rights(tmp_path_factory: pytest.TempPathFactory):
    """Files, limits, kills and sweeps, without root, without a control group, without any capability."""
    folder = tmp_path_factory.mktemp("nobody")
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", folder / "tests", "--tb", "short"]
    done = run_as_nobody(["python", "-m", "pytest", *options, BEHAVIOUR], folder)
    assert done.returncode == 0, done.stdout
