"""A row's results and its bundle for ONNX Runtime, made once a test file; and a server of it."""

import pytest
import tinyrow
from served import Served


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return tinyrow.Rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def bundle(rows):
    return rows.bundle(tinyrow.HOST)


@pytest.fixture
def served(bundle):
    with Served(bundle) as made:
        yield made
