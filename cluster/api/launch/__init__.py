"""`aerie serve`: the plan of a start, its flags, and how the server begins and ends."""
