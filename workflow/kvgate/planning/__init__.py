"""Before a run: the config, the tuples it asks for, every job with its key, what is stale. Imports nothing heavy."""
