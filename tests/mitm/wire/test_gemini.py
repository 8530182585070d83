"""Gemini as a dialect: models, counts, and a table of its fields that is what happens."""

from polar_mitm.wire.gemini import Gemini

GEMINI = Gemini()


def test_tokens_are_counted_in_googles_words():
    """The total, and that all of it is text."""
    assert GEMINI.counted(7) == {"totalTokens": 7, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 7}]}


def test_models_have_their_limits():
    """In the list and one by one."""
    (model,) = GEMINI.models(["m"], 4096)["models"]
    assert (model["name"], model["inputTokenLimit"]) == ("models/m", 4096)
    assert GEMINI.model("models/m", 4096) == model


def test_every_ignored_field_says_why():
    """And no field stands in two tables."""
    tables = (GEMINI.support.supported, GEMINI.support.ignored, GEMINI.support.refused)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    assert all(GEMINI.support.ignored.values())
