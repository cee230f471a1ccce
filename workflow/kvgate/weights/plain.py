"""The empty preparation: the checkpoint's weights as they are.

A preparation may have up to two hooks, both leaving the function as it is in fp32:
`checkpoint(model, stats)` changes the loaded model in place, before it is measured;
`linear(name, weight, stats)` returns the matrix [in, out] that the graph gets instead of `weight`.
"""
