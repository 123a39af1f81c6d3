"""`aerie bench` and `aerie demo`: measurements that compare several contenders within one run."""
