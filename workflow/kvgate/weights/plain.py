"""The empty preparation: the checkpoint's weights as they are.

A preparation is a module of this folder with some of these hooks, each leaving the function as it is in fp32 (unless
it has MOVES):
`checkpoint(model)` changes the loaded model in place, before it is measured;
`heads(layer, tensors, peak) -> heads.Change` gives a layer's K and V another basis; `tensors` are the layer's;
`turn(size) -> [D, D]` follows every rotary embedding, so K is cached in that basis;
`linear(name, weight, gram, **options)` returns the matrices [in, out] whose products the graph adds up instead, or one
whose input is widened (prepare/widened.py);
`matrices(weights, grams, loss, kernels, **options)` the same for all of them at once, by name; `loss(changes)` measures
what changes of single matrices cost; `kernels` are the rows of a matrix that are one input channel. Beside it
`steps(sums, kept, signs, options)`: the steps that make its result again; `signs` by name of a matrix whose input is
widened.
And these constants: FAMILIES, the model types that `checkpoint` knows; DTYPES, the quantized dtypes that it makes
sense for; STATISTICS = True where it reads `peak` or `gram` (prepare/statistics.py); MOVES = True where it changes the
function on purpose, so that the graph is held to the moved weights' own logits; DISABLE, rules of the toolkit that its
graph needs off; HYBRID, patterns that the quant's `hybrid` must have; COMPENSATES = True where the graph's residual
stream keeps what float16 loses (export/residual.py).
"""
