"""What a user can set, and how a run folder is opened from it."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from polar_mitm.errors import EngineUnavailable
from polar_mitm.options import OPTIONS, Options, open_run, write_json
from polar_mitm.tokens import load
from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine

ENGINE = "http://127.0.0.1:30000"


def options(**given: Any) -> Options:
    values: dict[str, Any] = {name: default for name, _, default, _ in OPTIONS}
    values |= {"polar_engine": ENGINE}
    return Options(**values | given)


def opened(chosen: Options) -> None:
    """Open a run and close it."""

    async def both() -> None:
        await (await open_run(chosen)).close()

    asyncio.run(both())


def test_every_option_has_a_help_text() -> None:
    """docs/options.md and `mitmdump --options` are made from this table."""
    assert all(name.startswith("polar_") and text for name, _, _, text in OPTIONS)
    assert [name for name, *_ in OPTIONS] == list(Options.__slots__)


def test_the_defaults_need_an_engine_only() -> None:
    """Everything else has a value that works."""
    options().check()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"polar_engine": ""}, "polar_engine is ''"),
        ({"polar_engine": "localhost:30000"}, "polar_engine is 'localhost:30000'"),
        ({"polar_wait": -1.0}, "polar_wait is -1.0"),
        ({"polar_wait": float("nan")}, "polar_wait is nan"),
        ({"polar_memory": 0}, "polar_memory is 0"),
        ({"polar_history_thinking": "drop"}, "polar_history_thinking is 'drop': give one of preserve, template"),
        ({"polar_sampling": "{"}, "polar_sampling"),
        ({"polar_sampling": '{"top_p": 2}'}, "polar_sampling: top_p is 2"),
    ],
)
def test_a_bad_value_is_named_with_its_option(given: dict[str, Any], named: str) -> None:
    """One sentence, before anything is opened."""
    with pytest.raises(ValueError, match=named):
        options(**given).check()


def test_allowed_hosts_are_a_list_without_spaces_or_case() -> None:
    """As people write them."""
    assert options(polar_allow_hosts=" GitHub.com, example.org,,").allowed == ("github.com", "example.org")
    assert options().allowed == ()


@pytest.mark.parametrize("hosts", ["*", "*.com", "https://github.com", "github.com:443", "a.*.org", "git hub.com"])
def test_an_allowed_host_is_a_name(hosts: str) -> None:
    """Not everything, not a whole top-level domain, not a URL."""
    with pytest.raises(ValueError, match="polar_allow_hosts"):
        options(polar_engine="http://x", polar_allow_hosts=hosts).check()


def test_a_run_folder_is_private_and_says_what_it_holds(bytes_folder: Path, tmp_path: Path) -> None:
    """Mode 0700; engine, tokenizer, what its ids mean, its family and sampling stand in run.json."""
    run = tmp_path / "deep" / "run"
    with ScriptedEngine(bytes_folder, []).serving() as engine:
        opened(options(polar_engine=engine.url, polar_run=str(run), polar_sampling='{"seed": 7}'))
    described = json.loads((run / "run.json").read_text())
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert (described["schema_version"], described["engine"]) == (1, engine.url)
    assert described["tokenizer"] == str(bytes_folder.resolve())
    assert described["tokenizer_fingerprint"] == load(bytes_folder).fingerprint
    assert (described["family"], described["history_thinking"]) == ("template", "preserve")
    assert (described["sampling"]["seed"], described["sampling"]["temperature"]) == (7, 1.0)


def test_run_json_names_the_family_and_the_policy(qwen3_folder: Path, tmp_path: Path) -> None:
    """A typed renderer by its name, and who decides about earlier reasoning."""
    chosen = {"polar_tokenizer": str(qwen3_folder), "polar_history_thinking": "template"}
    opened(options(polar_run=str(tmp_path), **chosen))
    described = json.loads((tmp_path / "run.json").read_text())
    assert (described["family"], described["history_thinking"]) == ("qwen3", "template")


def test_a_run_that_is_opened_again_keeps_its_id(bytes_folder: Path, tmp_path: Path) -> None:
    """The id is made once."""
    ids: list[str] = []
    for _ in range(2):
        opened(options(polar_run=str(tmp_path), polar_tokenizer=str(bytes_folder)))
        ids.append(json.loads((tmp_path / "run.json").read_text())["run_id"])
    assert ids[0] == ids[1]


def test_with_a_tokenizer_a_run_opens_before_its_engine(bytes_folder: Path, tmp_path: Path) -> None:
    """The engine is waited for at the first call."""
    opened(options(polar_run=str(tmp_path), polar_tokenizer=str(bytes_folder), polar_engine="http://127.0.0.1:1"))
    assert (tmp_path / "journal").is_dir()


def test_without_a_tokenizer_the_engine_is_needed(tmp_path: Path) -> None:
    """Nobody else knows which tokenizer it is; nothing is written."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(EngineUnavailable, match=url):
        opened(options(polar_engine=url, polar_run=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_folder_that_holds_none_is_refused(tmp_path: Path) -> None:
    """Before the run folder is made."""
    (tmp_path / "empty").mkdir()
    with pytest.raises((OSError, ValueError)):
        opened(options(polar_tokenizer=str(tmp_path / "empty"), polar_run=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_json_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    """A reader sees the old value or the new one, and nothing is left beside it."""
    for value in ({"a": 1}, {"a": 2}):
        write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
