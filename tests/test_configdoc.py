from pathlib import Path

from kvgate import configdoc


def test_the_page_is_what_the_schema_says():
    assert (Path(__file__).parents[1] / "config/README.md").read_text() == configdoc.render()


def test_every_key_is_described():
    text = configdoc.render()
    for name in ("capacity", "quantized", "histories", "exclude", "mask"):
        assert name in text
