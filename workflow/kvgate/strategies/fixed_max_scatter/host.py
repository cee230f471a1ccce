"""Host half of fixed_max_scatter: the fixed buffer, with the slots' indexes instead of one-hot rows."""

from kvgate.strategies.fixed_max_blend.host import Host as Host
