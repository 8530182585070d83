"""Choosing a format, and the command."""

import pytest
from typer.testing import CliRunner

from polar_toolkit import export, merge
from polar_toolkit.cli import app
from polar_toolkit.errors import Refusal


def test_an_unknown_format_lists_the_formats(exported):
    """So that one need not look for them."""
    with pytest.raises(Refusal, match="no format 'art'; give one of verl, slime, skyrl, trl, harbor, atif, sft"):
        exported("art")


def test_an_export_of_nothing_is_refused_with_the_reason(tmp_path, book):
    """And leaves no folder."""
    book.call("a", [1], [2])
    run = book.write(tmp_path / "r")
    merge.merge(run, run / "merged", merge.Options(), lambda *_: None)
    with pytest.raises(Refusal, match="nothing to export: no_reward 1"):
        export.export(run, "slime", tmp_path / "out", merged=run / "merged")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_somebody_else_is_refused(run, tmp_path):
    """A merged folder, too: nothing in it changes."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for folder in (tmp_path / "mine", run / "merged"):
        before = sorted(folder.iterdir())
        with pytest.raises(Refusal, match="was not made by polar-toolkit export"):
            export.export(run, "sft", folder, merged=run / "merged")
        assert sorted(folder.iterdir()) == before


def test_an_earlier_export_is_replaced_as_a_whole(exported):
    """No file of it stays."""
    folder, _ = exported("atif")
    (folder / "old.json").touch()
    exported("atif")
    assert not (folder / "old.json").exists()


@pytest.mark.parametrize("form", export.FORMATS, ids=lambda form: form.name)
def test_every_format_trains_each_token_once(exported, form):
    """What it writes and what it leaves out is all that can be trained."""
    _, tally = exported(form.name)
    assert (tally.trained + sum(tally.left_out.values()), tally.sampled) == (15, 15)


def test_the_command_says_what_it_wrote(run, tmp_path):
    """Trained of sampled, as every command."""
    done = CliRunner().invoke(app, ["export", str(run), "--format", "trl", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "4 rows, 14 of 15 sampled tokens trained / 93.3%; left out: no_reward 1" in done.output
    refused = CliRunner().invoke(app, ["export", str(run), "--format", "x", "--out", str(tmp_path / "out")])
    assert refused.exit_code == 2


def test_the_help_names_every_format():
    """With what each is for."""
    shown = " ".join(CliRunner().invoke(app, ["export", "--help"], terminal_width=10_000).output.split())
    assert all(f"{form.name}: " in shown for form in export.FORMATS)
