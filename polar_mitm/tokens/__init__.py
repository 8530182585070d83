"""Conversations to token ids and sampled ids back to replies; the only place that knows chat templates.

`load(folder)` gives the `Template` of a model folder; `Reading` turns a growing sample into deltas, and a whole one
into parts.
"""

from polar_mitm.tokens.reading import Finished, Kind, Reading
from polar_mitm.tokens.retention import POLICIES
from polar_mitm.tokens.template import Template, Tokens, load

__all__ = ["POLICIES", "Finished", "Kind", "Reading", "Template", "Tokens", "load"]
