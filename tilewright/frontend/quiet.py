"""Suppresses PyTorch's messages to its own developers during export. The exporter warns of its own deprecated calls, logs tracebacks of errors that
it also raises, and prints the partial graph. A user of the compiler sees the error, in one line; with logging of ``tilewright`` at INFO (`--debug`),
or ``TILEWRIGHT_DEBUG=1``, everything is shown.

All of that, and the tracers of PyTorch, are global to the process: one thread exports at a time, and Dynamo traces on no other meanwhile.
"""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr

from tilewright import settings

ASSIGNED = r"The tensor attributes? (\S*_flat_weights\S* )+(was|were) assigned during export"
"""A warning about a recurrent network's list of its own weights, which a user cannot avoid. Of other attributes the user has to know: calls of the
program do not assign to them."""


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Runs the exporter, on one thread at a time; only warnings and output of the model itself pass through."""
    from torch._dynamo.convert_frame import compile_lock

    shown = settings.debug() or logging.getLogger("tilewright").isEnabledFor(logging.INFO)
    with compile_lock, nullcontext() if shown else _quiet():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.partition(".")[0] == "torch"]
    before = [logger.disabled for logger in loggers]
    printed = io.StringIO()
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings(), redirect_stderr(printed):
            for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
                warnings.simplefilter("ignore", category)
            warnings.filterwarnings("ignore", ASSIGNED, UserWarning)
            yield
    except Exception as error:
        listing = str(getattr(error, "partial_fx_graph", "") or "")
        sys.stderr.write(printed.getvalue().replace(f"{listing}\n", "") if listing else printed.getvalue())
        raise
    else:
        sys.stderr.write(printed.getvalue())
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
