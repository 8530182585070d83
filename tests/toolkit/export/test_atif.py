"""ATIF documents, read by the models of the atif package."""

import json

import pytest

from polar_toolkit import export


@pytest.fixture
def documents(exported, loaded):
    """What the documented loader makes, by trajectory id."""
    exported("atif")
    return {document.trajectory_id: document for document in loaded("atif")["documents"]}


def _all(documents):
    return [one for d in documents.values() for one in (d, *(d.subagent_trajectories or ()))]


def test_every_trained_token_is_in_a_step_once(documents, once):
    """What a document repeats has no tokens."""
    metrics = [step.metrics for one in _all(documents) for step in one.steps if step.metrics and step.extra["trained"]]
    pairs = [pair for m in metrics for pair in zip(m.completion_token_ids, m.logprobs, strict=True)]
    once(pairs, "one", "two", "three")


def test_a_branch_goes_on_in_the_next_document(documents):
    """The first names the second's file, and the second marks what it repeats."""
    assert documents["b.0"].continued_trajectory_ref == "c.0.json"
    steps = documents["c.0"].steps
    assert [(s.source, s.is_copied_context) for s in steps] == [
        ("system", True), ("user", True), ("agent", True), ("user", None), ("agent", None)
    ]  # fmt: skip


def test_a_sub_agent_is_embedded_where_it_was_called(documents):
    """The observation of the tool call refers to it."""
    document = documents["b.0"]
    assert [one.trajectory_id for one in document.subagent_trajectories] == ["d.0"]
    result = document.steps[2].observation.results[0]
    assert (result.source_call_id, result.content) == ("call_1", "It is empty.")
    assert result.subagent_trajectory_ref[0].trajectory_id == "d.0"


def test_the_agent_and_its_tools_are_named(documents):
    """From the user agent and the tools of the first request."""
    agent = documents["e.0"].agent
    assert (agent.name, agent.version, agent.model_name) == ("pi", "1.6.0", "gpt-5.2")
    assert agent.tool_definitions[0]["function"]["name"] == "task"


def test_totals_leave_out_what_is_repeated(documents):
    """And say so."""
    document = documents["c.0"]
    assert document.final_metrics.total_completion_tokens == 2
    assert document.final_metrics.total_steps == 2
    assert "is_copied_context" in document.notes


def test_the_count_is_that_of_the_documents(exported):
    """Embedded ones too."""
    _, tally = exported("atif")
    assert (tally.rows, tally.trained, tally.sampled) == (5, 15, 15)


def test_a_compaction_is_embedded_and_the_next_document_goes_on(tmp_path, book):
    """The summary's call repeats the conversation; the root after it repeats the system prompt."""
    said = {"user": json.dumps([{"role": "user", "parts": [{"kind": "text", "text": "Go."}]}])}
    reply = json.dumps([{"kind": "text", "text": "Done."}])
    book.call("a", [1], [2], messages=said["user"], reply=reply, tools="[]")
    book.call("s", [1, 2, 3], [4], parent="a", kind="compaction", messages=said["user"], reply=reply)
    book.call("z", [1, 9], [5], messages=said["user"], reply=reply, tools="[]", root_reason="edited_history")
    run = book.write(tmp_path / "run")
    export.export(run, "atif", tmp_path / "out", merged=run / "merged")
    first = json.loads((tmp_path / "out" / "a.0.json").read_text())
    assert first["continued_trajectory_ref"] == "z.0.json"
    (summary,) = first["subagent_trajectories"]
    assert [step.get("is_copied_context", False) for step in summary["steps"]] == [True, True, False, False]
    after = json.loads((tmp_path / "out" / "z.0.json").read_text())
    assert [step.get("is_copied_context", False) for step in after["steps"]] == [True, False]
