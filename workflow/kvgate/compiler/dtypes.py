"""The numbers that a built graph may compute in. Standard library only."""

BITS = {"int8": 8, "int16": 16}
FLOAT16 = 65504.0  # its largest value
