"""An agent that trusts only certifi: `python certifi_only.py TASK`, with nothing but the standard library and certifi.

Its certificates are those of the certifi package in its own environment, whatever SSL_CERT_FILE says. Whoever wants to
intercept such a program adds the interceptor's certificate to that package's file:

    cat mitmproxy-ca-cert.pem >> "$(python -c 'import certifi; print(certifi.where())')"

It speaks the Messages protocol, streamed, and has one tool, `run`.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import certifi

PROVIDER = "https://api.anthropic.com/v1/messages"
TOOLS = [
    {
        "name": "run",
        "description": "Runs a shell command.",
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    }
]
Json = dict[str, Any]  # Any: bodies of requests and answers


def main(task: str) -> None:
    """Ask, run what is asked for, ask again, until a reply calls no tool."""
    history: list[Json] = [{"role": "user", "content": task}]
    while True:
        blocks = ask(history)
        history.append({"role": "assistant", "content": blocks})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if not calls:
            print("".join(block["text"] for block in blocks if block["type"] == "text"))
            return
        history.append({"role": "user", "content": [result(call) for call in calls]})


def ask(history: list[Json]) -> list[Json]:
    """The content blocks of the answer to a history."""
    body = {"model": "m", "max_tokens": 1000, "stream": True, "system": "Use the tool.", "messages": history}
    headers = {
        "content-type": "application/json",
        "anthropic-version": "2023-06-01",
        "x-api-key": os.environ["ANTHROPIC_API_KEY"],
    }
    request = urllib.request.Request(PROVIDER, json.dumps(body | {"tools": TOOLS}).encode(), headers)
    trust = ssl.create_default_context(cafile=certifi.where())
    with urllib.request.urlopen(request, context=trust) as answer:
        return joined(json.loads(line[6:]) for line in answer if line.startswith(b"data: "))


def joined(events: Iterator[Json]) -> list[Json]:
    """Streamed events put together; a stream without its end is an error."""
    blocks: list[Json] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            for name, piece in event["delta"].items():
                if name != "type":
                    name = name.removeprefix("partial_")
                    blocks[-1][name] = blocks[-1].get(name, "") + piece
        elif event["type"] == "message_stop":
            return [finished(block) for block in blocks]
    raise SystemExit("the stream ended without message_stop")


def finished(block: Json) -> Json:
    """A block as it is sent back."""
    arguments = block.pop("json")
    return block | ({"input": json.loads(arguments or "{}")} if block["type"] == "tool_use" else {})


def result(call: Json) -> Json:
    """The result of a tool call."""
    output = subprocess.run(call["input"]["command"], shell=True, capture_output=True, text=True, check=True).stdout
    return {"type": "tool_result", "tool_use_id": call["id"], "content": output}


if __name__ == "__main__":
    main(sys.argv[1])
