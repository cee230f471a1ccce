"""A verdict is believed where it was not edited and is what its own gates say: by table, gate and bundle."""

from pathlib import Path
from typing import Any

import pytest
import synthetic
from kvgate.jobs import record
from kvgate.jobs.rows import Row
from kvgate.judging import judged
from kvgate.report import table

OF = synthetic.trace()


def off(seen: dict[str, Any]) -> None:
    seen["forced/layers.1.value"] = synthetic.off(seen["forced/layers.1.value"], 0.2)


@pytest.fixture
def verdict(tmp_path: Path) -> Path:
    """Of a row that fails."""
    assert synthetic.judged(tmp_path, off)["verdict"] == "fail"
    return tmp_path / "models/tiny/rows/plain/cpu_managed/rk3576/fp16/simulator/verdict.json"


def believed_by_nobody(root: Path, capsys: pytest.CaptureFixture, why: str) -> None:
    row = Row(**synthetic.ROW)
    assert table.gate(root, [row], [], {}) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"blocked: tiny/plain/cpu_managed/rk3576/fp16/simulator: {why}")
    assert table.main(root, "default", [row], ["pass"], {}) == 0
    out = capsys.readouterr().out
    assert "0 pass, 0 warn, 0 fail, 1 blocked" in out and why in out and "ship (" not in out
    body = synthetic.tabulated(root, [synthetic.ROW])
    assert body["counts"]["blocked"] == 1 and body["bundles"] == {} and not (root / "bundles").exists()
    assert body["rows"][0]["reason"].startswith(why)


def test_an_edited_verdict(tmp_path: Path, verdict: Path, capsys: pytest.CaptureFixture) -> None:
    text = verdict.read_text()
    verdict.write_text(text.replace('"verdict": "fail"', '"verdict": "pass"'))
    believed_by_nobody(tmp_path, capsys, "its verdict.json was edited; run again: it is judged again")


def test_a_verdict_that_its_gates_contradict(tmp_path: Path, verdict: Path, capsys: pytest.CaptureFixture) -> None:
    record.write(verdict, record.read(verdict) | {"verdict": "pass"})
    believed_by_nobody(tmp_path, capsys, "the verdict is pass, and its gates say fail")


BEHAVES = {"ratio": 1.04, "top1": 0.96, "behaves": True}
LIMITS = {"config": {"thresholds": {"behaviour": {"perplexity": 1.05, "top1": 0.95}}}}


def of(word: str, *gates: str, **figures: Any) -> dict[str, Any]:
    found = {"verdict": word, "gates": [{"name": "kv_l2", "verdict": x} for x in gates], "key": LIMITS}
    return found | {"figures": {"behaviour": BEHAVES | figures}}


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (of("pass", "pass", "pass"), ""),
        (of("warn", "pass", "warn"), ""),
        (of("fail", "warn", "fail"), ""),
        (of("blocked"), ""),
        (of("warn", "pass", "fail"), "the verdict is warn, and its gates say fail"),
        (of("fail", "pass"), "the verdict is fail, and its gates say pass"),
        (of("pass"), "the verdict is pass, and its gates say nothing"),
        (of("pass", "pass", "good"), "the verdict is pass, and its gates say good"),
        (of("blocked", "pass"), "blocked, and its gates say pass"),
        (of("green", "pass"), "the verdict is 'green', allowed: pass, warn, fail, blocked"),
        (of("fail", "fail", ratio=1.06), "it behaves with perplexity x 1.06 and top-1 0.96, which its limits do not"),
        (of("fail", "fail", top1=0.5), "it behaves with perplexity x 1.04 and top-1 0.5, which its limits do not"),
        (of("fail", "fail", ratio=None), "it behaves with perplexity x None and top-1 0.96, which its limits do not"),
        (of("fail", "fail", ratio=1.06, behaves=False), ""),
    ],
)
def test_contradictions(verdict: dict[str, Any], why: str) -> None:
    found = judged.contradiction(verdict)
    assert found.startswith(why) and bool(found) == bool(why)
