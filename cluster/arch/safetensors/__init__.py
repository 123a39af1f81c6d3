"""What the files of a checkpoint hold by name, type and shape, read from their headers; no tensor is opened."""
