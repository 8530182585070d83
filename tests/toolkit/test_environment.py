"""The variables that lead a harness to the interceptor."""

import json
import os
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from polar_toolkit import environment
from polar_toolkit.errors import Refusal, UnreadableFile


@pytest.fixture
def run(tmp_path):
    """A run whose interceptor listens, under a folder whose name needs quoting."""
    run = tmp_path / "it's a run"
    run.mkdir()
    (run / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nours\n-----END CERTIFICATE-----\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        info = {
            "host": "127.0.0.1",
            "port": server.getsockname()[1],
            "ca": str(run / "ca.pem"),
            "gateway": "",
            "pid": 1,
        }
        (run / "proxy.json").write_text(json.dumps(info))
        yield run


def port_of(run):
    return json.loads((run / "proxy.json").read_text())["port"]


def test_without_a_session_the_proxy_has_no_user(run):
    """The default session of an interactive run."""
    names = environment.variables(run, None, None)
    assert names["HTTPS_PROXY"] == names["http_proxy"] == f"http://127.0.0.1:{port_of(run)}"
    assert names["NO_PROXY"] == names["no_proxy"] == "localhost,127.0.0.1,::1"


def test_a_session_is_registered_and_named_in_the_proxys_user(run):
    """Asking again gives the same secret."""
    names = environment.variables(run, "task-1", "task")
    secret = json.loads((run / "sessions.jsonl").read_text())["secret"]
    assert names["HTTPS_PROXY"] == f"http://task-1:{secret}@127.0.0.1:{port_of(run)}"
    assert environment.variables(run, "task-1", "task") == names


def test_the_bundle_holds_the_systems_certificates_and_ours(run):
    """The variables replace the store for everything that the agent starts."""
    names = environment.variables(run, None, None)
    bundle = (run / "ca-bundle.pem").read_text()
    assert bundle.endswith("ours\n-----END CERTIFICATE-----\n")
    assert bundle.count("BEGIN CERTIFICATE") > 10
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "CODEX_CA_CERTIFICATE"):
        assert names[name] == str((run / "ca-bundle.pem").resolve())


def test_sessions_that_start_at_once_share_the_bundle(run):
    """Each writes it whole under a name of its own, so none takes the other's file away."""
    with ThreadPoolExecutor(8) as pool:
        names = [*pool.map(lambda n: environment.variables(run, f"s{n}", None), range(40))]
    assert len({name["SSL_CERT_FILE"] for name in names}) == 1
    assert not [*run.glob(".ca-bundle*")]


def test_a_shell_that_has_the_variables_gets_the_same_bundle(run, monkeypatch):
    """Evaluating twice does not put our bundle into itself."""
    names = environment.variables(run, None, None)
    before = (run / "ca-bundle.pem").read_text()
    monkeypatch.setenv("SSL_CERT_FILE", names["SSL_CERT_FILE"])
    environment.variables(run, None, None)
    assert (run / "ca-bundle.pem").read_text() == before


def test_no_variable_holds_a_real_key(run, monkeypatch):
    """Keys are dummies, whatever the user's shell has."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-real")
    names = environment.variables(run, None, None)
    assert {value for name, value in names.items() if name.endswith("_API_KEY")} == {"dummy"}


@pytest.mark.parametrize("shell", [name for name in ("sh", "bash", "zsh") if shutil.which(name)])
def test_shells_evaluate_the_exports(run, shell):
    """Values with quotes and spaces survive `eval` in every shell of this machine."""
    names = environment.variables(run, "a", None)
    script = 'eval "$EXPORTS"; printf "%s\\n" "$SSL_CERT_FILE" "$https_proxy"'
    environ = {"PATH": os.environ["PATH"], "EXPORTS": environment.as_shell(names)}
    printed = subprocess.run([shell, "-c", script], env=environ, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [names["SSL_CERT_FILE"], names["https_proxy"]]


def test_an_env_file_has_one_unquoted_line_a_variable():
    """Docker takes values as they are."""
    assert environment.as_env_file({"A": "b c", "D": "e"}) == "A=b c\nD=e\n"


def test_a_run_without_an_interceptor_is_refused_with_the_remedy(tmp_path):
    """The sentence says how to start it."""
    with pytest.raises(Refusal, match="mitmdump -s"):
        environment.variables(tmp_path, None, None)


def test_an_interceptor_that_stopped_is_refused(run):
    """The file alone does not prove that it runs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    info = json.loads((run / "proxy.json").read_text()) | {"port": port}
    (run / "proxy.json").write_text(json.dumps(info))
    with pytest.raises(Refusal, match="does not run"):
        environment.variables(run, None, None)


