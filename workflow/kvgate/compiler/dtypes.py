"""The integers that a built graph may compute in. Standard library only."""

BITS = {"int8": 8, "int16": 16}
