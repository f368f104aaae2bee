"""The trainer: configuration, data, model, loop, checkpoints, metrics, launch. Needs `thinwire[train]`."""
