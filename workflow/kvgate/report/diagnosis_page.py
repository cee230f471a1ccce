"""A diagnosis as one page without scripts or links. Standard library only."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_OPERATOR = (
    *("operator", "module", "layer", "tensor", "cpu", "isolated_l2", "isolated_cosine", "accumulated_l2"),
    *("accumulated_cosine", "dtype", "golden", "low", "high", "scale", "outside", "saturated", "channels"),
)


def page(body: Mapping[str, Any], picture: bytes, floor: float, top: float) -> str:
    """The page of a diagnosis. picture: a PNG, empty where there is none; floor, top: the L2 at its colours' ends."""
    lines = ["<!doctype html>", "<meta charset=utf-8>", "<title>kvgate diagnosis</title>"]
    lines += ["<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 8px;text-align:right}</style>"]
    lines += [f"<h1>{escape(str(body['row']['strategy']))} {escape(str(body['row']['quant']))}</h1>"]
    lines += [f"<p>{escape(body['sentence'])}</p>"]
    if picture:
        data = base64.b64encode(picture).decode()
        lines += [f'<img alt="error by layer and step" src="data:image/png;base64,{data}">']
        lines += [
            f"<p>Layers down (K above V), steps across: isolated, then forced. Dark: {floor:g}, bright: {top:g}.</p>"
        ]
    accuracy = body.get("accuracy") or {}
    if accuracy.get("note"):
        lines += [f"<p>Operators: {escape(accuracy['note'])}</p>"]
    for which in ("first", "worst"):
        if body.get(f"{which}_operator"):
            rows = [body[f"{which}_operator"], *body[f"{which}_inputs"]]
            title = f"{which.capitalize()} operator off by itself (over {accuracy['limit']:g}), and its inputs"
            lines += _table(title, rows, _OPERATOR)
    if body.get("operators"):
        title = f"The {len(body['operators'])} operators that are most off by themselves, in order"
        lines += _table(title, body["operators"], _OPERATOR)
    for title, name in (("Layers", "layers"), ("Cache tensors", "tensors")):
        if body.get(name):
            lines += _table(title, body[name], list(body[name][0]))
    return "\n".join(lines) + "\n"


def _table(title: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    head = "".join(f"<th>{escape(x.replace('_', ' '))}</th>" for x in names)
    cells = ("".join(f"<td>{escape(_cell(row.get(x)))}</td>" for x in names) for row in rows)
    return [f"<h2>{escape(title)}</h2>", "<table>", f"<tr>{head}</tr>", *(f"<tr>{c}</tr>" for c in cells), "</table>"]


def _cell(value: Any) -> str:
    if isinstance(value, list) and any(x is not None for x in value):
        return " to ".join("" if x is None else f"{x:.4g}" for x in value)
    return "" if value is None or isinstance(value, list) else str(value)
