"""`aerie serve`: its flags, the validated plan of a start, and the start and stop of the server; also `aerie keys`."""
