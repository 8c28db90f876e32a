"""`page4 info`."""

from __future__ import annotations

import json

from page4.experiments.cli_options import Json


def info(as_json: Json = False) -> None:
    """Show versions, hardware, the software stack, the shipped checkpoint and the KV formats."""
    from rich.console import Console
    from rich.table import Table

    from page4.experiments.info import collect_info, describe

    record = collect_info()
    table = Table(show_header=False, box=None)
    for name, value in describe(record):
        table.add_row(name, value)
    Console().print(table)
    if as_json:
        print(json.dumps(record))
