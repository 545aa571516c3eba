"""Comparisons inside ranks."""

from __future__ import annotations

import torch


class Checks:
    """Collects what is wrong instead of stopping one rank alone, which would hang the others."""

    def __init__(self, where):
        self.where, self.bad = where, []

    def equal(self, name, got, expected):
        if got.dtype != expected.dtype or not torch.equal(got, expected):
            self.bad.append((self.where, name, got, expected))

    def true(self, name, condition):
        if not condition:
            self.bad.append((self.where, name))

    def refused(self, name, word, call):
        try:
            call()
            self.bad.append((self.where, name, "no error"))
        except (RuntimeError, ValueError, TypeError) as error:
            if word not in str(error):
                self.bad.append((self.where, name, str(error)))
