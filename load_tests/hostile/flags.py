"""Flags of `bench hostile`."""

import argparse

from troupellm.load_tests.serve.flags import count

PARTS = ("schemas", "lists", "chats", "bodies")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id; default: a tiny random model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which floods to send")
    parser.add_argument("--clients", type=count, nargs="+", default=[12, 24], help="clients that send a schema each")
    parser.add_argument("--schema-bytes", type=count, default=188_000, help="size of each of their schemas")
    parser.add_argument("--prompts", type=count, default=128, help="prompts of one list")
    parser.add_argument("--bodies", type=count, default=150, help="clients that send a large body each")
    parser.add_argument("--body-bytes", type=count, default=7 * 2**20, help="size of each of their bodies")
    parser.add_argument("--rounds", type=count, default=20, help="short requests of the other key beside each flood")
    parser.add_argument("--serve-arg", action="append", default=[], metavar="FLAG", help="for the server")
    parser.add_argument("--result-json", metavar="FILE")
