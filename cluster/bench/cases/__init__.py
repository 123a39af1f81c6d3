"""The parts of `aerie bench`, one module each, with `measure` and `show`; and `aerie demo`."""
