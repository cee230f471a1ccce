"""The residual stream keeps what float16 loses in its sums, in a second tensor of the graph; no weight changes.

For float16 rows: it removes most of their error (export/residual.py says how, and what it costs). Beside the rounding
of quantized products it makes no difference.
"""

COMPENSATES = True
