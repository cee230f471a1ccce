"""A token that is not the reference's: a near tie, where the error is larger than what it decided by. Standard library
only."""

from kvgate.judging.records import Change


def near_tie(change: Change) -> bool:
    """Whether the reference's margin between its two best logits is below the logits' error (metrics.rms_error)."""
    margin, error = change.get("margin"), change.get("error")
    return margin is not None and error is not None and margin < error


def said(change: Change) -> str:
    text = f"token {change['token']} instead of {change['reference']}"
    margin, error = change.get("margin"), change.get("error")
    if margin is None or error is None:
        return text
    return text + f" (margin {margin:.4g}, logits' error {error:.4g})"
