"""Process groups of a gang, NCCL, heartbeats, the device watchdog, and the errors of a lost gang."""
