"""Beside the workflow: preflight and benchmarks."""
