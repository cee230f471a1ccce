"""Ways to keep the cache. A folder a strategy: graph.py (torch) and host.py (numpy only, Python 3.9: boards run it)."""
