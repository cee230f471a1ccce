"""A row's results and its bundle for ONNX Runtime, made once a test file."""

import pytest
import tinyrow


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return tinyrow.Rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def bundle(rows):
    return rows.bundle(tinyrow.HOST)
