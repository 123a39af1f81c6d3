"""REST and Ray Serve: the data path from HTTP to a gang and back."""
