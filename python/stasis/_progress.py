"""A bar for `progress=`, by tqdm where that is installed."""

from __future__ import annotations

import importlib
import sys
import time

_FIRST = 1.0  # seconds after which a phase is worth a line


class ProgressBar:
    """Give it as `progress=`: shows how far each phase has come that takes over a second.

    By tqdm, if it is installed; else as one line on standard error, if that is a terminal. Also for a `with`
    statement, which ends the last bar.
    """

    def __init__(self, file=None):
        self._file = sys.stderr if file is None else file
        self._phase = None
        self._start = 0.0
        self._bar = None
        self._line = False
        try:
            self._tqdm = importlib.import_module("tqdm.auto").tqdm
        except ImportError:
            self._tqdm = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __call__(self, phase, done, total):
        if phase != self._phase:
            self.close()
            self._phase, self._start = phase, time.monotonic()
        if time.monotonic() - self._start < _FIRST:
            return
        if self._tqdm is not None:
            self._by_tqdm(done, total)
        elif self._file.isatty():
            share = f"{done / total:4.0%}" if total else f"{time.monotonic() - self._start:3.0f} s"
            self._file.write(f"\r{phase:<12} {share}  {done / 2**20:,.0f} MiB\x1b[K")
            self._file.flush()
            self._line = True

    def _by_tqdm(self, done, total):
        if self._bar is None:
            self._bar = self._tqdm(
                total=total or None, desc=self._phase, unit="B", unit_scale=True, unit_divisor=1024, file=self._file, leave=False
            )
        self._bar.total = total or None
        self._bar.update(done - self._bar.n)

    def close(self):
        """Ends the bar that is shown."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._line:
            self._file.write("\r\x1b[K")
            self._file.flush()
            self._line = False
        self._phase = None