def test_a_wildcard_address_is_reached_on_loopback(run):
    """A proxy that listens everywhere is reached at 127.0.0.1."""
    info = json.loads((run / "proxy.json").read_text()) | {"host": "0.0.0.0"}
    (run / "proxy.json").write_text(json.dumps(info))
    assert environment.read_proxy(run).host == "127.0.0.1"


def test_a_malformed_proxy_file_is_refused_by_name(run):
    """The error names the file."""
    (run / "proxy.json").write_text("{}")
    with pytest.raises(UnreadableFile, match=r"proxy\.json"):
        environment.read_proxy(run)


def test_a_group_without_a_session_is_refused(run):
    """The default session belongs to no group."""
    with pytest.raises(Refusal, match="--session"):
        environment.variables(run, None, "g")


def test_a_name_that_cannot_be_registered_is_refused(run):
    """The sentence names it."""
    with pytest.raises(Refusal, match="'a b'"):
        environment.variables(run, "a b", None)


def test_a_missing_certificate_is_refused(run):
    """Without it no harness would trust the interceptor."""
    (run / "ca.pem").unlink()
    with pytest.raises(Refusal, match="certificate"):
        environment.variables(run, None, None)


def listening_for_others(run, host="0.0.0.0"):
    info = json.loads((run / "proxy.json").read_text()) | {"listen_host": host}
    (run / "proxy.json").write_text(json.dumps(info))


def test_a_container_is_told_its_own_way_to_the_proxy(run):
    """The name by which it reaches this machine, and where it sees the certificates."""
    listening_for_others(run)
    names = environment.variables(run, "a", None, proxy_host="host.docker.internal", certificates="/polar/")
    secret = json.loads((run / "sessions.jsonl").read_text())["secret"]
    assert names["HTTPS_PROXY"] == f"http://a:{secret}@host.docker.internal:{port_of(run)}"
    assert names["SSL_CERT_FILE"] == "/polar/ca-bundle.pem"
    assert names["NODE_EXTRA_CA_CERTS"] == "/polar/ca.pem"


def test_the_folder_for_a_container_holds_two_certificates_and_no_key(run):
    """Whoever runs inside may read them; what is temporary is gone."""
    listening_for_others(run)
    environment.variables(run, None, None, proxy_host="10.0.0.1", certificates="/polar")
    folder = run / "certificates"
    assert sorted(path.name for path in folder.iterdir()) == ["ca-bundle.pem", "ca.pem"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert folder.stat().st_mode & 0o777 == 0o755
    assert "ours" in (folder / "ca.pem").read_text()
    assert not any("PRIVATE" in path.read_text() for path in folder.iterdir())


@pytest.mark.parametrize("told", ["", "127.0.0.1"])
def test_an_interceptor_for_this_machine_alone_is_refused_to_others(run, told):
    """The sentence says how to let them in; this machine's own addresses need no such thing."""
    listening_for_others(run, told)
    with pytest.raises(Refusal, match="--listen-host"):
        environment.variables(run, None, None, proxy_host="host.docker.internal")
    assert "localhost" in environment.variables(run, None, None, proxy_host="localhost")["HTTPS_PROXY"]


def test_an_ipv6_address_is_written_as_a_url_has_it(run):
    """In brackets."""
    listening_for_others(run)
    assert (
        environment.variables(run, None, None, proxy_host="fd00::1")["HTTPS_PROXY"]
        == f"http://[fd00::1]:{port_of(run)}"
    )
