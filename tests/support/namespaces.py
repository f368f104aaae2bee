"""Tests that need network namespaces: skipped with the reason where they cannot be made."""

from __future__ import annotations

import pytest

from thinwire.bench.network import why_unavailable

needs_namespaces = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
