"""The entries of the config as types, a file of config/ a module: what a job's key and its stage have of them.

They stay the dicts that were read: a key is their JSON. The schema fills every default in, so a key that has one is
always there; tests/planning/test_entries.py holds these types to the schema. A module of its own for each, as a
stage's code is all that it imports: another key of a board is no reason to build again. Standard library only.
"""
