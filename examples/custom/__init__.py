"""A data set, a reward and a filter of one's own."""
