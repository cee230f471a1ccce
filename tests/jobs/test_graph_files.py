"""The host half, opened from a graph's folder."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic
from kvgate.jobs import graph_files, record
from kvgate.jobs.job import Job


@pytest.mark.parametrize("name", ["cpu_managed", "fixed_max_blend"])
def test_the_strategys_own_with_the_folders_tables(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "host.npz", embedding=np.full((2, 3), 7.0))
    files = {"host.npz": record.sha256(tmp_path / "host.npz")}
    record.write(tmp_path / "graph.json", {"status": "ok", "files": files})
    job = Job("check", {}, {}, {"export": tmp_path / "graph.json"}, tmp_path)
    host = graph_files.opened(job, replace(synthetic.contract(), strategy=name), -5.0)
    assert type(host).__module__ == f"kvgate.strategies.{name}.host" and host.mask_value == -5.0
    assert host.tables["embedding"][1, 2] == 7.0  # read, as the file is closed
