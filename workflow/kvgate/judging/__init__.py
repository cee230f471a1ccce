"""Numbers to a verdict: comparison with the reference, gates, symptoms, causes.

numpy only. What is measured is in `measures/`.
"""
