"""The journal: a call's rows on disk before anyone sees its answer, and from there into Parquet.

Invariant: when `Journal.finish` returns, its rows survive `kill -9` and a power cut; what `begin` took and nothing
finished is found again as a row of status "lost"; what `amend` took is durable with the next `finish`. A row stays in
a journal until the Parquet file that holds it is durable, so readers meet it once or twice, never not at all, and keep
the last record of a (call_id, choice).

A writer is one process, and its files are numbered parts:

    journal/WRITER-000001.journal   locked by its writer for as long as it lives
    calls/WRITER-000001.parquet     the same part, sealed; sealing it again makes the same file

This package does not decide what a row says, knows no protocol, and keeps no index for looking up single calls.
"""

from polar_mitm.journal.bodies import Outline, grow, outline, shrink
from polar_mitm.journal.frames import UnreadableRun
from polar_mitm.journal.reading import read_calls, read_row_groups, row_groups, sealed_sessions, settle
from polar_mitm.journal.sealing import recover
from polar_mitm.journal.writer import FileSink, Journal, Sink

__all__ = [
    "FileSink", "Journal", "Outline", "Sink", "UnreadableRun", "grow", "outline", "read_calls",
    "read_row_groups", "recover", "row_groups", "sealed_sessions", "settle", "shrink",
]  # fmt: skip
