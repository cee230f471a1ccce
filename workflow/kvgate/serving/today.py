"""The day that a chat template is told: one and the same in the reference, in a job's key (as code) and in a bundle.

The real one would give other tokens every day, under equal keys. Standard library only, Python 3.9.
"""

from datetime import datetime

TODAY = datetime(2024, 7, 26)  # Llama 3's templates take it where there is no clock


def strftime_now(form: str) -> str:
    """What templates call under this name."""
    return TODAY.strftime(form)


def asked(template: str) -> bool:
    """Whether a template asks for the day."""
    return "strftime_now" in template
