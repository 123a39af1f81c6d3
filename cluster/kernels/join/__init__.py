"""The merge of partial attention results."""
