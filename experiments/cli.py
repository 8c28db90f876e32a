"""The command `page4`: what its sub-commands are, and how every error becomes one line and a status."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence

import typer
import yaml

from page4.experiments.cli_acceptance import acceptance
from page4.experiments.cli_attribution import attribution
from page4.experiments.cli_autotune import autotune
from page4.experiments.cli_bench import bench
from page4.experiments.cli_calibrate import calibrate
from page4.experiments.cli_capacity import capacity
from page4.experiments.cli_corpus import corpus
from page4.experiments.cli_generate import generate
from page4.experiments.cli_info import info
from page4.experiments.cli_quant_error import quant_error
from page4.experiments.cli_scales import app as scales
from page4.experiments.cli_sm70 import app as sm70
from page4.experiments.cli_throughput import throughput
from page4.experiments.cli_train import train
from page4.kernels.errors import InputError

# Modules of commands import nothing heavy at their top: `page4 --help` must not wait for PyTorch.
app = typer.Typer(
    name="page4",
    help="8-bit KV caches for Qwen4Exp sparse attention with MTP speculative decoding, measured.",
    add_completion=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph, whatever the terminal's width
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("acceptance")(acceptance)
app.command("quant-error")(quant_error)
app.command("throughput")(throughput)
app.command("attribution")(attribution)
app.command("calibrate")(calibrate)
app.command("capacity")(capacity)
app.command("train")(train)
app.command("corpus")(corpus)
app.command("bench")(bench)
app.command("autotune")(autotune)
app.command("generate")(generate)
app.command("info")(info)
app.add_typer(scales, name="scales")
app.add_typer(sm70, name="sm70")

_FROM_THE_START = frozenset({"generate", "info", "scales", "capacity"})
"""Commands that keep nothing when they are interrupted; all others go on where they were."""


@app.callback()
def page4() -> None:
    """8-bit KV caches for Qwen4Exp sparse attention with MTP speculative decoding, measured."""


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status.

    0: done. 2: the input cannot be used; one line on standard error says why. 130: interrupted. Any other
    exception is a defect and keeps its traceback.
    """
    command = typer.main.get_command(app)
    try:
        status = command.main(list(arguments) or ["--help"], prog_name="page4", standalone_mode=False)
    except typer.TyperException as error:
        return _refuse(error.format_message())
    except InputError as error:
        return _refuse(str(error))
    except yaml.YAMLError as error:
        return _refuse(f"not valid YAML: {error}")
    except BrokenPipeError:
        # The reader has gone, as in `page4 info | head`: what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        return _refuse(f"{error.filename or 'writing the results'}: {error.strerror}")
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    if status == 130:  # Typer turns an interrupt into this status
        resumes = not _FROM_THE_START.intersection(arguments[:1])
        print(f"page4: interrupted{', run the same command to resume' if resumes else ''}", file=sys.stderr)
    return status if isinstance(status, int) else 0


def main() -> None:
    """Entry point of the installed command."""
    # Before PyTorch is loaded: threads that spin while they wait take the cores from those that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.formatwarning = _format_warning
    sys.exit(run(sys.argv[1:]))


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Warnings of this package as one line without a place in its code, others as Python writes them."""
    if category.__module__.startswith("page4."):
        return f"page4: warning: {message}\n"
    return _python_format(message, category, filename, lineno, line)


_python_format = warnings.formatwarning


def _refuse(message: str) -> int:
    print(f"page4: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
