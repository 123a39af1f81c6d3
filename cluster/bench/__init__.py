"""`aerie bench` and `aerie demo`: measurements that compare contenders side by side in one run."""
