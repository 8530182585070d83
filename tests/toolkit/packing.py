"""From a book of calls to packed rows, by way of pieces of trajectories that stand in memory."""

from polar_toolkit import batches, calls, packed, trajectories
from polar_toolkit.tree import grow


class Piece:
    """Trajectories in memory, read as those of a file."""

    def __init__(self, table):
        self.table = table

    def read(self, columns):
        return self.table.select(columns)


def pieces(book, rewards):
    """One piece for each session of run `run`, with a reward for those that are named."""
    sessions = calls.by_session(book.calls()).values()
    scores = {("run", session): reward for session, reward in rewards.items()}
    return [Piece(trajectories.to_table(trajectories.build(grow(session)), scores)) for session in sessions]


def planned(book, rewards, options):
    """The batches of a book."""
    return batches.plan(batches.survey(pieces(book, rewards), options.max_tokens), options)


def packed_rows(book, rewards, options):
    """The packed rows of all batches of a book, as Python values."""
    seen = batches.survey(pieces(book, rewards), options.max_tokens)
    written = batches.plan(seen, options).batches
    return [
        row
        for batch in written
        for table in packed.tables(seen, batch, options.max_tokens)
        for row in table.to_pylist()
    ]
