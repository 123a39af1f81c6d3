"""The HTTP APIs and the Ray Serve application: the path of a request from HTTP to a gang and back."""
