"""Where a checkpoint comes from. A module a kind, with `fetch(source, into)` and the constants that planning reads."""
