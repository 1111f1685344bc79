"""The command line.

The parser, and the boundary at which errors become one line; each command is in a file `cli_*`.
PyTorch and the compiler are imported by the commands that need them, so that help, targets and cache answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from tilewright import (
    cli_artifact,
    cli_batch,
    cli_bench,
    cli_cache,
    cli_calibrate,
    cli_compile,
    cli_explain,
    cli_profile,
    cli_records,
    cli_targets,
    cli_train,
    cli_tune,
    cli_verify,
)
from tilewright.cli_model import add_building_options
from tilewright.cli_options import ERROR_CODE, Parser, error_line
from tilewright.cli_output import output_console, quiet
from tilewright.errors import TilewrightError
from tilewright.files import first_line
from tilewright.system.interruption import WORDS

if TYPE_CHECKING:
    from rich.console import Console

Command: TypeAlias = "Callable[[argparse.Namespace, Console], int]"
"""Runs a command with its options, prints to the console, and returns the exit code."""
INTERRUPTED_CODE = 130
EXAMPLES = """examples:
  tilewright compile zoo:resnet18 -o resnet18.zip     compile for this CPU, save
  tilewright compile model.onnx --target h200         for a GPU that is not here
  tilewright explain zoo:mobilenet_v2                 kernels, times and reasons
  tilewright explain zoo:mobilenet_v2 --fusion        merges, with both times
  tilewright explain zoo:resnet18 --code              compiled code, its limits
  tilewright profile zoo:resnet18 --trace trace.json  measured time of regions
  tilewright verify resnet18.zip                      regions against float64
  tilewright bench zoo:resnet18 --against eager,onnxruntime
  tilewright tune zoo:resnet18 --trials 10            measure candidates here
  tilewright calibrate                                measure this CPU
  tilewright targets h200 --sources                   facts and their sources
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Errors are one line on the standard error stream, unless --debug is given."""
    options = argparse.Namespace(debug=False)
    try:
        _parser().parse_args(argv, options)
        code: int = options.command(options, output_console())
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse has printed help or an error
        return stop.code if isinstance(stop.code, int) else ERROR_CODE
    except KeyboardInterrupt:
        print(WORDS, file=sys.stderr)
        return INTERRUPTED_CODE
    except BrokenPipeError:  # the reader of the pipe has closed it
        _silence_output()
        return 0
    except Exception as error:
        if options.debug:
            raise
        print(error_line(_message(error, getattr(options, "model", None))), file=sys.stderr)
        if isinstance(error, OSError):
            _silence_output()
        return ERROR_CODE


def _silence_output() -> None:
    """Drops what remains to be written to a failing standard output, which would fail again when the process ends."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: Exception, subject: object) -> str:
    """Cause and remedy of any error; for an unexpected error also the command's subject."""
    if isinstance(error, TilewrightError):
        return str(error)
    about = f" with {subject}" if subject else ""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return f"the memory does not suffice{about}; use a smaller batch or fewer processes"
    if isinstance(error, OSError):
        return f"{error.filename or 'the system'}: {error.strerror or error}; check the path and the free space"
    return f"unexpected {type(error).__name__}{about}: {first_line(error)}; this is a fault in tilewright, --debug shows where"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tilewright",
        description="A deep-learning compiler that plans instead of searching.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks, warnings and log messages")
    building = Parser(add_help=False, parents=[common])
    add_building_options(building)

    def command(name: str, description: str, add_options: Callable[[Parser], None], run: Command, parent: Parser) -> None:
        text = description[0].upper() + description[1:] + "."
        added = commands.add_parser(name, help=description, description=text, parents=[parent])
        add_options(added)
        added.set_defaults(command=run)

    command("compile", cli_compile.DESCRIPTION, cli_compile.add_options, cli_compile.run, building)
    command("bench", cli_bench.DESCRIPTION, cli_bench.add_options, cli_bench.run, building)
    command("explain", cli_explain.DESCRIPTION, cli_explain.add_options, cli_explain.run, building)
    command("profile", cli_profile.DESCRIPTION, cli_profile.add_options, cli_profile.run, building)
    command("verify", cli_verify.DESCRIPTION, cli_verify.add_options, cli_verify.run, building)
    command("digest", cli_artifact.DESCRIPTION, cli_artifact.add_options, cli_artifact.run_digest, common)
    command("batch", cli_batch.DESCRIPTION, cli_batch.add_options, _quietly(cli_batch.run), common)
    command("tune", cli_tune.DESCRIPTION, cli_tune.add_options, _quietly(cli_tune.run), common)
    command("records", cli_records.DESCRIPTION, cli_records.add_options, _quietly(cli_records.run), common)
    command("train", cli_train.DESCRIPTION, cli_train.add_options, _quietly(cli_train.run), common)
    command("calibrate", cli_calibrate.DESCRIPTION, cli_calibrate.add_options, cli_calibrate.run, common)
    command("targets", cli_targets.DESCRIPTION, cli_targets.add_options, cli_targets.run, common)
    command("cache", cli_cache.DESCRIPTION, cli_cache.add_options, cli_cache.run, common)
    return parser


class _Version(argparse.Action):
    """Reads the version only when it is requested."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import tilewright

        print(f"tilewright {tilewright.__version__}")
        parser.exit()


def _quietly(run: Command) -> Command:
    def command(options: argparse.Namespace, console: Console) -> int:
        with quiet(options.debug):
            return run(options, console)

    return command


if __name__ == "__main__":
    sys.exit(main())
