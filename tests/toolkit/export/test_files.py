"""Rows as files."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from polar_toolkit.export.files import write_lines, write_table


def test_rows_become_parquet_a_few_at_a_time(tmp_path):
    """Lists may be arrays; the rows are asked for as they are written."""
    schema = pa.schema([("ids", pa.list_(pa.int32())), ("name", pa.string())])
    rows = ({"ids": np.arange(n, dtype=np.int32), "name": str(n)} for n in range(100))
    write_table(tmp_path / "t.parquet", schema, rows)
    with pq.ParquetFile(tmp_path / "t.parquet") as file:
        assert (file.metadata.num_rows, file.num_row_groups) == (100, 4)
        assert file.read()["ids"][99].as_py() == list(range(99))


def test_rows_become_json_lines(tmp_path):
    """A float32 comes back as the same float32."""
    values = np.array([-0.1, -1e-7], np.float32)
    write_lines(tmp_path / "l.jsonl", [{"logprobs": values}])
    (line,) = (tmp_path / "l.jsonl").read_text().splitlines()
    assert (np.array(json.loads(line)["logprobs"], np.float32) == values).all()
