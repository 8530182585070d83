"""A scripted engine that answers the questions as a good model would: what the supervised stage learns from.

python examples/learn/teacher.py MODEL_FOLDER SEED   # serves until interrupted
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
from pathlib import Path

from tasks import questions

from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine

MOST = 10_000
"""Questions that are looked through for the one that was asked."""


def script(seed: str):
    """What it says to a prompt: the command first, then what the command said."""

    def reply(prompt: str) -> str:
        if found := re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL):
            return found[-1].strip().rpartition("=")[2]
        instruction = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)[-1].strip()
        command = next(q.command for q in itertools.islice(questions(seed), MOST) if q.instruction == instruction)
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        return f"<tool_call>\n{call}\n</tool_call>"

    return reply


if __name__ == "__main__":
    folder, seed = sys.argv[1:]
    with ScriptedEngine(Path(folder), script(seed)).serving() as engine:
        print(engine.url, flush=True)
        signal.pause()
