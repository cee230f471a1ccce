"""Host half of fixed_max_scatter: the fixed buffer, with the slot's index instead of a one-hot row."""

from kvgate.strategies.fixed_max_blend.host import Host as Host
