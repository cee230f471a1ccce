"""The agent and the engines of a board. Standard library and numpy only, Python 3.9."""
