"""What runs in a Serve replica: the routes in front of a gang, its host, and the streams between the two."""
