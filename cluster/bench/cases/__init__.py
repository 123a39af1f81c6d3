"""What is measured: a module per part of `aerie bench`, with `measure` and `show`."""
