import pytest
from kvgate.board.marker import Marker


@pytest.mark.parametrize(
    ("text", "phase", "step"),
    [("load", "load", None), ("chat forced 5/20", "chat forced", 5), ("model 2 free 17/17", "model 2 free", 17)],
)
def test_the_other_side_sees_phase_and_step(tmp_path, text, phase, step):
    seen, mine = Marker(tmp_path / "marker", create=True), Marker(tmp_path / "marker")
    mine.set("a longer text that was there before")
    mine.set(text)
    assert (seen.get().text, seen.get().phase, seen.get().step, seen.get().changes) == (text, phase, step, 2)


def test_a_text_that_does_not_fit_is_cut(tmp_path):
    marker = Marker(tmp_path / "marker", create=True)
    marker.set("é" * 2000)
    assert marker.get().text.startswith("é" * 500)
