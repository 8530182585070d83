"""One merger over all scenarios, in a process of its own: `python -m benchmarks.peers NAME ROUNDS FOLDER...`.

Prints one JSON line a scenario: CPU milliseconds of each step, the best of ROUNDS; its rows go to FOLDER/NAME.npz.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.contestants import Contestant
from benchmarks.peers.installed import Missing, version
from benchmarks.stage.clock import fastest

CONTESTANTS = {
    "ours": "benchmarks.peers.ours:Linked",
    "ours-full-prompts": "benchmarks.peers.ours:Whole",
    "skyrl": "benchmarks.peers.skyrl:SkyRL",
    "skyrl-core": "benchmarks.peers.skyrl:SkyRLCore",
    "trl": "benchmarks.peers.trl:TRL",
    "verifiers": "benchmarks.peers.verifiers:Verifiers",
    "tinker-cookbook": "benchmarks.peers.tinker:TinkerCookbook",
}


def load(name: str) -> Contestant:
    """A contestant, ready. Raises Missing."""
    module, _, noun = CONTESTANTS[name].partition(":")
    try:
        return getattr(importlib.import_module(module), noun)()
    except ModuleNotFoundError as error:
        raise Missing(f"{name} needs {error.name}, which is not installed: run make .peers/.ready") from error


def contest(name: str, contestant: Contestant, folder: Path, rounds: int) -> dict[str, Any]:  # Any: JSON
    """Time the three steps on one scenario, and leave the rows."""
    read_ms, read = fastest(lambda: contestant.read(folder), min(rounds, 2))
    convert_ms, native = fastest(lambda: contestant.convert(read), 1)
    merge_ms, merged = fastest(lambda: contestant.merge(native), rounds)
    rows = contestant.rows(merged)
    arrays = {f"{kind}{i}": getattr(row, kind) for i, row in enumerate(rows) for kind in ("ids", "mask", "logprobs")}
    np.savez(folder / f"{name}.npz", **arrays)
    return {"read": read_ms, "convert": convert_ms, "merge": merge_ms}


def main() -> None:
    """Run one contestant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CONTESTANTS)
    parser.add_argument("rounds", type=int)
    parser.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args()
    try:
        contestant = load(given.name)
        facts = {"package": contestant.package, "version": version(contestant.package)}
        print(json.dumps(facts | {"native": contestant.native, "note": contestant.note}))
    except Missing as error:
        print(json.dumps({"missing": str(error)}))
        return
    for folder in given.folders:
        print(json.dumps(contest(given.name, contestant, folder, given.rounds)), flush=True)


if __name__ == "__main__":
    main()
