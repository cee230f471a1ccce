"""Arguments that say how tokens are chosen, where a request does not. Python 3.9."""

from __future__ import annotations

import argparse

from kvgate.serving.bundled import number
from kvgate.serving.sampling import Options


def sampling(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    parser.add_argument("--max-tokens", type=number(int, 1), metavar="N", help="stop after N tokens (default: none)")
    parser.add_argument(
        "--temperature",
        type=number(float, 0, 2),
        default=0.0,
        help="0: the best token (default); above: draw one",
    )
    parser.add_argument("--top-k", type=number(int, 0), default=0, metavar="K", help="of the likeliest K (0: all)")
    parser.add_argument(
        "--top-p", type=number(float, 0, 1), default=1.0, help="of the likeliest that sum to it (1: all)"
    )
    parser.add_argument(
        "--min-p",
        type=number(float, 0, 1),
        default=0.0,
        help="of those with this share of the best one's (0: all)",
    )
    parser.add_argument(
        "--repeat-penalty", type=number(float, 0.01, 10), default=1.0, help="against tokens that came (1: none)"
    )
    parser.add_argument("--seed", type=number(int, 0), help="of the draw: the same one gives the same text")


def chosen(args: argparse.Namespace) -> Options:
    """What was given."""
    return Options(
        args.max_tokens,
        args.temperature,
        args.top_p,
        args.seed,
        args.top_k,
        args.min_p,
        args.repeat_penalty,
    )
