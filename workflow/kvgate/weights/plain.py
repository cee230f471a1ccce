"""The empty preparation: the checkpoint's weights as they are.

A preparation is a module of this folder with some of these hooks, each leaving the function as it is in fp32:
`checkpoint(model)` changes the loaded model in place, before it is measured;
`heads(layer, tensors, peak) -> heads.Change` gives a layer's K and V another basis; `tensors` are the layer's;
`turn(size) -> [D, D]` follows every rotary embedding, so K is cached in that basis;
`linear(name, weight, gram, **options)` returns the matrices [in, out] whose products the graph adds up instead;
`matrices(weights, grams, **options)` the same for all of them at once, by name.
And these constants: FAMILIES, the model types that `checkpoint` knows; DTYPES, the quantized dtypes that it makes
sense for; STATISTICS = True where it reads `peak` or `gram` (export/statistics.py); DISABLE, rules of the toolkit that
its graph needs off.
"""
