"""Faults of an exported graph: in its nodes, weights, tables or contract. The check names the first place of each.

The record is made to say what the files are: the exporter itself was wrong, and nothing but values tells.
"""

from typing import Any

import numpy as np
import pytest
from planting import LAYERS, SLOTS, WINDOW, Faults, Sweep, red
from surgery import Graph, contract, graph, tables, weights

HEADS, SIZE = 2, 16
fault = Faults("check")


def attention(layer: int, name: str) -> str:
    return f"layers.{layer}/self_attn/{name}"


# What attention reads


@fault(2, "key", 1)
def keys_and_values_of_the_history_are_swapped(sweep: Sweep) -> None:
    with graph(sweep) as g:
        for name, read in (("Concat", "value.1"), ("Concat_1", "key.1")):
            g.node(attention(1, name)).input[0] = read


@fault(1, "key", 1)
def two_layers_read_each_others_history(sweep: Sweep) -> None:
    with graph(sweep) as g:
        for layer in (0, 1):
            g.node(attention(layer, "Concat")).input[0] = f"key.{1 - layer}"


@fault(1, "key", 1)
def heads_of_the_key_history_are_permuted(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.read("key.0", g.heads([1, 0]))


@fault(2, "key", 1)
def heads_of_the_value_history_are_permuted(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.read("value.1", g.heads([1, 0]))


@fault(1, "key", 1)
def slots_of_the_history_are_reversed(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.read("value.0", lambda x: g.add("Gather", x, g.constant(range(SLOTS)[::-1], np.int64), axis=3))


@fault(1, "key", 1)
def slots_of_the_history_are_one_late(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.read("key.0", lambda x: g.add("Gather", x, g.constant(np.roll(range(SLOTS), 1), np.int64), axis=3))


@fault(1, "key", 0)
def the_own_token_comes_first_and_the_mask_says_last(sweep: Sweep) -> None:
    with graph(sweep) as g:
        for name in ("Concat", "Concat_1"):
            node = g.node(attention(0, name))
            node.input[:] = reversed(node.input)


@fault(1, "key", 1)
def channels_of_the_history_are_read_in_another_layout(sweep: Sweep) -> None:
    with graph(sweep) as g:
        shape = g.constant((HEADS, SIZE, 1, SLOTS), np.int64)

        def moved(x: str) -> str:
            rows = g.add("Transpose", x, perm=[0, 3, 2, 1])
            return g.add("Reshape", rows, shape)

        g.read("key.0", moved)


# What the step gives back


@fault(0, "key", 0, says=r"heads")
def heads_of_the_key_are_permuted(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.give("key.0.out", g.heads([1, 0]))


@fault(2, "value", 0, says=r"heads")
def heads_of_the_value_are_permuted(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.give("value.2.out", g.heads([1, 0]))


@fault(1, "key", 0, says=r"written as \(channels, heads\), read as \(heads, channels\)")
def a_key_is_given_back_in_another_layout(sweep: Sweep) -> None:
    with graph(sweep) as g:
        shape = g.constant((HEADS, SIZE, 1, 1), np.int64)
        g.give("key.1.out", lambda x: g.add("Reshape", g.add("Transpose", x, perm=[1, 0, 2, 3]), shape))


@fault(2, "key", 0, says=r"pairs of channels")
def channels_of_the_key_are_interleaved(sweep: Sweep) -> None:
    with graph(sweep) as g:
        order = np.arange(SIZE).reshape(2, -1).T.ravel()
        g.give("key.2.out", lambda x: g.add("Gather", x, g.constant(order, np.int64), axis=1))


def exchanged(sweep: Sweep, one: str, two: str) -> None:
    """Two outputs give each other's values; what reads them inside does not change."""
    with graph(sweep) as g:
        for name in (one, two):
            g.give(name, lambda x: g.add("Identity", x))
        for node, name in ((g.maker(one), two), (g.maker(two), one)):
            node.input[0] = f"planted.{name}"


@fault(1, "key", 0, says="holds the value of layer 1")
def key_and_value_are_given_back_swapped(sweep: Sweep) -> None:
    exchanged(sweep, "key.1.out", "value.1.out")


@fault(0, "key", 0, says="key of layer [02] holds the key of layer [20]")
def keys_of_two_layers_are_given_back_swapped(sweep: Sweep) -> None:
    exchanged(sweep, "key.0.out", "key.2.out")


@fault(1, "value", 0)
def a_value_is_given_back_with_another_scale(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.give("value.1.out", lambda x: g.add("Mul", x, g.constant(1.001)))


@fault(2, "value", 0)
def one_channel_of_a_value_is_cut(sweep: Sweep) -> None:
    with graph(sweep) as g:
        keep = np.ones((1, SIZE, 1, 1))
        keep[0, 5] = 0
        g.give("value.2.out", lambda x: g.add("Mul", x, g.constant(keep)))


# Masks


def without_mask(g: Graph, layer: int) -> None:
    g.drop(attention(layer, "Add_1"), keep=0)


@fault(2, "key", 0)
def a_mask_is_ignored(sweep: Sweep) -> None:
    with graph(sweep) as g:
        without_mask(g, 1)


@fault(None, "logits", WINDOW)
def a_window_is_ignored(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.read("mask.1", lambda x: "mask.0")


@fault(1, "key", WINDOW)
def a_layer_that_sees_everything_has_a_window(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.node(attention(0, "Add_1")).input[1] = "mask.1"


@fault(1, "key", 0)
def the_mask_of_one_position_is_baked_in(sweep: Sweep) -> None:
    mask = np.full((1, SLOTS + 1), -1e4)
    mask[0, [0, 1, 2, 3, 4, SLOTS]] = 0
    with graph(sweep) as g:
        g.node(attention(0, "Add_1")).input[1] = g.constant(mask)


@fault(1, "key", 0)
def the_mask_is_too_weak(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.node(attention(0, "Add_1")).input[1] = g.add("Mul", "mask.0", g.constant(1e-4))


@fault(1, "key", 1)
def the_mask_hides_the_history(sweep: Sweep) -> None:
    own = np.full((1, SLOTS + 1), -1e4)
    own[0, -1] = 0
    with graph(sweep) as g:
        g.node(attention(0, "Add_1")).input[1] = g.add("Min", "mask.0", g.constant(own))


# Positions


@fault(0, "key", 1)
def the_rotation_of_position_0_is_baked_in(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.read("rotation.0", lambda x: g.constant(np.eye(SIZE).reshape(1, SIZE, 1, SIZE)))


@fault(1, "key", 1)
def one_layer_turns_the_wrong_way(sweep: Sweep) -> None:
    with graph(sweep) as g:
        (node,) = (x for x in g.nodes if x.name.endswith(attention(1, "Transpose")))
        node.attribute[0].ints[:] = [0, 2, 1, 3]  # [1, 1, in, out] instead of [1, 1, out, in]


@fault(0, "key", 0)
def the_tables_are_one_position_ahead(sweep: Sweep) -> None:
    with tables(sweep) as t:
        for name in ("cosine.0", "sine.0"):
            t[name] = np.roll(t[name], -1, axis=0)


@fault(0, "key", 1)
def the_sine_has_the_wrong_sign(sweep: Sweep) -> None:
    with tables(sweep) as t:
        t["sine.0"] = -t["sine.0"]


@fault(0, "key", 1)
def pairs_are_turned_in_the_other_convention(sweep: Sweep) -> None:
    turn = np.zeros((SIZE, SIZE), np.float32)
    for i in range(0, SIZE, 2):
        turn[i, i + 1], turn[i + 1, i] = -1, 1
    with tables(sweep) as t:
        t["turn.0"] = turn


@fault(0, "key", 16)
def the_tables_stop_at_half_the_slots(sweep: Sweep) -> None:
    with tables(sweep) as t:
        for name in ("cosine.0", "sine.0"):
            t[name][16:] = t[name][15]


@fault(0, "key", 9)
def one_row_of_the_tables_is_another_position(sweep: Sweep) -> None:
    with tables(sweep) as t:
        t["cosine.0"][9] = t["cosine.0"][10]


# The host's other tables


@fault(0, "key", 0)
def embedding_rows_are_one_off(sweep: Sweep) -> None:
    with tables(sweep) as t:
        t["embedding"] = np.roll(t["embedding"], 1, axis=0)


@fault(0, "key", 6)
def the_embedding_of_one_token_is_changed(sweep: Sweep) -> None:
    tokens = sweep.body("trace")["tokens"]
    assert tokens[6] not in tokens[:6]
    with tables(sweep) as t:
        t["embedding"][tokens[6]] *= -1


# Weights


def joint(weights: dict[str, np.ndarray], layer: int, name: str) -> np.ndarray:
    """The joint matrix, or its bias, as [.., KV head, channel, (query, query, key, value)]."""
    x = weights[f"layers.{layer}.self_attn.{name}"]
    return x.reshape(*x.shape[:-1], HEADS, SIZE, 4)


@fault(2, "key", 1)
def the_scores_have_another_scale(sweep: Sweep) -> None:
    """At position 0 a softmax over one score hides it."""
    with weights(sweep) as w:
        joint(w, 1, "qkv")[..., :2] *= 2


@fault(1, "key", 1)
def queries_are_grouped_with_the_wrong_heads(sweep: Sweep) -> None:
    with weights(sweep) as w:
        for name in ("qkv", "bias"):
            x = joint(w, 0, name)
            x[..., :2] = x[..., ::-1, :, :2].copy()


@fault(1, "key", 0)
def heads_of_the_output_projection_are_permuted(sweep: Sweep) -> None:
    with weights(sweep) as w:
        w["layers.0.self_attn.out"][:] = np.roll(w["layers.0.self_attn.out"], 2 * SIZE, axis=0)


@fault(1, "key", 0)
def key_and_value_projections_are_swapped(sweep: Sweep) -> None:
    with weights(sweep) as w:
        for name in ("qkv", "bias"):
            x = joint(w, 1, name)
            x[..., 2:] = x[..., :1:-1].copy()


@fault(2, "key", 0)
def the_bias_of_a_projection_is_left_out(sweep: Sweep) -> None:
    with weights(sweep) as w:
        w["layers.2.self_attn.bias"][:] = 0


@fault(1, "key", 0)
def gate_and_up_are_swapped(sweep: Sweep) -> None:
    with weights(sweep) as w:
        gate, up = (w[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        gate[:], up[:] = up.copy(), gate.copy()


@fault(2, "key", 0)
def one_bit_of_a_weight_is_flipped(sweep: Sweep) -> None:
    with weights(sweep) as w:
        w["layers.1.mlp.down_proj.weight"].view(np.uint32)[17, 30] ^= 1 << 25


@fault(2, "key", 0)
def layers_have_each_others_weights(sweep: Sweep) -> None:
    with weights(sweep) as w:
        one, two = (w[f"layers.{n}.mlp.up_proj.weight"] for n in (1, 2))
        one[:], two[:] = two.copy(), one.copy()


@fault(None, "logits", 0)
def tokens_of_the_head_are_one_off(sweep: Sweep) -> None:
    with weights(sweep) as w:
        head = next(name for name in w if name.endswith("lm_head.weight"))
        w[head][:] = np.roll(w[head], 1, axis=1)


@fault(None, "logits", 0)
def the_last_norm_has_no_gain(sweep: Sweep) -> None:
    with weights(sweep) as w:
        w["norm.weight"][:] = 1


# Nodes around attention


@fault(0, "key", 0)
def a_norm_has_another_epsilon(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.node("layers.0/input_layernorm/Add").input[1] = g.constant(1e-2)


@fault(2, "key", 0)
def a_residual_is_left_out(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.drop("layers.1/Add_1", keep=1)


@fault(None, "logits", 0)
def the_last_layer_is_left_out_of_the_head(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.rewire(g.nodes, g.node(f"layers.{LAYERS - 1}/Add_1").output[0], g.node(f"layers.{LAYERS - 1}/Add").output[0])


# The contract


@fault(None, "logits", WINDOW)
def the_contract_has_no_window(sweep: Sweep) -> None:
    with contract(sweep) as c:
        c["windows"] = [None, None]


@fault(None, "logits", WINDOW)
def the_contracts_window_is_one_too_wide(sweep: Sweep) -> None:
    with contract(sweep) as c:
        c["windows"] = [None, WINDOW + 1]


@fault(None, "logits", WINDOW - 1)
def the_contracts_window_is_one_too_narrow(sweep: Sweep) -> None:
    with contract(sweep) as c:
        c["windows"] = [None, WINDOW - 1]


@fault(1, "key", WINDOW)
def the_contract_swaps_the_masks(sweep: Sweep) -> None:
    with contract(sweep) as c:
        for tensor in c["inputs"]:
            if tensor["role"] == "mask":
                tensor["index"] = 1 - tensor["index"]


@fault(0, "key", 0, says="holds the key of layer 1")
def the_contract_swaps_two_layers(sweep: Sweep) -> None:
    with contract(sweep) as c:
        for tensor in c["inputs"] + c["outputs"]:
            if tensor["states"] in (["layers.0.key"], ["layers.1.key"]):
                tensor["states"] = [f"layers.{1 - int(tensor['states'][0][7])}.key"]


@fault(1, "key", 1)
def the_contract_swaps_the_history_of_two_layers(sweep: Sweep) -> None:
    with contract(sweep) as c:
        for tensor in c["inputs"]:
            if tensor["states"] in (["layers.0.key"], ["layers.1.key"]):
                tensor["states"] = [f"layers.{1 - int(tensor['states'][0][7])}.key"]


@fault(None, "logits", 0)
def the_contract_has_another_shift(sweep: Sweep) -> None:
    """All logits are off by the same: softmax ignores it, a user of the logits does not."""
    with contract(sweep) as c:
        c["shift"] += 1


# A buffer that the graph itself writes


def writes(g: Graph) -> list[Any]:
    return [x for x in g.nodes if x.op_type == "Where"]


@fault(0, "key", 1, strategy="blend")
def the_slot_that_is_written_is_baked_in(sweep: Sweep) -> None:
    slot = np.arange(SLOTS)[None] == 0
    with graph(sweep) as g:
        g.read("write", lambda x: g.constant(slot, np.bool_))


@fault(0, "key", 0, strategy="blend")
def the_slot_that_is_written_is_one_late(sweep: Sweep) -> None:
    with graph(sweep) as g:
        order = g.constant(np.roll(range(SLOTS), 1), np.int64)
        g.read("write", lambda x: g.add("Gather", x, order, axis=1))


@fault(0, "key", 0, strategy="blend")
def all_slots_but_the_own_are_written(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.read("write", lambda x: g.add("Not", x))


@fault(0, "key", 0, strategy="blend")
def slots_come_back_one_late(sweep: Sweep) -> None:
    with graph(sweep) as g:
        order = g.constant(np.roll(range(SLOTS), 1), np.int64)
        g.give("key.0.out", lambda x: g.add("Gather", x, order, axis=3))


@fault(None, "cache", 1, says="disturbed", strategy="blend")
def other_slots_come_back_with_another_scale(sweep: Sweep) -> None:
    with graph(sweep) as g:
        g.give("key.1.out", lambda x: g.add("Where", "write", x, g.add("Mul", x, g.constant(1.01))))


@fault(None, "cache", 0, says="disturbed", strategy="blend")
def one_slot_comes_back_with_a_rest(sweep: Sweep) -> None:
    """An empty slot that should be zero: nothing that is masked looks at it."""
    rest = np.zeros((1, 1, 1, SLOTS))
    rest[..., SLOTS - 1] = 0.5
    with graph(sweep) as g:
        g.give("value.2.out", lambda x: g.add("Where", "write", x, g.add("Add", x, g.constant(rest))))


@fault(0, "value", 0, strategy="blend")
def the_own_value_is_not_written(sweep: Sweep) -> None:
    with graph(sweep) as g:
        node = next(x for x in writes(g) if x.output[0] == "value.0.out")
        node.input[1] = node.input[2]


@pytest.mark.parametrize(("plant", "place"), fault.cases())
def test_the_check_names_the_first_place(host, plant, place):
    plant(host.of(strategy=place.strategy))
    red(host.run("check", strategy=place.strategy), place)
