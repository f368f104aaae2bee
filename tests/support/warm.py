"""What the fork server imports once, before it forks ranks."""

import pytest  # noqa: F401

import thinwire
import thinwire.train.warm
import thinwire.train.worker  # noqa: F401
