"""What people look at."""

import io
import json

import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from polar_toolkit import inspection
from polar_toolkit.errors import Refusal


@pytest.fixture
def run(tmp_path, book):
    """A chain of two, and a retry's orphan."""
    book.call("first", [1, 2], [3])
    book.call("second", [1, 2, 3, 4], [0], parent="first")
    book.call("orphan", [1, 2], [0])
    return book.write(tmp_path / "r")


def printed(renderable):
    console = Console(width=120, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def tokenizer_folder(folder):
    """A word tokenizer of five words, as a model folder has it."""
    folder.mkdir()
    words = {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4}
    Tokenizer(WordLevel(words, unk_token="zero")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def test_a_session_is_shown_as_a_tree_with_reasons(run):
    """Edges and reasons stand beside each call."""
    text = printed(inspection.call_view(inspection.find([run], "s"), None))
    assert "second.0 agent exact: 4 + 1 tokens trained" in text
    assert "orphan.0 agent root(first): 2 + 1 tokens superseded" in text


def test_a_call_is_found_by_the_beginning_of_its_id(run):
    """Its prompt is rebuilt whole."""
    found = inspection.find([run], "sec")
    assert inspection.prompt_of(found).tolist() == [1, 2, 3, 4]


def test_a_call_is_shown_with_ids_and_logprobs(run):
    """Without a tokenizer, ids only."""
    text = printed(inspection.call_view(inspection.find([run], "second"), None))
    assert "1 2 3 4" in text
    assert "-0.50000" in text


def test_a_call_is_shown_with_text_when_the_tokenizer_loads(tmp_path, book):
    """run.json names the tokenizer."""
    book.call("a", [1, 2], [3])
    run = book.write(tmp_path / "r", tokenizer=str(tokenizer_folder(tmp_path / "words")))
    text = printed(inspection.call_view(inspection.find([run], "a"), inspection.load_decoder(run)))
    assert "one two" in text
    assert "'three'" in text


def test_a_tokenizer_that_does_not_load_is_no_error(tmp_path, book):
    """Ids are shown instead."""
    book.call("a", [1], [2])
    assert inspection.load_decoder(book.write(tmp_path / "r", tokenizer=str(tmp_path / "nowhere"))) is None


@pytest.mark.parametrize(("name", "message"), [("nobody", "no session or call"), ("f", "begins the ids")])
def test_a_name_that_stands_for_nothing_or_for_several_is_refused(tmp_path, book, name, message):
    """The sentence says what to do."""
    book.call("fa", [1], [2])
    book.call("fb", [3], [2])
    with pytest.raises(Refusal, match=message):
        inspection.find([book.write(tmp_path / "r")], name)


def test_a_session_is_not_a_call(run):
    """A command for one call says how to find one."""
    with pytest.raises(Refusal, match="is a session"):
        inspection.find_call(run, "s")


def test_a_prompt_that_cannot_be_rebuilt_is_refused(tmp_path, book):
    """A corrupt row is shown without its prompt."""
    book.call("a", [1, 2], [3], prompt_hash=bytes(16))
    found = inspection.find([book.write(tmp_path / "r")], "a")
    assert "quarantined_prompt_hash" in printed(inspection.call_view(found, None))
    with pytest.raises(Refusal, match="cannot be rebuilt"):
        inspection.prompt_of(found)


def test_a_chain_of_3000_turns_is_shown_without_recursion(book, tmp_path):
    """A chain without branches stays on one level."""
    book.chain(3000)
    assert "c2999.0" in printed(inspection.call_view(inspection.find([book.write(tmp_path / "r")], "s"), None))


def test_a_call_is_shown_with_what_its_edge_is_shown_by_and_where_a_render_leaves_it(tmp_path, book):
    """The windows of root_window and drift stand beside it."""
    book.call("a", [1, 2], [3])
    drift = '{"class": "arguments", "at": 2, "sampled": "{ }", "rendered": "{}"}'
    book.call("b", [1, 2, 3, 4], [0], parent="a", parent_evidence="pointer", drift=drift)
    text = printed(inspection.call_view(inspection.find([book.write(tmp_path / "r")], "b"), None))
    assert "exact, shown by pointer" in text
    assert "re-render: class" in text
    assert "arguments" in text
