"""What the fork server imports once, before it forks ranks."""

import thinwire  # noqa: F401
