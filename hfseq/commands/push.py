"""``hfseq push``: a model directory as one commit on the Hub."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_push(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq push``; they are named as in the training scripts."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a complete output directory")
    parser.add_argument(
        "--hub_model_id", metavar="ID", help="repository, e.g. user/model; default: the name of DIR"
    )
    parser.add_argument(
        "--hub_private_repo", action="store_true", help="make the repository private"
    )
    parser.add_argument(
        "--checkpoint",
        action="store_true",
        help="also push the newest training checkpoint, to go on from elsewhere",
    )
    parser.add_argument(
        "--message", default="Upload with hfseq", metavar="TEXT", help="message of the commit"
    )


def run_push(arguments: argparse.Namespace) -> int:
    """Push a directory as one commit and print its address."""
    from hfseq.hub import push_folder

    url = push_folder(
        arguments.directory,
        arguments.hub_model_id or arguments.directory.resolve().name,
        private=arguments.hub_private_repo,
        message=arguments.message,
        checkpoint=arguments.checkpoint,
    )
    print(url)
    return 0
