"""The tap writes down what arrives, without credentials, and leaves it as it is."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from tests.bench.tap import Tap

with warnings.catch_warnings():  # mitmproxy 12.2.3 uses names that pyparsing deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from mitmproxy.test import taddons, tflow, tutils


def test_a_request_is_a_line_without_credentials(tmp_path: Path):
    """Method, host, path, headers in lower case and the body's text; the key is left out, the flow keeps it."""
    headers = ((b"Authorization", b"Bearer sk-secret"), (b"User-Agent", b"harness/1"))
    sent = tutils.treq(method=b"POST", host="api.openai.com", path=b"/v1/responses", headers=headers, content=b"{}")
    flow = tflow.tflow(req=sent)
    tap = Tap()
    with taddons.context(tap) as context:
        context.configure(tap, tap=str(tmp_path / "requests"))
        tap.request(flow)
    line = json.loads((tmp_path / "requests").read_text())
    expected = {"method": "POST", "host": "api.openai.com", "path": "/v1/responses", "body": "{}"}
    assert line == expected | {"headers": {"user-agent": "harness/1"}}
    assert flow.request.headers["authorization"] == "Bearer sk-secret"
    assert flow.response is None
