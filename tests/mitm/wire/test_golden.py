"""Requests of the pinned harnesses say what they are known to say (tests/harness/golden.py writes both)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polar_mitm.errors import BadRequest
from tests.mitm.wire.summary import decoded, summary

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in (HERE / "golden").glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_request_decodes_as_expected(name: str):
    """Messages, tools, thread, echoed ids and ignored fields are those that stand beside it."""
    request = json.loads((HERE / "golden" / f"{name}.json").read_text())
    expected = json.loads((HERE / "expected" / f"{name}.json").read_text())
    if "refused" in expected:
        with pytest.raises(BadRequest) as refused:
            decoded(request)
        assert str(refused.value) == expected["refused"]
        return
    assert summary(decoded(request)) == expected


def test_every_expectation_has_its_request():
    """Nothing is left over from a harness that is no longer pinned."""
    assert sorted(path.stem for path in (HERE / "expected").glob("*.json")) == NAMES
