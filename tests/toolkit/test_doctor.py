"""Checks of a run and its surroundings."""

import json
import shutil
import socket

import pytest

from polar_mitm.journal import Journal
from polar_toolkit import doctor


def verdicts(run):
    return {check.name: (check.verdict, check.text) for check in doctor.examine(run)}


@pytest.fixture
def run(tmp_path, book, engine):
    """A healthy run: interceptor and engine answer, modes are private."""
    engine.answers["/model_info"] = {"model_path": "models/small", "weight_version": "v1"}
    book.call("a", [1], [2])
    run = book.write(tmp_path / "r", engine=engine.url)
    (run / "key").write_bytes(bytes(32))
    (run / "key").chmod(0o600)
    (run / "ca.pem").write_text("")
    info = {"host": "127.0.0.1", "port": engine.server_address[1], "ca": str(run / "ca.pem"), "gateway": "", "pid": 1}
    (run / "proxy.json").write_text(json.dumps(info))
    return run


def test_a_healthy_run_has_no_failure(run):
    """Every check is ok, and says what it saw."""
    found = verdicts(run)
    assert {verdict for name, (verdict, _) in found.items() if name != "disk"} == {"ok"}
    assert "models/small" in found["engine"][1]
    assert found["calls"][1] == "1 readable, 0 lost"


def test_a_key_that_others_can_read_is_a_warning_with_the_remedy(run):
    """The line says chmod."""
    (run / "key").chmod(0o644)
    assert verdicts(run)["key"] == ("warn", f"mode 644; others can read it: chmod 600 {run / 'key'}")


def test_an_engine_that_is_gone_is_a_failure(run, engine):
    """The line names it."""
    del engine.answers["/model_info"]
    verdict, text = verdicts(run)["engine"]
    assert verdict == "fail"
    assert engine.url in text


def test_an_interceptor_that_stopped_is_a_warning(run):
    """Reading a run needs none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (run / "proxy.json").write_text(json.dumps(json.loads((run / "proxy.json").read_text()) | {"port": port}))
    assert verdicts(run)["interceptor"][0] == "warn"


def test_a_missing_run_is_a_failure_and_not_an_exception(tmp_path):
    """The first start makes it."""
    assert verdicts(tmp_path / "nowhere")["run folder"][0] == "fail"


def test_a_truncated_file_is_a_failure_that_names_it(run):
    """What cannot be read is a finding."""
    sealed = run / "calls" / "w-000001.parquet"
    sealed.write_bytes(sealed.read_bytes()[:-10])
    (text,) = [check.text for check in doctor.examine(run) if check.verdict == "fail"]
    assert "w-000001.parquet" in text


def test_a_tokenizer_that_does_not_load_is_a_warning(run):
    """Calls are then shown as ids."""
    info = json.loads((run / "run.json").read_text()) | {"tokenizer": str(run / "nowhere")}
    (run / "run.json").write_text(json.dumps(info))
    assert verdicts(run)["tokenizer"][0] == "warn"


def test_live_and_dead_journals_are_told_apart(tmp_path):
    """A writer holds the lock of its journal; a copy of it has no writer."""
    writer = Journal.open(tmp_path / "r")
    (live,) = (tmp_path / "r" / "journal").glob("*.journal")
    shutil.copy(live, live.with_name("dead-000001.journal"))
    text = verdicts(tmp_path / "r")["journals"][1]
    writer.close_sync()
    assert text.startswith("1 live, 1 of dead writers")
