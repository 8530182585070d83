"""A script for mitmdump that stands before the interceptor's and writes every request down as the harness sent it.

Invariant: it changes nothing and answers nothing. A line of the file named by the option `tap` is one request: method,
host, path, headers without credentials, and the body's text.
"""

from __future__ import annotations

import json
from pathlib import Path

from mitmproxy import ctx, http
from mitmproxy.addonmanager import Loader

from polar_mitm.gateway import SECRET_HEADERS


class Tap:
    """The script."""

    def load(self, loader: Loader) -> None:
        """Declare the option."""
        loader.add_option("tap", str, "", "file to which every request is appended, as a line of JSON")

    def request(self, flow: http.HTTPFlow) -> None:
        """Append one."""
        request = flow.request
        headers = {name.lower(): value for name, value in request.headers.items(multi=True)}
        line = {
            "method": request.method,
            "host": request.pretty_host,
            "path": request.path,
            "headers": {name: value for name, value in headers.items() if name not in SECRET_HEADERS},
            "body": request.get_text(strict=False),
        }
        with Path(ctx.options.tap).open("a") as written:
            written.write(json.dumps(line) + "\n")


addons = [Tap()]
