"""An entry of strategies.yaml. Standard library only."""

from typing import Literal, TypedDict


class Decode(TypedDict):
    """What makes the decode graph: the same whatever reads the prompt."""

    module: str  # a folder of strategies/
    capacity: int  # slots
    layout: Literal["rows", "channels"]
    rank: Literal[3, 4]
    packing: Literal["apart", "layer", "model"]
    layers: int | Literal["auto"]  # of a piece; 0: in one piece
    form: Literal["recipe", "plain", "exporter"]


class Strategy(Decode):
    prefill: int  # tokens of a step of the part `prefill`; 0: there is none
