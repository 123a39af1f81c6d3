"""What makes a step replayable: nothing in it asks the host, nothing in it comes from the host but one copy."""
